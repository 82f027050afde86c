"""Prints a kernel as C. Two forms, both of the same kernel:

- `simt`, for GPUs: points without lanes are threads; a point with lanes is a work-group and its lanes are the threads.
- `loops`, for CPUs: a work-item goes through a chunk of points, and lanes are an inner loop that becomes vector instructions.

A reduction keeps its order in both: each lane has its accumulator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.kernel import ranges, scalars
from wooly_wis.kernel.ir import (
    Apply,
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
    Statement,
    Store,
    has_lanes,
    walk,
)
from wooly_wis.kernel.laws import Facts, uses, verify
from wooly_wis.kernel.ops import FLOATS, INTS, SIGNED, bounds
from wooly_wis.program import Role

from wooly_compiler.mathlib import Function, function
from wooly_compiler.render.dialects import Dialect

#: Elements that a work-item of the `loops` form goes through, about.
CHUNK: Final = 8192
#: Elements along one dimension from which on it has a loop of its own.
STRETCH: Final = 8
#: Threads of a work-group in the `simt` form, at most.
THREADS: Final = 256


class Form(Enum):
    """How points and lanes become work-items."""

    SIMT = "simt"
    LOOPS = "loops"


class RenderError(WisError):
    """A dialect has no words for a kernel."""

    code = "compiler.render"


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text in some C.

    Attributes:
        name: the kernel's entry point.
        dialect: which C.
        text: the source.
        groups: work-groups of a launch.
        threads: work-items of a group.
    """

    name: str
    dialect: str
    text: str
    groups: int
    threads: int


def render(kernel: Kernel, dialect: Dialect, form: Form) -> Source:
    """The source of a kernel. Its arguments are the arrays, then the scalars.

    Raises:
        KernelError: the kernel breaks a law.
        RenderError: the dialect lacks an operation.
    """
    return _Printer(kernel, dialect, form, verify(kernel)).source()


_INFIX: Final = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE: Final = {"and": "&", "or": "|", "xor": "^"}
_UNSIGNED: Final = {
    DType.I8: DType.U8,
    DType.I16: DType.U16,
    DType.I32: DType.U32,
    DType.I64: DType.U64,
}


class _Printer:
    """The state of one rendering."""

    def __init__(self, kernel: Kernel, dialect: Dialect, form: Form, facts: Facts) -> None:
        self.kernel = kernel
        self.d = dialect
        self.form = form
        self.facts = facts
        self.lines: list[str] = []
        self.depth = 1
        self.helpers: dict[str, str] = {}
        self.text: dict[int, str] = {}
        self.types: dict[int, DType] = dict(facts.types)
        self.dtypes = {m.name: m.dtype for m in (*kernel.arrays, *kernel.scratch)}
        self.numel = {m.name: m.numel for m in (*kernel.arrays, *kernel.scratch)}
        self.scalars = {s.name: s.dtype for s in kernel.scalars}
        self.loaded = {s.array for s in walk(kernel.body) if isinstance(s, (Load, Atomic))}
        self.counts: Counter[int] = _uses(kernel.body)
        self.grouped = has_lanes(kernel)
        self.threads = self._threads()
        self.in_lanes = False
        self.loops = 0
        self.temporaries = 0
        self.constants = {
            s.out: int(s.value) for s in walk(kernel.body) if isinstance(s, Const) and s.dtype is DType.I64
        }
        #: What quotients and remainders of a loop's index are called, where two loops are printed for it.
        self.known: dict[int, str] = {}
        #: Declared at the head of the kernel: OpenCL knows shared memory nowhere else.
        self.shared: list[str] = []

    def _threads(self) -> int:
        if self.form is Form.LOOPS:
            return 1
        if not self.grouped:
            return THREADS
        inside = list(walk(self.kernel.body))
        folding = [s.lanes for s in inside if isinstance(s, Reduce)]
        spread = [min(THREADS, 1 << (s.extent - 1).bit_length()) for s in inside if isinstance(s, Lanes)]
        return max(32, *(folding or spread))

    # -- text --------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def close(self, text: str = "}") -> None:
        self.depth -= 1
        self.line(text)

    def ctype(self, dtype: DType) -> str:
        return self.d.truth if dtype is DType.BOOL else self.d.types[dtype]

    @property
    def long(self) -> str:
        return self.d.types[DType.I64]

    def index(self, n: int) -> str:
        return f"{n}{self.d.long_suffix}"

    def declare(self, value: int, dtype: DType, text: str, *, const: bool = True) -> None:
        name = f"v{value}"
        self.line(f"{'const ' if const else ''}{self.ctype(dtype)} {name} = {text};")
        self.text[value] = name

    def number(self, value: Number, dtype: DType) -> str:
        if dtype is DType.BOOL:
            return "1" if value else "0"
        if dtype in FLOATS:
            value = scalars.rounded(value, dtype)
            if math.isnan(value):
                return self.d.nan[dtype]
            if math.isinf(value):
                return self.d.infinity[dtype] if value > 0 else f"(-{self.d.infinity[dtype]})"
            text = repr(value) + ("f" if dtype is DType.F32 else "")
            return f"({text})" if value < 0 or text.startswith("-") else text
        n = int(value)
        if dtype is DType.I64:
            text = f"(-{n + 1 and -(n + 1)}{self.d.long_suffix} - 1)" if n < 0 else self.index(n)
            return f"(-{-n}{self.d.long_suffix})" if -(1 << 63) < n < 0 else text
        if dtype is DType.U64:
            return f"{n}{self.d.ulong_suffix}"
        if dtype is DType.U32:
            return f"{n}u"
        if dtype is DType.I32 and n == -(1 << 31):
            return "(-2147483647 - 1)"
        return f"({n})" if n < 0 else str(n)

    # -- the frame ---------------------------------------------------------------------------------------------------

    def source(self) -> Source:
        kernel = self.kernel
        groups = self._loops() if self.form is Form.LOOPS else self._simt()
        args = [
            self.d.pointer.format(const="const " if a.role is Role.IN else "", type=self.d.types[a.dtype], name=a.name)
            for a in kernel.arrays
        ]
        args += [f"const {self.d.types[s.dtype]} {s.name}" for s in kernel.scalars]
        head = self.d.kernel.format(name=kernel.name, args=", ".join(args), threads=self.threads)
        body = "\n".join([f"  {s};" for s in self.shared] + self.lines)
        text = self.d.prologue + "".join(f"\n{h}" for h in self.helpers.values()) + f"\n{head} {{\n{body}\n}}\n"
        return Source(kernel.name, self.d.name, text, groups, self.threads)

    def _coordinates(self, flat: str, upto: int) -> None:
        """Coordinates of a point from its number among the first `upto` dimensions."""
        below = 1
        texts: list[str] = []
        for k in reversed(range(upto)):
            extent = self.kernel.space[k]
            text = flat if below == 1 else f"{flat} / {self.index(below)}"
            if k and extent > 1:
                text = f"{text} % {self.index(extent)}" if below == 1 else f"({text}) % {self.index(extent)}"
            texts.append(text if extent > 1 else self.index(0))
            below *= extent
        for point, text in zip(self.kernel.points[:upto], reversed(texts), strict=True):
            if self.counts[point]:
                self.declare(point, DType.I64, text)

    def _simt(self) -> int:
        total = math.prod(self.kernel.space)
        group, thread = f"({self.long}){self.d.group}", f"({self.long}){self.d.thread}"
        if self.grouped:
            self.line(f"const {self.long} t = {thread};")
            if self.kernel.space:
                self.line(f"const {self.long} p = {group};")
                self._coordinates("p", len(self.kernel.space))
            self._scratch()
            self.block(self.kernel.body)
            return total
        self.line(f"const {self.long} p = {group} * {self.index(self.threads)} + {thread};")
        if total % self.threads:
            self.line(f"if (p >= {self.index(total)}) return;")
        self._coordinates("p", len(self.kernel.space))
        self._scratch()
        self.block(self.kernel.body)
        return -(-total // self.threads)

    def _scratch(self) -> None:
        for s in self.kernel.scratch:
            c = self.d.types[s.dtype]
            if self.form is Form.SIMT and self.grouped:
                self.shared.append(self.d.shared.format(type=c, name=s.name, n=s.numel))
            else:
                self.line(f"{c} {s.name}[{s.numel}];")

    def _loops(self) -> int:
        space = self.kernel.space
        if self.grouped or not space:
            return self._loops_over_groups()
        inner, outer = space[-1], math.prod(space[:-1])
        item = f"({self.long}){self.d.group}"
        if inner >= CHUNK:
            parts = -(-inner // CHUNK)
            self.line(f"const {self.long} g = {item};")
            row = "g" if parts == 1 else f"g / {self.index(parts)}"
            if outer > 1:
                self.line(f"const {self.long} p = {row};")
                self._coordinates("p", len(space) - 1)
            else:
                self._zero(len(space) - 1)
            first = "0" if parts == 1 else f"g % {self.index(parts)} * {self.index(CHUNK)}"
            self.line(f"const {self.long} first = {first};")
            last = self.index(inner)
            if parts > 1:
                end = f"first + {self.index(CHUNK)}"
                last = end if inner % CHUNK == 0 else f"({end} < {last} ? {end} : {last})"
            self.line(f"const {self.long} last = {last};")
            self._inner("first", "last")
            return outer * parts
        rows = max(1, CHUNK // inner)
        self._rows(rows, outer)
        self._coordinates("p", len(space) - 1)
        self._inner("0", self.index(inner))
        self.close()
        return -(-outer // rows)

    def _zero(self, upto: int) -> None:
        for point in self.kernel.points[:upto]:
            if self.counts[point]:
                self.declare(point, DType.I64, self.index(0))

    def _rows(self, rows: int, outer: int) -> None:
        self.line(f"const {self.long} g = ({self.long}){self.d.group} * {self.index(rows)};")
        end = f"g + {self.index(rows)}"
        last = end if outer % rows == 0 else f"({end} < {self.index(outer)} ? {end} : {self.index(outer)})"
        self.line(f"const {self.long} end = {last};")
        self.open(f"for ({self.long} p = g; p < end; ++p)")

    def _inner(self, first: str, last: str) -> None:
        point = self.kernel.points[-1]
        self.open(f"for ({self.long} v{point} = {first}; v{point} < {last}; ++v{point})")
        self.text[point] = f"v{point}"
        self._scratch()
        self.block(self.kernel.body)
        self.close()

    def _work(self, block: Block) -> int:
        """Elements that a point goes through, at most."""
        total = 0
        for s in block:
            match s:
                case Lanes() | Reduce():
                    total += s.extent
                case For():
                    low, high = self.facts.intervals[s.lower], self.facts.intervals[s.upper]
                    assert low is not None and high is not None
                    total += max(self._work(s.body), 1) * max(-(-(high[1] - low[0]) // s.step), 1)
                case If():
                    total += max(self._work(s.then), self._work(s.otherwise))
                case _:
                    pass
        return total

    def _loops_over_groups(self) -> int:
        total = math.prod(self.kernel.space)
        work = self._work(self.kernel.body)
        rows = min(total, max(1, CHUNK // max(work, 1)))
        self._scratch()
        self._rows(rows, total)
        self._coordinates("p", len(self.kernel.space))
        self.block(self.kernel.body)
        self.close()
        return -(-total // rows)

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for s in block:
            self.statement(s)

    def statement(self, s: Statement) -> None:
        match s:
            case Const():
                self.types[s.out] = s.dtype
                self.text[s.out] = self.number(s.value, s.dtype)
            case Param():
                text = s.name if self.scalars[s.name] is not DType.BOOL else f"({s.name} != 0)"
                self.text[s.out] = text
            case Apply():
                self.types[s.out] = s.dtype
                if s.out in self.known:
                    self.text[s.out] = self.known[s.out]
                    return
                text = self.apply(s)
                if self.counts[s.out] == 1:
                    self.text[s.out] = f"({text})"
                elif self.counts[s.out]:
                    self.declare(s.out, s.dtype, text)
            case Load():
                self._load(s)
            case Store():
                self._store(s)
            case Atomic():
                self._atomic(s)
            case For():
                self._for(s)
            case Lanes():
                self._lanes(s)
            case Reduce():
                self._reduce(s)
            case If():
                self._if(s)

    def _condition(self, s: Load | Store | Atomic) -> str:
        """When the access is made; empty if always."""
        parts = [self.text[s.mask]] if s.mask is not None else []
        if s.checked:
            unsigned = self.d.types[DType.U64]
            parts.append(f"({unsigned}){self.text[s.index]} < {self.numel[s.array]}{self.d.ulong_suffix}")
        return " && ".join(parts)

    def _load(self, s: Load) -> None:
        dtype = self.dtypes[s.array]
        text = f"{s.array}[{_bare(self.text[s.index])}]"
        if dtype is DType.BOOL:
            text = f"({text} != 0)"
        condition = self._condition(s)
        self.declare(s.out, dtype, f"{condition} ? {text} : 0" if condition else text)

    def _once(self) -> bool:
        """Whether one thread of several must act for all."""
        return self.form is Form.SIMT and self.grouped and not self.in_lanes

    def _store(self, s: Store) -> None:
        text = f"{s.array}[{_bare(self.text[s.index])}] = {_bare(self.text[s.value])};"
        condition = self._condition(s)
        if self._once():
            condition = f"t == 0 && {condition}" if condition else "t == 0"
        self.line(f"if ({condition}) {text}" if condition else text)
        if self._once() and s.array in self.loaded:
            self.line(f"{self.d.barrier};")

    def _atomic(self, s: Atomic) -> None:
        dtype = self.dtypes[s.array]
        text = self.d.atomics.get((s.kind, dtype))
        if text is None:
            raise RenderError(f"{self.d.name} has no atomic {s.kind} of {dtype.label}")
        if any(x.name == s.array for x in self.kernel.scratch) and self.form is Form.LOOPS:
            raise RenderError("atomics on scratch are not printed in the form of loops yet; use an array")
        call = text.format(pointer=f"&{s.array}[{_bare(self.text[s.index])}]", value=_bare(self.text[s.value]))
        condition = self._condition(s)
        name = f"v{s.out}"
        self.text[s.out] = name
        if self._once():
            shared = f"once{s.out}"
            self.shared.append(self.d.shared.format(type=self.ctype(dtype), name=shared, n=1))
            condition = f" && {condition}" if condition else ""
            self.line(f"if (t == 0) {shared}[0] = 0;")
            self.line(f"if (t == 0{condition}) {shared}[0] = {call};")
            self.line(f"{self.d.barrier};")
            self.line(f"const {self.ctype(dtype)} {name} = {shared}[0];")
            return
        self.line(f"{self.ctype(dtype)} {name} = 0;")
        self.line(f"if ({condition}) {name} = {call};" if condition else f"{name} = {call};")

    def _for(self, s: For) -> None:
        for arg, init in zip(s.args, s.inits, strict=True):
            self.declare(arg, self.types[init], _bare(self.text[init]), const=False)
        k = f"v{s.index}"
        self.text[s.index] = k
        lower, upper = _bare(self.text[s.lower]), self.text[s.upper]
        step = f"++{k}" if s.step == 1 else f"{k} += {self.index(s.step)}"
        self.open(f"for ({self.long} {k} = {lower}; {k} < {upper}; {step})")
        self.loops += 1
        self.block(s.body)
        self.loops -= 1
        if s.args:
            self._assign(s.args, s.yields)
        self.close()
        for result, arg in zip(s.results, s.args, strict=True):
            self.text[result] = self.text[arg]

    def _assign(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Assign several at once: all are read before any is written."""
        if len(targets) == 1:
            self.line(f"{self.text[targets[0]]} = {_bare(self.text[sources[0]])};")
            return
        names: list[str] = []
        for source in sources:
            self.temporaries += 1
            names.append(f"n{self.temporaries}")
            self.line(f"const {self.ctype(self.types[source])} {names[-1]} = {_bare(self.text[source])};")
        for target, name in zip(targets, names, strict=True):
            self.line(f"{self.text[target]} = {name};")

    def _stretch(self, s: Lanes | Reduce) -> int:
        """Iterations that go on along one dimension, where the body divides the index into those of several; 0: there is one."""
        found = {self.constants.get(d.args[1], 0) for d in _divisions(s)}
        length = min(found, default=0)
        return length if length >= STRETCH and not s.extent % length else 0

    def _outer_loop(self, s: Lanes | Reduce, length: int) -> None:
        """The loop over stretches. Remainders are then the place within one, and quotients its number."""
        n, first = f"o{s.index}", f"e{s.index}"
        self.open(f"for ({self.long} {n} = 0; {n} < {self.index(s.extent // length)}; ++{n})")
        self.line(f"const {self.long} {first} = {n} * {self.index(length)};")
        for d in _divisions(s):
            by = self.constants.get(d.args[1], 0)
            if d.op == "fmod" and by == length:
                self.known[d.out] = f"i{s.index}"
            elif d.op == "div_trunc" and by == length:
                self.known[d.out] = n
            elif d.op == "div_trunc" and by and by % length == 0:
                self.line(f"const {self.long} v{d.out} = {n} / {self.index(by // length)};")
                self.known[d.out] = f"v{d.out}"

    def _lanes(self, s: Lanes) -> None:
        k = f"v{s.index}"
        self.text[s.index] = k
        stretch = self._stretch(s) if self.form is Form.LOOPS else 0
        if stretch:
            i = f"i{s.index}"
            self._outer_loop(s, stretch)
            self.open(f"for ({self.long} {i} = 0; {i} < {self.index(stretch)}; ++{i})")
            self.line(f"const {self.long} {k} = e{s.index} + {i};")
        elif self.form is Form.LOOPS:
            self.open(f"for ({self.long} {k} = 0; {k} < {self.index(s.extent)}; ++{k})")
        else:
            self.open(f"for ({self.long} {k} = t; {k} < {self.index(s.extent)}; {k} += {self.index(self.threads)})")
        self.in_lanes = True
        self.block(s.body)
        self.in_lanes = False
        self.close()
        if stretch:
            self.close()
        self._after(s.body)

    def _after(self, body: Block) -> None:
        """The barrier at the end of lanes, where somebody reads what they wrote."""
        if self.form is Form.SIMT and any(
            isinstance(w, (Store, Atomic)) and w.array in self.loaded for w in walk(body)
        ):
            self.line(f"{self.d.barrier};")

    def _combine(self, s: Reduce, left: Sequence[str], right: Sequence[str]) -> None:
        """Accumulators `left` take in `right`."""
        for value, name in zip((*s.left, *s.right), (*left, *right), strict=True):
            self.text[value] = name
        self.block(s.combine)
        if len(left) == 1:
            self.line(f"{left[0]} = {_bare(self.text[s.combined[0]])};")
            return
        names: list[str] = []
        for value in s.combined:
            self.temporaries += 1
            names.append(f"n{self.temporaries}")
            self.line(f"const {self.ctype(self.types[value])} {names[-1]} = {_bare(self.text[value])};")
        for target, name in zip(left, names, strict=True):
            self.line(f"{target} = {name};")

    def _reduce(self, s: Reduce) -> None:
        dtypes = [self.types[v] for v in s.inits]
        for value, dtype in zip((*s.left, *s.right), (*dtypes, *dtypes), strict=True):
            self.types[value] = dtype
        inits = [_bare(self.text[v]) for v in s.inits]
        held = [f"a{r}" for r in s.results]
        if self.form is Form.LOOPS:
            self._reduce_loops(s, dtypes, inits, held)
        else:
            self._reduce_simt(s, dtypes, inits, held)

    def _step(self, s: Reduce, held: Sequence[str]) -> None:
        """The body for one element, and its combination with an accumulator."""
        self.in_lanes = True
        self.block(s.body)
        self._combine(s, held, [self.text[v] for v in s.yields])
        self.in_lanes = False

    def _reduce_loops(self, s: Reduce, dtypes: Sequence[DType], inits: Sequence[str], held: Sequence[str]) -> None:
        n, k, long = s.lanes, f"v{s.index}", self.long
        self.text[s.index] = k
        at = [f"{name}[l]" for name in held]
        for name, dtype in zip(held, dtypes, strict=True):
            self.line(f"{self.ctype(dtype)} {name}[{n}];")
        sets = " ".join(f"{a} = {init};" for a, init in zip(at, inits, strict=True))
        self.line(f"for ({long} l = 0; l < {n}; ++l) {{ {sets} }}")
        whole = s.extent - s.extent % n
        stretch = self._stretch(s)
        if stretch:
            self._fold_stretches(s, at, stretch)
            whole = s.extent
        elif whole:
            self.open(f"for ({long} j = 0; j < {self.index(whole)}; j += {n})")
            self.open(f"for ({long} l = 0; l < {n}; ++l)")
            self.line(f"const {long} {k} = j + l;")
            self._step(s, at)
            self.close()
            self.close()
        if whole < s.extent:
            self.open(f"for ({long} l = 0; l < {s.extent - whole}; ++l)")
            self.line(f"const {long} {k} = {self.index(whole)} + l;")
            self._step(s, at)
            self.close()
        if n > 1:
            self.open(f"for ({long} d = {n // 2}; d > 0; d >>= 1)")
            self.open(f"for ({long} l = 0; l < d; ++l)")
            self._combine(s, at, [f"{name}[l + d]" for name in held])
            self.close()
            self.close()
        for result, name, dtype in zip(s.results, held, dtypes, strict=True):
            self.declare(result, dtype, f"{name}[0]")

    def _fold_stretches(self, s: Reduce, at: Sequence[str], stretch: int) -> None:
        """Each stretch in blocks whose elements go to the accumulators in order; it may begin and end within one."""
        n, k, i, first, long = s.lanes, f"v{s.index}", f"i{s.index}", f"e{s.index}", self.long
        self._outer_loop(s, stretch)
        end = f"{first} + {self.index(stretch)}"
        self.open(f"for ({long} j = {first} - {first} % {n}; j < {end}; j += {n})")
        self.line(f"const {long} low = j < {first} ? {first} - j : 0;")
        self.line(f"const {long} high = {end} - j < {n} ? {end} - j : {n};")
        self.open(f"for ({long} l = low; l < high; ++l)")
        self.line(f"const {long} {k} = j + l;")
        self.line(f"const {long} {i} = {k} - {first};")
        self._step(s, at)
        self.close()
        self.close()
        self.close()

    def _reduce_simt(self, s: Reduce, dtypes: Sequence[DType], inits: Sequence[str], held: Sequence[str]) -> None:
        k, n = f"v{s.index}", s.lanes
        self.text[s.index] = k
        shared = [f"s{r}" for r in s.results]
        for name, dtype in zip(shared, dtypes, strict=True):
            self.shared.append(self.d.shared.format(type=self.ctype(dtype), name=name, n=n))
        for name, dtype, init in zip(held, dtypes, inits, strict=True):
            self.line(f"{self.ctype(dtype)} {name} = {init};")
        bound = self.index(s.extent)
        guard = f"t < {n} && " if n < self.threads else ""
        self.open(f"for ({self.long} {k} = t; {guard}{k} < {bound}; {k} += {n})")
        self._step(s, held)
        self.close()
        own = [f"{name}[t]" for name in shared]
        sets = " ".join(f"{a} = {name};" for a, name in zip(own, held, strict=True))
        self.line(f"if (t < {n}) {{ {sets} }}" if n < self.threads else sets)
        self.line(f"{self.d.barrier};")
        if n > 1:
            self.open(f"for ({self.long} d = {n // 2}; d > 0; d >>= 1)")
            self.open("if (t < d)")
            self._combine(s, own, [f"{name}[t + d]" for name in shared])
            self.close()
            self.line(f"{self.d.barrier};")
            self.close()
        for result, name, dtype in zip(s.results, shared, dtypes, strict=True):
            self.declare(result, dtype, f"{name}[0]")
        if self.loops:  # before the next round writes there
            self.line(f"{self.d.barrier};")
        self._after(s.body)

    def _if(self, s: If) -> None:
        for result, value in zip(s.results, s.then_yields, strict=True):
            self.line(f"{self.ctype(self.facts.types[value])} v{result};")
            self.text[result] = f"v{result}"
        self.open(f"if ({_bare(self.text[s.condition])})")
        self.block(s.then)
        if s.results:
            self._assign(s.results, s.then_yields)
        if s.otherwise or s.results:
            self.close("} else {")
            self.depth += 1
            self.block(s.otherwise)
            if s.results:
                self._assign(s.results, s.otherwise_yields)
        self.close()

    # -- operations --------------------------------------------------------------------------------------------------

    def apply(self, s: Apply) -> str:
        types = [self.types[a] for a in s.args]
        args = [self.text[a] for a in s.args]
        own = function(s.op, types[0], s.dtype)
        if own is not None:
            self._function(own)
            return f"{own.name}({_bare(args[0])})"
        if s.op in _COMPARE:
            return f"{args[0]} {_COMPARE[s.op]} {args[1]}"
        if s.op == "select":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if s.op == "isnan":
            return f"{args[0]} != {args[0]}"
        if s.op == "isinf":
            both = self.d.infinity[types[0]]
            return f"{args[0]} == {both} || {args[0]} == -{both}"
        if s.op in ("max", "min"):
            sign = ">" if s.op == "max" else "<"
            # the second where it is not-a-number, for the comparison is false then: but for the first, a processor's own max
            larger = f"{args[0]} {sign} {args[1]} ? {args[0]} : {args[1]}"
            return f"{args[0]} != {args[0]} ? {args[0]} : ({larger})" if s.dtype in FLOATS else larger
        if s.op == "convert":
            return self._convert(args[0], types[0], s.dtype)
        if s.op == "bitcast":
            same = self.d.types[types[0]] == self.d.types[s.dtype]
            return args[0] if same else self.d.bits.format(type=self.d.types[s.dtype], value=_bare(args[0]))
        if s.dtype in FLOATS:
            if s.op in _INFIX:
                return f"{args[0]} {_INFIX[s.op]} {args[1]}"
            if s.op == "neg":
                return f"-{args[0]}"
            builtin = self.d.builtins.get((s.op, s.dtype))
            if builtin is None:
                raise RenderError(f"{self.d.name} has no {s.op} of {s.dtype.label}")
            return builtin.format(*[_bare(a) for a in args])
        return self._integer(s, args)

    def _integer(self, s: Apply, args: Sequence[str]) -> str:
        c = self.d.types[s.dtype]
        if s.op in _BITWISE:
            text = f"{args[0]} {_BITWISE[s.op]} {args[1]}"
            return text if s.dtype is DType.BOOL or s.dtype.itemsize >= 4 else f"({c})({text})"
        if s.dtype is DType.BOOL:
            return f"!{args[0]}"
        if s.op == "not":
            return f"({c})~{args[0]}"
        known = [self.facts.intervals.get(a) for a in s.args]
        if s.op in ("add", "sub", "mul", "neg"):
            if s.op == "neg":
                text = f"-{args[0]}"
            else:
                text = f"{args[0]} {_INFIX[s.op]} {args[1]}"
            if ranges.fits(s.op, s.dtype, known):
                return text if s.dtype.itemsize >= 4 else f"({c})({text})"
            if s.dtype in SIGNED:  # signed overflow is undefined in C; ours wraps around
                u = self.d.types[_UNSIGNED[s.dtype]]
                wide = [f"({u}){a}" for a in args]
                text = f"-{wide[0]}" if s.op == "neg" else f"{wide[0]} {_INFIX[s.op]} {wide[1]}"
            return f"({c})({text})"
        if s.op == "abs":
            if s.dtype not in SIGNED:
                return args[0]
            return f"{args[0]} < 0 ? ({c})(0 - ({self.d.types[_UNSIGNED[s.dtype]]}){args[0]}) : {args[0]}"
        if s.op in ("shl", "shr"):
            width = 8 * s.dtype.itemsize - 1
            by = f"({args[1]} & {width})"
            if s.op == "shl" and s.dtype in SIGNED:
                return f"({c})(({self.d.types[_UNSIGNED[s.dtype]]}){args[0]} << {by})"
            return f"({c})({args[0]} {'<<' if s.op == 'shl' else '>>'} {by})"
        return self._division(s.op, s.dtype, args, known)

    def _division(self, op: str, dtype: DType, args: Sequence[str], known: Sequence[ranges.Interval | None]) -> str:
        """Quotients and remainders. A divisor of 0 or -1 stops a processor, so where they may be there is a test."""
        divisor = known[1]
        numerator = known[0]
        if divisor is not None and divisor[0] > 0 and numerator is not None:
            if op == "fmod":
                return f"{args[0]} % {args[1]}"
            if op == "div_trunc" or numerator[0] >= 0:
                return f"{args[0]} / {args[1]}"
        c = self.d.types[dtype]
        name = f"wooly_{op}_{dtype.label}"
        if name not in self.helpers:
            head = self.d.function.format(result=c, name=name, args=f"{c} a, {c} b")
            signed = dtype in SIGNED
            negated = f"({c})(0 - ({self.d.types[_UNSIGNED[dtype]]})a)" if signed else "a"
            special = f"if (b == -1) return {'0' if op == 'fmod' else negated}; " if signed else ""
            body = {
                "fmod": f"return ({c})(a % b);",
                "div_trunc": f"return ({c})(a / b);",
                "div_floor": f"const {c} q = ({c})(a / b); return ({c})(q - (a % b != 0 && (a < 0) != (b < 0)));",
            }[op]
            self.helpers[name] = f"{head} {{\n  if (b == 0) return 0; {special}\n  {body}\n}}\n"
        return f"{name}({', '.join([_bare(a) for a in args])})"

    def _convert(self, text: str, source: DType, target: DType) -> str:
        if target is DType.BOOL:
            return f"{text} != 0"
        c = self.d.types[target]
        if source in FLOATS and target in INTS:
            name = f"wooly_{source.label}_to_{target.label}"
            if name not in self.helpers:
                low, high = bounds(target)
                # the first number of `source` beyond the type; the ends themselves may not be representable
                beyond = self.number(float(high + 1), source)
                below = self.number(float(low), source)
                head = self.d.function.format(result=c, name=name, args=f"{self.d.types[source]} a")
                ends = (
                    f"a >= {beyond} ? {self.number(high, target)} : a <= {below} ? {self.number(low, target)} : ({c})a"
                )
                self.helpers[name] = f"{head} {{\n  return a != a ? 0 : {ends};\n}}\n"
            return f"{name}({_bare(text)})"
        return f"({c}){text}"

    def _function(self, own: Function) -> None:
        """Print a function of elements, once."""
        if own.name in self.helpers:
            return
        inner = _Printer.__new__(_Printer)
        inner.d, inner.form, inner.kernel = self.d, self.form, self.kernel
        inner.lines, inner.depth, inner.temporaries = [], 1, 0
        inner.helpers = self.helpers
        inner.facts = Facts({}, {})
        inner.constants, inner.known = {}, {}
        inner.text = {k: f"x{k}" if k else "x" for k in range(len(own.args))}
        inner.types = dict(enumerate(own.args))
        inner.counts = _uses(own.body)
        inner.counts[own.result] += 1
        inner.block(own.body)
        args = ", ".join(f"{self.ctype(t)} {inner.text[k]}" for k, t in enumerate(own.args))
        head = self.d.function.format(result=self.ctype(own.dtype), name=own.name, args=args)
        body = "\n".join(inner.lines)
        returned = _bare(inner.text[own.result])
        self.helpers[own.name] = f"{head} {{\n{body}\n  return {returned};\n}}\n"


def _divisions(s: Lanes | Reduce) -> list[Apply]:
    """Quotients and remainders of a loop's index in its body."""
    found = [t for t in s.body if isinstance(t, Apply) and t.op in ("div_trunc", "fmod") and t.dtype is DType.I64]
    return [t for t in found if t.args[0] == s.index]


def _uses(block: Block) -> Counter[int]:
    """How often each value is used; twice where it is used inside of a loop that it is defined outside of."""
    found: Counter[int] = Counter()
    home: dict[int, int] = {}

    def visit(block: Block, at: int, yields: Sequence[int]) -> None:
        for s in block:
            for value in uses(s):
                found[value] += 1 if home.get(value) == at else 2
            match s:
                case Const() | Param() | Apply() | Load() | Atomic():
                    home[s.out] = at
                case For() | Lanes():
                    visit(s.body, id(s.body), s.yields if isinstance(s, For) else ())
                case Reduce():
                    visit(s.body, id(s.body), ())
                    for value in s.yields:  # printed where the combination uses them, maybe more than once
                        found[value] += 2
                    visit(s.combine, id(s.combine), s.combined)
                case If():
                    visit(s.then, id(s.then), s.then_yields)
                    visit(s.otherwise, id(s.otherwise), s.otherwise_yields)
        for value in yields:
            found[value] += 1 if home.get(value) == at else 2

    visit(block, id(block), ())
    # these write an argument's text more than once
    for s in walk(block):
        if isinstance(s, Apply) and s.op in ("isnan", "isinf", "max", "min", "abs"):
            for value in s.args:
                found[value] += 1
        if isinstance(s, For):
            found[s.upper] += 1
        if isinstance(s, (Load, Store, Atomic)) and s.checked:
            found[s.index] += 1
    return found


def _bare(text: str) -> str:
    """Text without the parentheses around it, where it stands alone."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth and k + 1 < len(text):
            return text
    return text[1:-1]
