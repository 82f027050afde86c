"""The canonical text of a kernel. A kernel has exactly one text. Reading the text gives the same kernel. The digest covers the
text.

    wooly.kernel 1
    kernel scale
    in x f32[100]
    out y f32[100]
    scalar w f32
    space %0 < 100 {
      %1 = load x[%0]
      %2 = scalar w
      %3 = mul f32 %1, %2
      store y[%0] = %3
    }

One statement per line:

    %v = const DTYPE NUMBER             %v = scalar NAME                %v = OP DTYPE %a, %b
    %v = load A[%i] [if %m] [checked]   store A[%i] = %a [if %m] [checked]   %v = atomic KIND A[%i], %a [if %m] [checked]
    [%r, … =] for %i = %lower to %upper step N [with %arg = %init, …] { … [yield %a, …] }
    lanes %i < N { … }
    %r, … = reduce %i < N lanes L from %init, … { … yield %a, … } combine %l, … with %r, … { … yield %a, … }
    [%r, … =] if %c { … [yield …] } else { … [yield …] }
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Final

from wooly_wis.dtypes import BY_LABEL, DType
from wooly_wis.errors import WisError
from wooly_wis.kernel.ir import (
    Apply,
    Array,
    Atomic,
    Block,
    Const,
    For,
    If,
    Kernel,
    Lanes,
    Load,
    Number,
    Param,
    Reduce,
    Scalar,
    Scratch,
    Statement,
    Store,
)
from wooly_wis.kernel.laws import MAX_DEPTH
from wooly_wis.program import Role

HEADER: Final = "wooly.kernel 1"
MAX_TEXT: Final = 16 << 20
_ROLES: Final = {Role.IN: "in", Role.OUT: "out", Role.INOUT: "inout"}


class KernelTextError(WisError):
    """A text is not a kernel.

    Attributes:
        line: number of the line with the fault, counted from 1.
    """

    code = "wis.kernel-text"

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


def digest(kernel: Kernel) -> bytes:
    """The 32-byte digest that names a kernel: BLAKE2b over its text."""
    return hashlib.blake2b(write(kernel).encode(), digest_size=32).digest()


# -- writing -------------------------------------------------------------------------------------------------------------


def write(kernel: Kernel) -> str:
    """The text of a kernel."""
    lines = [HEADER, f"kernel {kernel.name}"]
    lines += [f"{_ROLES[a.role]} {a.name} {a.dtype.label}[{a.numel}]" for a in kernel.arrays]
    lines += [f"scalar {s.name} {s.dtype.label}" for s in kernel.scalars]
    lines += [f"scratch {s.name} {s.dtype.label}[{s.numel}]" for s in kernel.scratch]
    space = ", ".join(f"%{p} < {n}" for p, n in zip(kernel.points, kernel.space, strict=True))
    lines.append(f"space {space} {{" if space else "space {")
    _write_block(kernel.body, lines, 1)
    lines.append("}")
    return "\n".join(lines) + "\n"


def _list(values: tuple[int, ...]) -> str:
    return ", ".join([f"%{v}" for v in values])


def _number(value: Number) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return repr(value)


def _guard(s: Load | Store | Atomic) -> str:
    return (f" if %{s.mask}" if s.mask is not None else "") + (" checked" if s.checked else "")


def _write_block(block: Block, lines: list[str], depth: int, yields: tuple[int, ...] = ()) -> None:
    pad = "  " * depth
    for s in block:
        _write(s, lines, depth, pad)
    if yields:
        lines.append(f"{pad}yield {_list(yields)}")


def _write(s: Statement, lines: list[str], depth: int, pad: str) -> None:
    match s:
        case Const():
            lines.append(f"{pad}%{s.out} = const {s.dtype.label} {_number(s.value)}")
        case Param():
            lines.append(f"{pad}%{s.out} = scalar {s.name}")
        case Apply():
            lines.append(f"{pad}%{s.out} = {s.op} {s.dtype.label} {_list(s.args)}")
        case Load():
            lines.append(f"{pad}%{s.out} = load {s.array}[%{s.index}]{_guard(s)}")
        case Store():
            lines.append(f"{pad}store {s.array}[%{s.index}] = %{s.value}{_guard(s)}")
        case Atomic():
            lines.append(f"{pad}%{s.out} = atomic {s.kind} {s.array}[%{s.index}], %{s.value}{_guard(s)}")
        case For():
            head = f"{_list(s.results)} = " if s.results else ""
            carried = ", ".join(f"%{a} = %{i}" for a, i in zip(s.args, s.inits, strict=True))
            carried = f" with {carried}" if carried else ""
            lines.append(f"{pad}{head}for %{s.index} = %{s.lower} to %{s.upper} step {s.step}{carried} {{")
            _write_block(s.body, lines, depth + 1, s.yields)
            lines.append(pad + "}")
        case Lanes():
            lines.append(f"{pad}lanes %{s.index} < {s.extent} {{")
            _write_block(s.body, lines, depth + 1)
            lines.append(pad + "}")
        case Reduce():
            head = f"{_list(s.results)} = reduce %{s.index} < {s.extent} lanes {s.lanes} from {_list(s.inits)}"
            lines.append(f"{pad}{head} {{")
            _write_block(s.body, lines, depth + 1, s.yields)
            lines.append(f"{pad}}} combine {_list(s.left)} with {_list(s.right)} {{")
            _write_block(s.combine, lines, depth + 1, s.combined)
            lines.append(pad + "}")
        case If():
            lines.append(f"{pad}{_list(s.results) + ' = ' if s.results else ''}if %{s.condition} {{")
            _write_block(s.then, lines, depth + 1, s.then_yields)
            lines.append(pad + "} else {")
            _write_block(s.otherwise, lines, depth + 1, s.otherwise_yields)
            lines.append(pad + "}")


# -- reading -------------------------------------------------------------------------------------------------------------

_V = r"%(\d{1,9})"
_VS = r"(%\d{1,9}(?:, %\d{1,9})*)"
_WORD = r"([a-z_][a-z0-9_]{0,62})"
_INT = r"(\d{1,19})"
_TAIL = r"(?: if %(\d{1,9}))?( checked)?"
_MEMORY = re.compile(rf"(in|out|inout|scratch) {_WORD} ([a-z0-9]+)\[{_INT}\]")
_SCALAR = re.compile(rf"scalar {_WORD} ([a-z0-9]+)")
_KERNEL = re.compile(rf"kernel {_WORD}")
_SPACE = re.compile(rf"space (%\d{{1,9}} < {_INT}(?:, %\d{{1,9}} < \d{{1,19}})* )?\{{")
_CONST = re.compile(rf"{_V} = const ([a-z0-9]+) (\S{{1,40}})")
_PARAM = re.compile(rf"{_V} = scalar {_WORD}")
_LOAD = re.compile(rf"{_V} = load {_WORD}\[{_V}\]{_TAIL}")
_STORE = re.compile(rf"store {_WORD}\[{_V}\] = {_V}{_TAIL}")
_ATOMIC = re.compile(rf"{_V} = atomic {_WORD} {_WORD}\[{_V}\], {_V}{_TAIL}")
_FOR = re.compile(
    rf"(?:{_VS} = )?for {_V} = {_V} to {_V} step {_INT}(?: with (%\d{{1,9}} = %\d{{1,9}}(?:, %\d{{1,9}} = %\d{{1,9}})*))? \{{"
)
_LANES = re.compile(rf"lanes {_V} < {_INT} \{{")
_REDUCE = re.compile(rf"{_VS} = reduce {_V} < {_INT} lanes {_INT} from {_VS} \{{")
_COMBINE = re.compile(rf"\}} combine {_VS} with {_VS} \{{")
_IF = re.compile(rf"(?:{_VS} = )?if {_V} \{{")
_YIELD = re.compile(rf"yield {_VS}")
_APPLY = re.compile(rf"{_V} = {_WORD} ([a-z0-9]+) {_VS}")
_FLOAT = re.compile(r"-?(?:\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf)|nan")
_WHOLE = re.compile(r"-?\d{1,20}")


def read(text: str) -> Kernel:
    """Parse a kernel's text. `laws.verify`, not this function, checks the laws.

    Raises:
        KernelTextError: names the line.
    """
    if len(text) > MAX_TEXT:
        raise KernelTextError(f"the text has {len(text)} characters, the limit is {MAX_TEXT}", 1)
    kernel = _Reader(text).kernel()
    if write(kernel) != text:
        raise KernelTextError("the text is not in canonical form", 1)
    return kernel


def _ids(text: str | None) -> tuple[int, ...]:
    return tuple([int(v) for v in re.findall(r"%(\d+)", text)]) if text else ()


class _Reader:
    """A cursor over lines."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.at = 0

    def fail(self, message: str) -> KernelTextError:
        return KernelTextError(message, self.at + 1)

    @property
    def line(self) -> str:
        if self.at >= len(self.lines):
            raise self.fail("the text ends within the kernel")
        return self.lines[self.at].strip(" ")

    def expect(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.fullmatch(self.line)
        if found is None:
            raise self.fail(f"{self.line[:60]!r} cannot be parsed here")
        self.at += 1
        return found

    def accept(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.fullmatch(self.line)
        if found is not None:
            self.at += 1
        return found

    def dtype(self, label: str) -> DType:
        found = BY_LABEL.get(label)
        if found is None:
            raise self.fail(f"dtype {label!r} does not exist")
        return found

    def kernel(self) -> Kernel:
        if self.line != HEADER:
            raise self.fail(f"a kernel must start with {HEADER!r}")
        self.at += 1
        name = self.expect(_KERNEL)[1]
        arrays: list[Array] = []
        scalars: list[Scalar] = []
        scratch: list[Scratch] = []
        roles = {text: role for role, text in _ROLES.items()}
        while True:
            m = self.accept(_MEMORY)
            if m is not None:
                dtype = self.dtype(m[3])
                if m[1] == "scratch":
                    scratch.append(Scratch(m[2], dtype, int(m[4])))
                else:
                    arrays.append(Array(m[2], dtype, int(m[4]), roles[m[1]]))
                continue
            m = self.accept(_SCALAR)
            if m is None:
                break
            scalars.append(Scalar(m[1], self.dtype(m[2])))
        pairs = re.findall(r"%(\d+) < (\d+)", self.expect(_SPACE)[1] or "")
        body, _ = self.block(0)
        self.expect(re.compile(r"\}"))
        if self.lines[self.at :] != [""]:
            raise self.fail("extra text follows the kernel")
        return Kernel(
            name,
            tuple(arrays),
            tuple(scalars),
            tuple(scratch),
            tuple([int(n) for _, n in pairs]),
            tuple([int(v) for v, _ in pairs]),
            body,
        )

    def block(self, depth: int) -> tuple[Block, tuple[int, ...]]:
        """Statements up to a line that starts with a closing brace, and the values that they yield."""
        if depth > MAX_DEPTH:
            raise self.fail(f"blocks are nested deeper than {MAX_DEPTH} levels, which is the limit")
        made: list[Statement] = []
        while not self.line.startswith("}"):
            m = self.accept(_YIELD)
            if m is not None:
                if not self.line.startswith("}"):
                    raise self.fail("a yield must be the last statement of a block")
                return tuple(made), _ids(m[1])
            made.append(self.statement(depth))
        return tuple(made), ()

    def statement(self, depth: int) -> Statement:
        m = self.accept(_CONST)
        if m is not None:
            dtype = self.dtype(m[2])
            return Const(int(m[1]), dtype, self.number(m[3], dtype))
        m = self.accept(_PARAM)
        if m is not None:
            return Param(int(m[1]), m[2])
        m = self.accept(_LOAD)
        if m is not None:
            return Load(int(m[1]), m[2], int(m[3]), int(m[4]) if m[4] else None, bool(m[5]))
        m = self.accept(_STORE)
        if m is not None:
            return Store(m[1], int(m[2]), int(m[3]), int(m[4]) if m[4] else None, bool(m[5]))
        m = self.accept(_ATOMIC)
        if m is not None:
            mask = int(m[6]) if m[6] else None
            return Atomic(int(m[1]), m[2], m[3], int(m[4]), int(m[5]), mask, bool(m[7]))
        return self.compound(depth)

    def compound(self, depth: int) -> Statement:
        m = self.accept(_FOR)
        if m is not None:
            carried = _ids(m[6])
            body, yields = self.block(depth + 1)
            self.expect(re.compile(r"\}"))
            return For(
                _ids(m[1]), int(m[2]), int(m[3]), int(m[4]), int(m[5]), carried[::2], carried[1::2], body, yields
            )
        m = self.accept(_LANES)
        if m is not None:
            body, _ = self.block(depth + 1)
            self.expect(re.compile(r"\}"))
            return Lanes(int(m[1]), int(m[2]), body)
        m = self.accept(_REDUCE)
        if m is not None:
            body, yields = self.block(depth + 1)
            c = self.expect(_COMBINE)
            combine, combined = self.block(depth + 1)
            self.expect(re.compile(r"\}"))
            return Reduce(
                _ids(m[1]),
                int(m[2]),
                int(m[3]),
                int(m[4]),
                _ids(m[5]),
                body,
                yields,
                _ids(c[1]),
                _ids(c[2]),
                combine,
                combined,
            )
        m = self.accept(_IF)
        if m is not None:
            then, then_yields = self.block(depth + 1)
            self.expect(re.compile(r"\} else \{"))
            otherwise, otherwise_yields = self.block(depth + 1)
            self.expect(re.compile(r"\}"))
            return If(_ids(m[1]), int(m[2]), then, then_yields, otherwise, otherwise_yields)
        m = self.expect(_APPLY)
        return Apply(int(m[1]), m[2], self.dtype(m[3]), _ids(m[4]))

    def number(self, text: str, dtype: DType) -> Number:
        if dtype is DType.BOOL and text in ("true", "false"):
            return text == "true"
        if dtype.kind == "float" and _FLOAT.fullmatch(text):
            return float(text)
        if _WHOLE.fullmatch(text) and dtype.kind in ("int", "uint"):
            return int(text)
        raise self.fail(f"{text[:40]!r} is not a number of dtype {dtype.label}")
