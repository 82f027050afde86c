"""Reads TTIR, the text of Triton's front end. It reads only the structure, with limits; `ops` knows the operations.

The text is not trusted. It is read line by line, as Triton prints it without locations. Other text is an error with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from wooly_wis.languages import ForeignError

#: Maximum length of a text, in characters.
MAX_TEXT: Final = 1 << 20
#: Maximum number of operations of a text.
MAX_OPS: Final = 20_000
#: Maximum depth of nested regions.
MAX_DEPTH: Final = 32
#: Maximum number of elements of a tensor: Triton's own limit.
MAX_NUMEL: Final = 1 << 20
#: Maximum number of dimensions of a tensor.
MAX_RANK: Final = 32

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|//[^\n]*)
    |(?P<newline>\n)
    |(?P<value>%[A-Za-z0-9_$.-]+(?:[:\#]\d+)?)
    |(?P<label>\^[A-Za-z0-9_]+)
    |(?P<symbol>@[A-Za-z0-9_$.]+)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<type>tensor<(?:\d{1,7}x){0,64}(?:!tt\.ptr<\w{1,16}(?:,\ \d{1,9})?>|\w{1,16})>|!tt\.ptr<\w{1,16}(?:,\ \d{1,9})?>)
    |(?P<arrow>->)
    |(?P<number>0x[0-9A-Fa-f]+|-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)
    |(?P<word>!?[A-Za-z_][A-Za-z0-9_.$]*)
    |(?P<mark>[{}()\[\]<>:,=*\#])""",
    re.VERBOSE,
)
SCALAR_TYPES: Final = ("i1", "i8", "i16", "i32", "i64", "f8E4M3FN", "f8E5M2", "f16", "bf16", "f32", "f64")
_TENSOR = re.compile(r"tensor<((?:\d{1,7}x){0,64})(!tt\.ptr<\w+(?:, \d+)?>|\w+)>")
_POINTER = re.compile(r"!tt\.ptr<(\w+)(?:, \d+)?>")

#: Attributes of dialects that operations may have. They are hints, which a CPU does not need.
_DIALECT_ATTRS: Final = ("tt.cache_policy",)


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar type, or a tensor of scalars.

    Attributes:
        elem: type of the elements, one of `SCALAR_TYPES`.
        shape: shape of a tensor; None for a scalar.
        pointer: whether the elements are pointers to `elem`.
    """

    elem: str
    shape: tuple[int, ...] | None = None
    pointer: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.shape or ():
            n *= size
        return n

    def __str__(self) -> str:
        inner = f"!tt.ptr<{self.elem}>" if self.pointer else self.elem
        return inner if self.shape is None else f"tensor<{''.join(f'{n}x' for n in self.shape)}{inner}>"


@dataclass(eq=False, slots=True)
class Block:
    """Operations in order.

    Attributes:
        label: name of the block in jumps.
        args: names and types of the block's arguments.
        ops: the operations.
    """

    label: str = ""
    args: list[tuple[str, Type]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


Attr = int | float | bool | str | tuple[int, ...]


@dataclass(eq=False, slots=True)
class Op:
    """One operation.

    Attributes:
        name: such as ``arith.addi``.
        line: line number in the text.
        results: names; several results are ``%9#0``, ``%9#1``.
        operands: names, in the order of the text.
        words: the other tokens, in order.
        types: types, in the order of the text.
        arrow: number of types before ``->``; -1 without an arrow.
        attrs: named attributes.
        regions: lists of blocks.
        targets: of a jump: labels, each with the operands that it passes.
    """

    name: str
    line: int
    results: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    types: list[Type] = field(default_factory=list)
    arrow: int = -1
    attrs: dict[str, Attr] = field(default_factory=dict)
    regions: list[list[Block]] = field(default_factory=list)
    targets: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The operation's position, for messages."""
        return f"{self.name} in line {self.line} of its text"


@dataclass(eq=False, slots=True)
class Function:
    """A function: its name, its parameters and its blocks."""

    name: str
    args: list[tuple[str, Type]]
    blocks: list[Block]


def type_of(text: str, line: int) -> Type:
    """Return the type that a text names.

    Raises:
        ForeignError: the type is not supported.
    """
    shape: tuple[int, ...] | None = None
    found = _TENSOR.fullmatch(text)
    if found is not None:
        shape = tuple([int(n) for n in found[1].split("x")[:-1]])
        text = found[2]
        numel = 1
        for n in shape:
            numel *= n
        if len(shape) > MAX_RANK or not 0 < numel <= MAX_NUMEL:
            raise ForeignError(f"line {line}: a tensor has {numel} elements, at most {MAX_NUMEL} are allowed")
    pointer = _POINTER.fullmatch(text)
    elem = pointer[1] if pointer is not None else text
    if elem not in SCALAR_TYPES:
        raise ForeignError(f"line {line}: the type {elem[:40]} is not supported on this device")
    return Type(elem, shape, pointer is not None)


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> Iterator[_Token]:
    line, at = 1, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ForeignError(f"line {line}: this is not TTIR: {text[at : at + 20]!r}")
        kind, at = str(found.lastgroup), found.end()
        if kind == "newline":
            yield _Token(kind, "\n", line)
            line += 1
        elif kind != "blank":
            yield _Token(kind, found.group(), line)
    yield _Token("newline", "\n", line)
    yield _Token("end", "", line)


class Reader:
    """Parses one text by recursive descent."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise ForeignError(f"the text has {len(text)} characters, at most {MAX_TEXT} are allowed")
        self._tokens = list(_tokens(text))
        self._at = 0
        self._ops = 0

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _peek(self, ahead: int = 0) -> _Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _next(self) -> _Token:
        token = self._peek()
        self._at += token.kind != "end"
        return token

    def _take(self, text: str) -> bool:
        if self._peek().text == text and self._peek().kind != "string":
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._wrong(f"expected {text!r}")

    def _wrong(self, why: str) -> ForeignError:
        token = self._peek()
        return ForeignError(f"line {token.line}: {why}, found {token.text[:40]!r}")

    def _lines(self) -> None:
        while self._peek().kind == "newline":
            self._at += 1

    # -- structure ---------------------------------------------------------------------------------------------------

    def functions(self) -> list[Function]:
        """Return all functions of the module."""
        self._lines()
        self._expect("module")
        while self._peek().kind in ("word", "symbol"):
            self._next()
            if self._peek().text == "{" and self._peek(1).kind != "newline":
                self._dict()
        self._expect("{")
        found: list[Function] = []
        self._lines()
        while not self._take("}"):
            found.append(self._function())
            self._lines()
        self._lines()
        if self._peek().kind != "end":
            raise self._wrong("expected the end of the text")
        return found

    def _function(self) -> Function:
        self._expect("tt.func")
        if self._peek().text in ("public", "private"):
            self._next()
        name = self._next()
        if name.kind != "symbol":
            raise self._wrong("expected a function's name")
        self._expect("(")
        args = self._typed(")")
        if self._peek().kind == "arrow":  # a called function; its return shows what it returns
            while self._peek().text not in ("attributes", "{"):
                if self._next().kind == "end":
                    raise self._wrong("expected a function's body")
        if self._take("attributes"):
            self._dict()
        return Function(name.text[1:], args, self._region(0))

    def _typed(self, end: str) -> list[tuple[str, Type]]:
        found: list[tuple[str, Type]] = []
        while not self._take(end):
            if found:
                self._expect(",")
            token = self._next()
            if token.kind != "value":
                raise self._wrong("expected a value's name")
            self._expect(":")
            found.append((token.text, self._type()))
            if self._peek().text == "{":
                self._dict()
        return found

    def _type(self) -> Type:
        token = self._next()
        if token.kind not in ("type", "word"):
            raise self._wrong("expected a type")
        return type_of(token.text, token.line)

    def _region(self, depth: int) -> list[Block]:
        """Read a region, which is ``{``, a newline, blocks and ``}``."""
        if depth > MAX_DEPTH:
            raise self._wrong(f"regions are nested deeper than {MAX_DEPTH}")
        self._expect("{")
        self._expect("\n")
        blocks = [Block()]
        self._lines()
        while not self._take("}"):
            if self._peek().kind == "label":
                label = self._next().text
                args = self._typed(")") if self._take("(") else []
                self._expect(":")
                self._expect("\n")
                if len(blocks) == 1 and not blocks[0].ops and not blocks[0].label:
                    blocks.pop()
                blocks.append(Block(label, args))
            else:
                blocks[-1].ops.append(self._op(depth))
            self._lines()
        return blocks

    def _op(self, depth: int) -> Op:
        self._ops += 1
        if self._ops > MAX_OPS:
            raise self._wrong(f"the text has more than {MAX_OPS} operations")
        results: list[str] = []
        if self._peek().kind == "value":
            name, _, count = self._next().text.partition(":")
            n = int(count) if count else 0
            if n > 64:
                raise self._wrong("the operation has more than 64 results")
            results = [f"{name}#{k}" for k in range(n)] if n else [name]
            while self._take(","):
                results.append(self._next().text)
            self._expect("=")
        token = self._next()
        if token.kind not in ("word", "string"):
            raise self._wrong("expected an operation")
        op = Op(token.text.strip('"'), token.line, results)
        while self._peek().kind != "newline":
            self._part(op, depth)
        self._next()
        return op

    def _part(self, op: Op, depth: int) -> None:
        token = self._peek()
        if token.kind == "end":
            raise self._wrong("the text ends within an operation")
        if token.text == "{" and self._peek(1).kind == "newline":
            op.regions.append(self._region(depth + 1))
        elif token.text == "{":
            op.attrs.update(self._dict())
        elif token.text == "<" and self._peek(1).text == "{":
            self._next()
            op.attrs.update(self._dict())
            self._expect(">")
        elif token.kind == "value":
            op.operands.append(self._next().text)
        elif token.kind == "label":
            label, passed = self._next().text, []
            if self._take("("):
                while not self._take(")"):
                    part = self._next()
                    if part.kind == "value":
                        passed.append(part.text)
                    elif part.kind in ("newline", "end"):
                        raise self._wrong("the jump has no closing parenthesis")
            op.targets.append((label, passed))
        elif token.kind == "type" or (token.kind == "word" and token.text in SCALAR_TYPES):
            op.types.append(self._type())
        elif token.kind == "arrow":
            self._next()
            op.arrow = len(op.types)
        else:
            op.words.append(self._next().text)

    def _dict(self) -> dict[str, Attr]:
        found: dict[str, Attr] = {}
        self._expect("{")
        while not self._take("}"):
            if found:
                self._expect(",")
            name = self._next()
            if name.kind not in ("word", "string"):
                raise self._wrong("expected an attribute's name")
            found[name.text.strip('"')] = self._attr() if self._take("=") else True
        return found

    def _dialect_attr(self) -> str:
        """The text of an attribute of a dialect after its mark, such as `#tt.cache_policy<eviction_policy = evict_last>`."""
        name = self._next().text
        if name not in _DIALECT_ATTRS:
            raise self._wrong(f"the attribute #{name[:60]} is not supported")
        parts, depth = ["#", name], 0
        while depth or self._peek().text == "<":
            token = self._next()
            if token.kind == "end":
                raise self._wrong("expected the end of an attribute")
            depth += (token.text == "<") - (token.text == ">")
            parts.append(token.text)
        return "".join(parts)

    def _dense(self) -> tuple[int, ...]:
        """The numbers of an attribute of a tensor after its mark, such as `dense<[16, 1]> : tensor<2xi32>`."""
        self._expect("<")
        numbers = []
        while not self._take(">"):
            part = self._next()
            if part.kind == "number" and re.fullmatch(r"-?\d{1,18}", part.text):
                numbers.append(int(part.text))
            elif part.text not in (",", "[", "]"):
                raise self._wrong("expected a number")
        self._expect(":")
        self._type()
        return tuple(numbers)

    def _attr(self) -> Attr:
        token = self._next()
        value: Attr
        if token.text == "array":
            self._expect("<")
            self._next()
            numbers: list[int] = []
            if self._take(":"):
                while not self._take(">"):
                    part = self._next()
                    if part.kind == "number" and re.fullmatch(r"-?\d{1,18}", part.text):
                        numbers.append(int(part.text))
                    elif part.text != ",":
                        raise self._wrong("expected a number")
            else:
                self._expect(">")
            return tuple(numbers)
        if token.text == "#":
            return self._dialect_attr()
        if (
            token.text == "dense"
        ):  # what Triton says of several dimensions: `tt.divisibility = dense<[16, 1]> : tensor<2xi32>`
            return self._dense()
        if token.kind == "number":
            try:
                value = int(token.text, 0) if re.fullmatch(r"-?\d{1,18}|0x\w{1,16}", token.text) else float(token.text)
            except ValueError:
                raise self._wrong("expected a number") from None
        elif token.text in ("true", "false"):
            value = token.text == "true"
        elif token.kind in ("string", "word"):
            value = token.text.strip('"')
        else:
            raise self._wrong("expected an attribute's value")
        if self._take(":"):
            self._next()
        return value


def read(text: str) -> list[Function]:
    """Return the functions of a module.

    Raises:
        ForeignError: the text is not TTIR, or exceeds a limit.
    """
    return Reader(text).functions()
