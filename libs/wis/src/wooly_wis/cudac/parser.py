"""Tokens to a tree, by recursive descent. What is not understood is an error with its line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from wooly_wis.cudac.errors import CudaSourceError
from wooly_wis.cudac.lexer import Token
from wooly_wis.cudac.preprocess import preprocess
from wooly_wis.cudac.tree import (
    Alias,
    ArrayOf,
    Assign,
    Binary,
    Block,
    Braces,
    Call,
    Cast,
    Conditional,
    Declare,
    Express,
    Function,
    If,
    Index,
    Leave,
    Loop,
    Member,
    Name,
    Named,
    Node,
    Number,
    Param,
    PointerTo,
    ReferenceTo,
    Return,
    SizeOf,
    Struct,
    Switch,
    TemplateParam,
    Unary,
    Unit,
    Written,
)
from wooly_wis.cudac.words import PHRASES, REFUSED, SCALARS, SILENT, TYPES, VECTOR_TYPES

#: Blocks, parentheses and operators inside each other.
MAX_DEPTH: Final = 80
#: How tightly binary operators bind.
BINDS: Final[dict[str, int]] = {
    op: level
    for level, ops in enumerate(("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"), start=1)
    for op in ops.split()
}
_ASSIGN: Final = frozenset(["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="])
_CASTS: Final = frozenset(("static_cast", "reinterpret_cast", "const_cast"))
_PHRASE: Final = frozenset(w for p in PHRASES for w in p)
_CHARS: Final = {"n": 10, "t": 9, "0": 0, "r": 13, "\\": 92, "'": 39, '"': 34}


def parse(text: str) -> Unit:
    """The tree of a source.

    Raises:
        CudaSourceError: it is not understood.
    """
    return _Parser(preprocess(text)).unit()


def parse_arguments(text: str, unit: Unit) -> list[Written | Node]:
    """Template arguments as they are in a name expression: of ``f<float, 4>`` the part between the brackets.

    Raises:
        CudaSourceError: they are not understood.
    """
    parser = _Parser(preprocess(text))
    parser.types |= set(unit.aliases) | set(unit.structs)
    return parser.template_arguments("end")


def constant_of_tokens(tokens: Sequence[Token], line: int) -> int:
    """The value of an integer expression of literals, as after ``#if``.

    Raises:
        CudaSourceError: it is none.
    """
    parser = _Parser([*tokens, Token("end", "the end of the line", line)])
    value = parser.expression()
    parser.expect("the end of the line")
    return _folded(value)


def _folded(node: Node) -> int:
    if isinstance(node, Number):
        return int(node.value)
    if isinstance(node, Unary) and node.op in ("-", "+", "!", "~"):
        value = _folded(node.on)
        return {"-": -value, "+": value, "!": int(not value), "~": ~value}[node.op]
    if isinstance(node, Conditional):
        return _folded(node.then if _folded(node.condition) else node.other)
    if isinstance(node, Binary):
        found = fold(node.op, _folded(node.left), _folded(node.right))
        if found is not None:
            return int(found)
    raise CudaSourceError("this is no constant", node.line)


def fold(op: str, a: float, b: float) -> float | int | None:
    """What a binary operator makes of two numbers; None where it makes none. Integers are not wrapped."""
    whole = isinstance(a, int) and isinstance(b, int)
    if op in ("/", "%"):
        if not b:
            return None
        if not whole:
            return a / b if op == "/" else None
        quotient = abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if op == "/" else int(a) - quotient * int(b)
    if op in ("<<", ">>", "&", "|", "^"):
        x, y = int(a), int(b)
        if not whole or (op in ("<<", ">>") and not 0 <= y < 64):
            return None
        return {"<<": x << y if op == "<<" else 0, ">>": x >> (y & 63), "&": x & y, "|": x | y, "^": x ^ y}[op]
    simple = {
        "+": a + b, "-": a - b, "*": a * b, "<": int(a < b), ">": int(a > b), "<=": int(a <= b), ">=": int(a >= b),
        "==": int(a == b), "!=": int(a != b), "&&": int(bool(a) and bool(b)), "||": int(bool(a) or bool(b)),
    }  # fmt: skip
    return simple.get(op)


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = list(tokens)
        self._at = 0
        self._depth = 0
        self._angles = 0
        self.types: set[str] = set()
        self._functions: set[str] = set()

    # -- words ---------------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> Token:
        return self._tokens[self._at]

    def _ahead(self, n: int = 1) -> Token:
        return self._tokens[min(self._at + n, len(self._tokens) - 1)]

    def _next(self) -> Token:
        token = self._tokens[self._at]
        if token.kind != "end":
            self._at += 1
        return token

    def _is(self, *texts: str) -> bool:
        token = self._tokens[self._at]
        return token.text in texts and token.kind != "string"

    def _take(self, text: str) -> bool:
        if self._is(text):
            self._next()
            return True
        return False

    def expect(self, text: str) -> Token:
        """The next token, which must be this one."""
        # two template lists may end at once
        if text == ">" and self._now.text in (">>", ">>>"):
            token = self._now
            self._tokens[self._at : self._at + 1] = [Token("op", ">", token.line) for _ in token.text]
        if not self._is(text):
            self._refuse_word()
            raise CudaSourceError(f"{text!r} is expected, and there is {self._now.text!r}", self._now.line)
        return self._next()

    def _name(self) -> Token:
        self._refuse_word()
        if self._now.kind != "name":
            raise CudaSourceError(f"a name is expected, and there is {self._now.text!r}", self._now.line)
        return self._next()

    def _refuse_word(self) -> None:
        why = REFUSED.get(self._now.text)
        if why and self._now.kind in ("name", "op"):
            raise CudaSourceError(f"{self._now.text}: {why}", self._now.line)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CudaSourceError(f"nested more than {MAX_DEPTH} deep", self._now.line)

    # -- types ---------------------------------------------------------------------------------------------------------

    def _starts_type(self, n: int = 0) -> bool:
        token = self._ahead(n)
        if token.kind != "name":
            return False
        text = token.text
        if text == "std" and self._ahead(n + 1).text == "::":
            return self._ahead(n + 2).text in TYPES
        return (
            text in _PHRASE or text in TYPES or text in VECTOR_TYPES or text in self.types
            or text in ("const", "void", "auto", "unsigned", "typename", "struct")
        )  # fmt: skip

    def _base(self) -> Written:
        """A type without its stars. Words that change nothing are skipped on both sides."""
        const = False
        words: list[str] = []
        found = ""
        line = self._now.line
        while self._now.kind == "name":
            text = self._now.text
            if text in ("const", "constexpr"):
                const = True
            elif text in SILENT:
                pass
            elif text in _PHRASE and not found:
                words.append(text)
            elif not words and not found and text == "std" and self._ahead().text == "::":
                self._next()
                self._next()
                continue
            elif (
                not words and not found
                and (text in TYPES or text in VECTOR_TYPES or text in self.types or text in ("void", "auto"))
            ):  # fmt: skip
                found = text
            else:
                break
            self._next()
        if words:
            phrase = tuple(sorted(w for w in words if w != "int")) or ("int",)
            if phrase not in PHRASES:
                raise CudaSourceError(f"{' '.join(words)} is no type", line)
            found = PHRASES[phrase]
        if not found:
            self._refuse_word()
            raise CudaSourceError(f"a type is expected, and there is {self._now.text!r}", self._now.line)
        return Named(TYPES.get(found, found), const)

    def _pointers(self, base: Written) -> Written:
        while True:
            if self._take("*"):
                base = PointerTo(base)
            elif self._is("&", "&&"):
                self._next()
                base = ReferenceTo(base)
            elif self._is("const", "volatile", "__restrict__", "__restrict", "restrict"):
                self._next()
            else:
                return base

    def type(self) -> Written:
        """A whole type without a name, as in a cast."""
        found = self._pointers(self._base())
        if self._is("(") and self._ahead().text == "*":
            raise CudaSourceError("pointers to functions are not understood", self._now.line)
        return found

    def _dimensions(self, base: Written) -> Written:
        counts: list[Node | None] = []
        while self._take("["):
            counts.append(None if self._is("]") else self.expression())
            self.expect("]")
        for count in reversed(counts):
            base = ArrayOf(base, count)
        return base

    def template_arguments(self, end: str = ">") -> list[Written | Node]:
        """Types and constants up to a closing bracket."""
        found: list[Written | Node] = []
        self._angles += 1
        while not (self._now.kind == "end" if end == "end" else self._is(end)):
            found.append(self.type() if self._starts_type() else self._binary(8))
            if not self._take(","):
                break
        self._angles -= 1
        if end == "end":
            if self._now.kind != "end":
                raise CudaSourceError(f"{self._now.text!r} in template arguments", self._now.line)
        else:
            self.expect(end)
        return found

    # -- expressions ---------------------------------------------------------------------------------------------------

    def expression(self) -> Node:
        """One expression, commas too."""
        found = self.assignment()
        while self._is(","):
            line = self._next().line
            found = Binary(line, ",", found, self.assignment())
        return found

    def assignment(self) -> Node:
        """One expression without commas."""
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
                    raise CudaSourceError("methods are not understood: use functions", token.line)
            elif token.text in ("++", "--"):
                self._next()
                found = Unary(token.line, "p" + token.text, found)
            elif token.text == "(":
                raise CudaSourceError("only functions can be called, by their names", token.line)
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
                raise CudaSourceError(f"the character {token.text} is not understood", token.line)
            return Number(token.line, str(value), value, "i8")
        if token.kind == "string":
            raise CudaSourceError("strings are not understood", token.line)
        if token.text == "(":
            self._next()
            angles, self._angles = self._angles, 0
            found = self.expression()
            self._angles = angles
            self.expect(")")
            return found
        if token.text == "[":
            raise CudaSourceError("lambdas are not understood: use a function", token.line)
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
                raise CudaSourceError(f"{found.text}::{self._ahead().text} is not understood", found.line)
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

    # -- statements ----------------------------------------------------------------------------------------------------

    def _block(self) -> Block:
        line = self.expect("{").line
        outer = set(self.types)
        body: list[Node] = []
        while not self._is("}"):
            if self._now.kind == "end":
                raise CudaSourceError("a block that does not end", line)
            body.append(self._statement())
        self.types = outer
        self._next()
        return Block(line, body)

    def _statement(self) -> Node:
        self._deeper()
        try:
            return self._statement_of(self._now)
        finally:
            self._depth -= 1

    def _statement_of(self, token: Token) -> Node:
        line = token.line
        self._refuse_word()
        match token.text if token.kind in ("name", "op") else "":
            case "{":
                return self._block()
            case ";":
                self._next()
                return Express(line, None)
            case "if":
                return self._if(line)
            case "for":
                return self._for(line)
            case "while":
                self._next()
                self.expect("(")
                condition = self.expression()
                self.expect(")")
                return Loop(line, None, condition, None, self._statement())
            case "do":
                self._next()
                body = self._statement()
                self.expect("while")
                self.expect("(")
                condition = self.expression()
                self.expect(")")
                self.expect(";")
                return Loop(line, None, condition, None, body, True)
            case "return":
                self._next()
                value: Node | None = None
                if not self._is(";"):
                    value = self._braces() if self._is("{") else self.expression()
                self.expect(";")
                return Return(line, value)
            case "break" | "continue":
                self._next()
                self.expect(";")
                return Leave(line, token.text)
            case "switch":
                return self._switch(line)
            case "using" | "typedef":
                return self._alias()
            case "static_assert":
                return self._skip_call(line)
        if self._starts_declaration():
            return self._declaration(line)
        value = self.expression()
        self.expect(";")
        return Express(line, value)

    def _skip_call(self, line: int) -> Node:
        depth = 0
        while self._now.kind != "end":
            text = self._next().text
            depth += (text == "(") - (text == ")")
            if text == ";" and depth == 0:
                return Express(line, None)
        raise CudaSourceError("a static_assert that does not end", line)

    def _if(self, line: int) -> Node:
        self._next()
        known = self._take("constexpr")
        self.expect("(")
        if self._starts_declaration():
            raise CudaSourceError("a declaration in a condition is not understood", line)
        condition = self.expression()
        self.expect(")")
        then = self._statement()
        other = self._statement() if self._take("else") else None
        return If(line, condition, then, other, known)

    def _for(self, line: int) -> Node:
        self._next()
        self.expect("(")
        init: Node | None = None
        if self._starts_declaration():
            init = self._declaration(line, loop=True)
        else:
            init = None if self._is(";") else Express(line, self.expression())
            self.expect(";")
        condition = None if self._is(";") else self.expression()
        self.expect(";")
        step = None if self._is(")") else self.expression()
        self.expect(")")
        return Loop(line, init, condition, step, self._statement())

    def _switch(self, line: int) -> Node:
        self._next()
        self.expect("(")
        on = self.expression()
        self.expect(")")
        self.expect("{")
        cases: list[tuple[list[Node | None], list[Node]]] = []
        while not self._take("}"):
            labels: list[Node | None] = []
            while self._is("case", "default"):
                label = self._next().text
                labels.append(None if label == "default" else self._binary(1))
                self.expect(":")
            body: list[Node] = []
            while not self._is("case", "default", "}"):
                if self._now.kind == "end":
                    raise CudaSourceError("a switch that does not end", line)
                body.append(self._statement())
            if not labels:
                raise CudaSourceError("a statement before the first case", line)
            cases.append((labels, body))
        return Switch(line, on, cases)

    def _alias(self) -> Alias:
        line = self._next().line
        if self._tokens[self._at - 1].text == "using":
            name = self._name().text
            if name == "namespace":
                raise CudaSourceError(f"using namespace: {REFUSED['namespace']}", line)
            self.expect("=")
            kind = self.type()
        else:
            kind = self.type()
            name = self._name().text
            kind = self._dimensions(kind)
        self.expect(";")
        self.types.add(name)
        return Alias(line, name, kind)

    def _starts_declaration(self) -> bool:
        text = self._now.text
        if text in ("__shared__", "extern", "static", "constexpr", "register", "volatile", "__constant__", "__align__"):
            return True
        if text in SILENT and text != "struct":
            return True
        if not self._starts_type():
            return False
        # a type followed by ( is a conversion, not a declaration
        k = 3 if text == "std" else 1
        return self._ahead(k).text not in ("(", "{") or self._ahead(k).kind == "string"

    def _declaration(self, line: int, loop: bool = False) -> Node:
        shared = extern = constant = known = False
        while True:
            text = self._now.text
            if text in ("__shared__", "extern", "__constant__", "__device__", "constexpr"):
                shared |= text == "__shared__"
                extern |= text == "extern"
                constant |= text == "__constant__"
                known |= text == "constexpr"
                self._next()
            elif text in ("__align__", "alignas"):
                self._next()
                self.expect("(")
                self.expression()
                self.expect(")")
            elif text in SILENT:
                self._next()
            else:
                break
        base = self._base()
        while self._is("__shared__", "__align__"):
            if self._next().text == "__shared__":
                shared = True
            else:
                self.expect("(")
                self.expression()
                self.expect(")")
        found: list[Node] = []
        while True:
            kind = self._pointers(base)
            if self._is("("):
                raise CudaSourceError("pointers to functions are not understood", self._now.line)
            name = self._name()
            kind = self._dimensions(kind)
            init: Node | None = None
            if self._take("="):
                init = self._braces() if self._is("{") else self.assignment()
            elif self._is("{"):
                init = self._braces()
            elif self._is("("):
                self._next()
                init = self.assignment()
                if self._take(","):
                    items = [init, self.assignment()]
                    while self._take(","):
                        items.append(self.assignment())
                    init = Braces(name.line, items)
                self.expect(")")
            if loop and self._is(":"):
                raise CudaSourceError("for over a range is not understood: count", line)
            found.append(Declare(name.line, kind, name.text, init, shared, extern, constant, known))
            if not self._take(","):
                break
        self.expect(";")
        return found[0] if len(found) == 1 else Block(line, found, scope=False)

    # -- the top -------------------------------------------------------------------------------------------------------

    def unit(self) -> Unit:
        """The whole source."""
        found = Unit()
        open_ = 0
        while self._now.kind != "end":
            self._refuse_word()
            if self._is("extern") and self._ahead().kind == "string":
                self._next()
                if self._next().text != '"C"':
                    raise CudaSourceError('only extern "C" is understood', self._now.line)
                open_ += self._take("{")
            elif open_ and self._take("}"):
                open_ -= 1
            elif self._take(";"):
                pass
            elif self._is("using", "typedef"):
                if self._is("typedef") and self._ahead().text == "struct":
                    self._next()
                    self._struct(found, typedef=True)
                    continue
                alias = self._alias()
                found.aliases[alias.name] = alias
            elif self._is("struct") and self._ahead(2).text == "{":
                self._struct(found)
            elif self._is("static_assert"):
                self._skip_call(self._now.line)
            else:
                self._top(found)
        if open_:
            raise CudaSourceError('an extern "C" block that does not end', self._now.line)
        return found

    def _struct(self, unit: Unit, typedef: bool = False) -> None:
        line = self.expect("struct").line
        while self._is("__align__", "alignas"):
            self._next()
            self.expect("(")
            self.expression()
            self.expect(")")
        name = self._name().text if self._now.kind == "name" else ""
        if name:
            self.types.add(name)
        self.expect("{")
        fields: list[tuple[str, Written]] = []
        while not self._take("}"):
            base = self._base()
            while True:
                kind = self._pointers(base)
                field = self._name()
                if self._is("("):
                    raise CudaSourceError("methods are not understood: use functions", field.line)
                fields.append((field.text, self._dimensions(kind)))
                if not self._take(","):
                    break
            if self._is("=", "{"):
                raise CudaSourceError("a field cannot have a value here", self._now.line)
            self.expect(";")
        if typedef:
            name = self._name().text
            self.types.add(name)
        if not name:
            raise CudaSourceError("a struct without a name", line)
        self.expect(";")
        unit.structs[name] = Struct(line, name, fields)

    def _template(self) -> list[TemplateParam]:
        found: list[TemplateParam] = []
        self._next()
        self.expect("<")
        while not self._is(">"):
            default: Written | Node | None = None
            if self._is("typename", "class"):
                self._next()
                if self._is("...") or self._ahead().text == "...":
                    raise CudaSourceError("templates with any number of parameters are not understood", self._now.line)
                name = self._name().text
                self.types.add(name)
                if self._take("="):
                    default = self.type()
                found.append(TemplateParam(name, None, default))
            else:
                kind = self.type()
                name = self._name().text
                if self._take("="):
                    self._angles += 1
                    default = self._binary(8)
                    self._angles -= 1
                found.append(TemplateParam(name, kind, default))
            if not self._take(","):
                break
        self.expect(">")
        return found

    def _top(self, unit: Unit) -> None:
        outer = set(self.types)
        line = self._now.line
        template: list[TemplateParam] = []
        explicit = False
        if self._is("template"):
            if self._ahead().text != "<":
                explicit = True  # an explicit instantiation says nothing that is not known when it is launched
                self._next()
            else:
                template = self._template()
                if self._is("template"):
                    raise CudaSourceError("templates of templates are not understood", line)
                if not template:
                    raise CudaSourceError("specialisations of templates are not understood: use if constexpr", line)
        kernel = device = host = False
        start = self._at
        while True:
            text = self._now.text
            if text in (
                "__global__",
                "__device__",
                "__host__",
                "__launch_bounds__",
                "extern",
                "constexpr",
                "__constant__",
            ):
                kernel |= text == "__global__"
                device |= text == "__device__"
                host |= text == "__host__"
                self._next()
                if text == "__launch_bounds__":
                    self._launch_bounds()
                if text == "extern" and self._now.kind == "string":
                    self._next()
            elif text in SILENT:
                self._next()
            else:
                break
        result = self._pointers(self._base())
        while self._is(
            "__global__", "__device__", "__host__", "__launch_bounds__", "__forceinline__", "__inline__", "inline"
        ):
            text = self._next().text
            kernel |= text == "__global__"
            device |= text == "__device__"
            if text == "__launch_bounds__":
                self._launch_bounds()
        if self._ahead().text not in ("(", "<"):
            self._at = start
            self._variable(unit, line, device)
            self.types = outer | set(unit.aliases)
            return
        name = self._name()
        if explicit:
            while self._now.kind != "end" and not self._take(";"):
                self._next()
            return
        if not kernel and not device:
            if host:
                raise CudaSourceError(f"{name.text} is a function of the host", name.line)
            raise CudaSourceError(f"{name.text} is neither __global__ nor __device__", name.line)
        self._functions.add(name.text)
        params = self._params()
        if self._take(";"):
            self.types = outer
            return
        if self._is("const", "noexcept"):
            self._next()
        function = Function(name.line, name.text, kernel, result, params, template, None)
        function.body = self._block()
        unit.functions.setdefault(name.text, []).append(function)
        self.types = outer

    def _launch_bounds(self) -> None:
        self.expect("(")
        self.expression()
        self.expect(")")

    def _params(self) -> list[Param]:
        self.expect("(")
        found: list[Param] = []
        if self._is("void") and self._ahead().text == ")":
            self._next()
        while not self._is(")"):
            if self._is("..."):
                raise CudaSourceError(REFUSED["va_list"], self._now.line)
            kind = self._pointers(self._base())
            if self._is("("):
                raise CudaSourceError("pointers to functions are not understood", self._now.line)
            if self._now.kind == "name":
                name = self._name()
            else:
                name = Token("name", f"unnamed{len(found)}", self._now.line)
            kind = self._dimensions(kind)
            if isinstance(kind, ArrayOf):
                kind = PointerTo(kind.of)
            if self._is("="):
                raise CudaSourceError("a parameter cannot have a default here", self._now.line)
            found.append(Param(kind, name.text, name.line))
            if not self._take(","):
                break
        self.expect(")")
        return found

    def _variable(self, unit: Unit, line: int, device: bool) -> None:
        found = self._declaration(line)
        for one in found.body if isinstance(found, Block) else [found]:
            assert isinstance(one, Declare)
            base: Written = one.type
            while isinstance(base, ArrayOf):
                base = base.of
            if one.shared or one.extern:
                if one.shared and one.extern:
                    unit.variables.append(one)
                    continue
                raise CudaSourceError(f"{one.name}: shared memory belongs into a kernel", one.line)
            if not (one.constant or one.constexpr or (isinstance(base, Named) and base.const)):
                raise CudaSourceError(f"{one.name}: variables of a source must be constant: pass a tensor", one.line)
            if one.init is None:
                raise CudaSourceError(
                    f"{one.name}: a constant needs a value where it is declared: or pass a tensor", one.line
                )
            unit.variables.append(one)


def _number(token: Token) -> Number:
    text = token.text.replace("'", "")
    whole = re.fullmatch(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)([uUlLzZ]*)", text)
    if whole:
        digits, suffix = whole.group(1), whole.group(2).lower()
        base = 16 if digits[:2].lower() == "0x" else 2 if digits[:2].lower() == "0b" else 8 if digits[0] == "0" else 10
        if suffix not in ("", "u", "l", "ll", "ul", "lu", "ull", "llu") or len(digits) > 80:
            raise CudaSourceError(f"{token.text} is no number", token.line)
        try:
            value = int(digits[2:] if base in (2, 16) else digits, base)
        except ValueError:
            raise CudaSourceError(f"{token.text} is no number", token.line) from None
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
        raise CudaSourceError(f"{token.text} is no number", token.line)
    return Number(token.line, real.group(1), float(real.group(1)), "f32" if real.group(2) else "f64")
