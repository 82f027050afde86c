"""Parses WIS assembly into a program, for tests. `wooly_wis.assembly` writes this text and has its grammar.

The parser does not know the meaning of opcodes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from wooly_wis.assembly import VERSION, row_major
from wooly_wis.codec import MAX_DEPTH, MAX_DIMS, encode_form
from wooly_wis.dtypes import BY_LABEL
from wooly_wis.errors import EncodeError
from wooly_wis.program import (
    Attr,
    Form,
    Instruction,
    Operand,
    OperandRef,
    ParamKind,
    ParamRef,
    Program,
    Role,
    Symbol,
    View,
)

KINDS = {kind.name.lower(): kind for kind in ParamKind}
_CONSTANTS: dict[str, Attr] = {"none": None, "true": True, "false": False, "inf": math.inf}
_T = TypeVar("_T")


class AssemblyError(ValueError):
    """The text is not WIS assembly.

    Attributes:
        line: line number, from 1.
        column: column, from 1.
    """

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|;[^\n]*)
    |(?P<newline>\n)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<number>0x[0-9a-fA-F]+|-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|-inf)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    |(?P<mark>[%\#$&<>()\[\]{},=:+])""",
    re.VERBOSE,
)


class _Token:
    __slots__ = ("column", "kind", "line", "text")

    def __init__(self, kind: str, text: str, line: int, column: int) -> None:
        self.kind = kind
        self.text = text
        self.line = line
        self.column = column


def _tokens(text: str) -> Iterator[_Token]:
    line, start, at = 1, 0, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise AssemblyError(f"unexpected character {text[at]!r}", line, at - start + 1)
        kind = str(found.lastgroup)
        if kind != "blank":
            yield _Token(kind, found.group(), line, at - start + 1)
        at = found.end()
        if kind == "newline":
            line, start = line + 1, at
    yield _Token("newline", "\n", line, at - start + 1)
    yield _Token("end", "", line, at - start + 1)


class Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        #: Operands of the current line, and their slots.
        self._operands: list[Operand] = []
        self._slots: list[int] = []

    def program(self) -> Program:
        """Parse the whole text."""
        self._skip_newlines()
        if self._next().text != "wis" or self._next().text != VERSION:
            raise self._error(f"a program starts with 'wis {VERSION}'", back=1)
        forms: list[Form] = []
        index: dict[bytes, int] = {}
        body: list[Instruction] = []
        self._expect("\n")
        self._skip_newlines()
        while self._peek().kind != "end":
            token = self._peek()
            form, slots = self._line()
            try:
                raw = encode_form(form)
            except EncodeError as e:
                raise AssemblyError(str(e), token.line, token.column) from e
            if raw not in index:
                index[raw] = len(forms)
                forms.append(form)
            body.append(Instruction(index[raw], slots))
            self._expect("\n")
            self._skip_newlines()
        return Program(tuple(forms), tuple(body))

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        if token.kind != "end":
            self._at += 1
        return token

    def _error(self, message: str, back: int = 0) -> AssemblyError:
        token = self._tokens[max(self._at - back, 0)]
        return AssemblyError(message, token.line, token.column)

    def _take(self, text: str) -> bool:
        token = self._peek()
        if token.text == text and token.kind in ("mark", "newline", "name"):
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._take(text):
            found = self._peek()
            shown = repr(found.text) if found.kind != "newline" else "the end of the line"
            raise self._error(f"expected {'the end of the line' if text == chr(10) else repr(text)}, found {shown}")

    def _skip_newlines(self) -> None:
        while self._take("\n"):
            pass

    def _name(self) -> str:
        """Parse a name, bare or quoted."""
        token = self._next()
        if token.kind == "name":
            return token.text
        if token.kind == "string":
            return self._unquoted(token)
        raise self._error(f"expected a name, found {token.text!r}", back=1)

    def _unquoted(self, token: _Token) -> str:
        try:
            return str(json.loads(token.text))
        except ValueError as e:
            raise AssemblyError(f"bad string {token.text[:40]}", token.line, token.column) from e

    def _integer(self, *, low: int = -(1 << 63)) -> int:
        token = self._next()
        if token.kind != "number" or not re.fullmatch(r"0x[0-9a-fA-F]{1,16}|-?[0-9]{1,20}", token.text):
            raise self._error(f"expected an integer, found {token.text[:40]!r}", back=1)
        value = int(token.text, 0 if token.text.startswith("0x") else 10)
        if value < low:
            raise self._error(f"{value} is negative; the smallest value here is {low}", back=1)
        return value

    # -- lines -------------------------------------------------------------------------------------------------------

    def _line(self) -> tuple[Form, tuple[int, ...]]:
        self._operands, self._slots = [], []
        results: list[tuple[int, View | None]] = []
        if self._peek().text == "%":
            results.append(self._slot_and_view())
            while self._take(","):
                results.append(self._slot_and_view())
            self._expect("=")
        quoted = self._peek().kind == "string"
        name = self._name()
        params: list[ParamKind] = []
        if self._take("<"):
            params = self._list(self._kind, ">")
        attrs: dict[str, Attr] = {}
        if self._take("("):
            if quoted or "." not in name:
                raise self._error("only a library operator such as aten.add.Tensor can have parentheses", back=1)
            args, kwargs = self._call_arguments()
            attrs = {"name": name, "args": args, "kwargs": kwargs}
            name = "extern"
        elif self._peek().text in ("%", "&", "out"):
            self._operand()
            while self._take(","):
                self._operand()
        if self._take("{"):
            for key, value in self._list(self._attribute, "}"):
                if key in attrs:
                    raise self._error(f"attribute {key!r} occurs twice", back=1)
                attrs[key] = value
        operands = (*self._operands, *[Operand(Role.OUT, view) for _, view in results])
        slots = (*self._slots, *[slot for slot, _ in results])
        return Form(name, operands, tuple(params), tuple(sorted(attrs.items(), key=lambda pair: pair[0]))), slots

    def _call_arguments(self) -> tuple[tuple[Attr, ...], tuple[tuple[str, Attr], ...]]:
        args: list[Attr] = []
        kwargs: list[tuple[str, Attr]] = []
        while not self._take(")"):
            if args or kwargs:
                self._expect(",")
            following = self._tokens[min(self._at + 1, len(self._tokens) - 1)]
            if self._peek().kind in ("name", "string") and following.text == "=" and following.kind == "mark":
                key = self._name()
                self._expect("=")
                kwargs.append((key, self._value(0, inline=True)))
            elif kwargs:
                raise self._error("an argument without a name must not follow an argument with a name")
            else:
                args.append(self._value(0, inline=True))
        return tuple(args), tuple(kwargs)

    def _attribute(self) -> tuple[str, Attr]:
        key = self._name()
        self._expect("=")
        return key, self._value(0)

    def _kind(self) -> ParamKind:
        name = self._name()
        if name not in KINDS:
            raise self._error(f"{name!r} is not a kind of param; use one of {', '.join(KINDS)}", back=1)
        return KINDS[name]

    def _list(self, item: Callable[[], _T], end: str) -> list[_T]:
        found: list[_T] = []
        while not self._take(end):
            if found:
                self._expect(",")
            found.append(item())
        return found

    # -- operands and values -----------------------------------------------------------------------------------------

    def _operand(self) -> int:
        """Parse one operand of the current line, and return its index."""
        role = Role.INOUT if self._take("&") else Role.OUT if self._take("out") else Role.IN
        slot, view = self._slot_and_view()
        self._operands.append(Operand(role, view))
        self._slots.append(slot)
        return len(self._operands) - 1

    def _slot_and_view(self) -> tuple[int, View | None]:
        self._expect("%")
        slot = self._integer(low=0)
        if slot >= 1 << 32:
            raise self._error("the number of a slot must fit into 32 bits", back=1)
        token = self._peek()
        if token.kind != "name":
            return slot, None
        dtype = BY_LABEL.get(self._name())
        if dtype is None:
            raise self._error(f"{token.text!r} is not a dtype", back=1)
        self._expect("[")
        sizes = tuple(self._list(self._integer, "]"))
        strides = tuple(self._list(self._integer, ")")) if self._take("(") else row_major(sizes)
        if len(strides) != len(sizes) or len(sizes) > MAX_DIMS:
            raise self._error(
                f"a view has {len(sizes)} sizes and {len(strides)} strides; both numbers must be equal and at most {MAX_DIMS}",
                back=1,
            )
        offset = self._integer(low=0) if self._take("+") else 0
        return slot, View(dtype, sizes, strides, offset)

    def _value(self, depth: int, *, inline: bool = False) -> Attr:
        if depth > MAX_DEPTH:
            raise self._error(f"a value is nested deeper than {MAX_DEPTH}")
        token = self._peek()
        if inline and token.text in ("%", "&"):
            return OperandRef(self._operand())
        self._next()
        if token.kind == "number":
            return self._number(token)
        following = self._peek()
        if token.kind in ("name", "string") and following.kind == "mark" and following.text == ":":
            self._next()
            return Symbol(self._unquoted(token) if token.kind == "string" else token.text, self._name())
        if token.kind == "string":
            return self._unquoted(token)
        if token.text == "[":
            return tuple(self._list(lambda: self._value(depth + 1, inline=inline), "]"))
        if token.text in ("#", "$"):
            ref = self._integer(low=0)
            return OperandRef(ref) if token.text == "#" else ParamRef(ref)
        if token.kind == "name":
            return self._word(token)
        raise self._error(f"expected a value, found {token.text!r}", back=1)

    def _word(self, token: _Token) -> Attr:
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        if token.text in BY_LABEL:
            return BY_LABEL[token.text]
        if token.text == "nan":
            if not self._take("("):
                return math.nan
            bits = self._integer(low=0)
            self._expect(")")
            value = float(struct.unpack("<d", struct.pack("<Q", bits & (1 << 64) - 1))[0])
            if value == value:
                raise AssemblyError(f"{bits:#x} are not the bits of a NaN", token.line, token.column)
            return value
        if token.text == "complex":
            self._expect("(")
            real = self._float()
            self._expect(",")
            imag = self._float()
            self._expect(")")
            return complex(real, imag)
        raise AssemblyError(f"{token.text!r} is not a value; a string needs quotes", token.line, token.column)

    def _number(self, token: _Token) -> int | float:
        if token.text == "-inf":
            return -math.inf
        if token.text.startswith("0x") or token.text.lstrip("-").isdigit():
            self._at -= 1
            return self._integer()
        return float(token.text)

    def _float(self) -> float:
        token = self._peek()
        value = self._value(0)
        if not isinstance(value, float):
            raise AssemblyError("expected a number with a fraction", token.line, token.column)
        return value


def assemble(text: str) -> Program:
    """Parse WIS assembly into a program. The program is not verified.

    Raises:
        AssemblyError: the text is not WIS assembly; the error names line and column.
    """
    return Parser(text).program()
