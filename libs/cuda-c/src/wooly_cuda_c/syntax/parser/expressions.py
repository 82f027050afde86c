"""Expressions: operators, calls, casts, literals."""

from __future__ import annotations

import re
from typing import Final

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.lexer import Token
from wooly_cuda_c.syntax.parser.types import TypeParser
from wooly_cuda_c.syntax.tree import (
    Assign,
    Binary,
    Braces,
    Call,
    Cast,
    Conditional,
    Index,
    Member,
    Name,
    Node,
    Number,
    SizeOf,
    Unary,
)
from wooly_cuda_c.syntax.words import REFUSED, SCALARS

#: Precedence of binary operators.
BINDS: Final[dict[str, int]] = {
    op: level
    for level, ops in enumerate(("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"), start=1)
    for op in ops.split()
}
_ASSIGN: Final = frozenset(["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="])
_CASTS: Final = frozenset(("static_cast", "reinterpret_cast", "const_cast"))
_CHARS: Final = {"n": 10, "t": 9, "0": 0, "r": 13, "\\": 92, "'": 39, '"': 34}


class ExpressionParser(TypeParser):
    """Parses expressions by precedence."""

    def expression(self) -> Node:
        """Parse one expression, including commas."""
        found = self.assignment()
        while self._is(","):
            line = self._next().line
            found = Binary(line, ",", found, self.assignment())
        return found

    def assignment(self) -> Node:
        """Parse one expression without commas."""
        self._deeper()
        found = self._binary(1)
        if self._is("?"):
            line = self._next().line
            then = self.expression()
            self.expect(":")
            found = Conditional(line, found, then, self.assignment())
        elif self._now.kind == "op" and self._now.text in _ASSIGN:
            token = self._next()
            value = self._braces() if self._is("{") else self.assignment()
            found = Assign(token.line, token.text[:-1], found, value)
        self._depth -= 1
        return found

    def _binary(self, least: int) -> Node:
        left = self._unary()
        while True:
            op = self._now.text
            level = BINDS.get(op, 0) if self._now.kind == "op" else 0
            if level < least or (self._angles and op in (">", ">>")) or not level:
                self._refuse_launch()
                return left
            line = self._next().line
            self._deeper()
            left = Binary(line, op, left, self._binary(level + 1))
            self._depth -= 1

    def _refuse_launch(self) -> None:
        if self._now.text == "<<<":
            raise CudaSourceError(f"<<<: {REFUSED['<<<']}", self._now.line)

    def _unary(self) -> Node:
        self._deeper()
        token = self._now
        found: Node
        if token.kind == "op" and token.text in ("-", "+", "!", "~", "*", "&", "++", "--"):
            self._next()
            found = Unary(token.line, token.text, self._unary())
        elif token.text == "(" and self._starts_type(1):
            self._next()
            to = self.type()
            self.expect(")")
            found = Cast(token.line, to, self._unary(), "c")
        elif token.text == "sizeof":
            self._next()
            if self._is("(") and self._starts_type(1):
                self._next()
                found = SizeOf(token.line, self.type())
                self.expect(")")
            else:
                found = SizeOf(token.line, self._unary())
        else:
            found = self._postfix(self._primary())
        self._depth -= 1
        return found

    def _postfix(self, found: Node) -> Node:
        while True:
            token = self._now
            if token.kind != "op":
                return found
            if token.text == "[":
                self._next()
                angles, self._angles = self._angles, 0
                found = Index(token.line, found, self.expression())
                self._angles = angles
                self.expect("]")
            elif token.text in (".", "->"):
                self._next()
                found = Member(token.line, found, self._name().text, token.text == "->")
                if self._is("("):
                    raise CudaSourceError("methods are not supported: use functions", token.line)
            elif token.text in ("++", "--"):
                self._next()
                found = Unary(token.line, "p" + token.text, found)
            elif token.text == "(":
                raise CudaSourceError("only functions can be called, and only by name", token.line)
            else:
                return found

    def _primary(self) -> Node:
        token = self._now
        if token.kind == "number":
            return _number(self._next())
        if token.kind == "char":
            self._next()
            inner = token.text[1:-1]
            value = ord(inner) if len(inner) == 1 else _CHARS.get(inner[1:], -1) if inner[0] == "\\" else -1
            if not 0 <= value < 128:
                raise CudaSourceError(f"the character {token.text} is not supported", token.line)
            return Number(token.line, str(value), value, "i8")
        if token.kind == "string":
            raise CudaSourceError("strings are not supported", token.line)
        if token.text == "(":
            self._next()
            angles, self._angles = self._angles, 0
            found = self.expression()
            self._angles = angles
            self.expect(")")
            return found
        if token.text == "[":
            raise CudaSourceError("lambdas are not supported: use a function", token.line)
        if token.text in ("true", "false"):
            self._next()
            return Number(token.line, str(int(token.text == "true")), int(token.text == "true"), "b1")
        if token.text in _CASTS:
            self._next()
            self.expect("<")
            to = self.type()
            self.expect(">")
            self.expect("(")
            inside = self.expression()
            self.expect(")")
            return Cast(token.line, to, inside, token.text)
        if self._starts_type():
            base = self._base()
            if self._is("{"):
                return Cast(token.line, base, self._braces(), "call")
            self.expect("(")
            value_node = None if self._is(")") else self.expression()
            self.expect(")")
            return Cast(token.line, base, value_node, "call")
        name = self._qualified()
        if self._is("<") and name.name in self._functions:
            self._next()
            name.template = self.template_arguments()
        if self._take("("):
            args = []
            angles, self._angles = self._angles, 0
            while not self._is(")"):
                args.append(self.assignment())
                if not self._take(","):
                    break
            self._angles = angles
            self.expect(")")
            return Call(token.line, name, args)
        return name

    def _qualified(self) -> Name:
        token = self._now
        if token.text == "::":
            self._next()
        found = self._name()
        while self._is("::"):
            if found.text not in ("std",):
                raise CudaSourceError(f"{found.text}::{self._ahead().text} is not supported", found.line)
            self._next()
            found = self._name()
        return Name(token.line, found.text)

    def _braces(self) -> Braces:
        line = self.expect("{").line
        self._deeper()
        items: list[Node] = []
        while not self._is("}"):
            items.append(self._braces() if self._is("{") else self.assignment())
            if not self._take(","):
                break
        self.expect("}")
        self._depth -= 1
        return Braces(line, items)


def _number(token: Token) -> Number:
    text = token.text.replace("'", "")
    whole = re.fullmatch(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)([uUlLzZ]*)", text)
    if whole:
        digits, suffix = whole.group(1), whole.group(2).lower()
        base = 16 if digits[:2].lower() == "0x" else 2 if digits[:2].lower() == "0b" else 8 if digits[0] == "0" else 10
        if suffix not in ("", "u", "l", "ll", "ul", "lu", "ull", "llu") or len(digits) > 80:
            raise CudaSourceError(f"{token.text} is not a valid number", token.line)
        try:
            value = int(digits[2:] if base in (2, 16) else digits, base)
        except ValueError:
            raise CudaSourceError(f"{token.text} is not a valid number", token.line) from None
        if value >= 1 << 64:
            raise CudaSourceError(f"{token.text} has more than 64 bits", token.line)
        wide, unsigned = "l" in suffix, "u" in suffix
        order = ["i32", "u32", "i64", "u64"]
        allowed = [k for k in order if not (wide and k in ("i32", "u32"))]
        allowed = [k for k in allowed if (k[0] == "u") or not unsigned]
        if base == 10 and not unsigned:
            allowed = [k for k in allowed if k[0] == "i"] or allowed
        for kind in allowed:
            if value < 1 << (SCALARS[kind][0] * 8 - (kind[0] == "i")):
                return Number(token.line, str(value), value, kind)
        return Number(token.line, str(value), value, "u64")
    real = re.fullmatch(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([fF]?)", text)
    if real is None or len(text) > 400:
        raise CudaSourceError(f"{token.text} is not a valid number", token.line)
    return Number(token.line, real.group(1), float(real.group(1)), "f32" if real.group(2) else "f64")
