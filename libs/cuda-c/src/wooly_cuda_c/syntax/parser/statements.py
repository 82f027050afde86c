"""Statements: blocks, branches, loops, declarations of variables."""

from __future__ import annotations

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.lexer import Token
from wooly_cuda_c.syntax.parser.expressions import ExpressionParser
from wooly_cuda_c.syntax.tree import Alias, Block, Braces, Declare, Express, If, Leave, Loop, Node, Return, Switch
from wooly_cuda_c.syntax.words import IGNORED, REFUSED

#: Words before a declaration that say where the variable is stored, or that it is constant.
_STORAGE = ("__shared__", "extern", "__constant__", "__device__", "constexpr")
_ALIGNED = ("__align__", "alignas")


class StatementParser(ExpressionParser):
    """Parses statements, and the declarations among them."""

    def _block(self) -> Block:
        line = self.expect("{").line
        outer = set(self.types)
        body: list[Node] = []
        while not self._is("}"):
            if self._now.kind == "end":
                raise CudaSourceError("the block has no closing brace", line)
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
        raise CudaSourceError("the static_assert has no end", line)

    def _if(self, line: int) -> Node:
        self._next()
        known = self._take("constexpr")
        self.expect("(")
        if self._starts_declaration():
            raise CudaSourceError("a declaration in a condition is not supported", line)
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
                    raise CudaSourceError("the switch has no closing brace", line)
                body.append(self._statement())
            if not labels:
                raise CudaSourceError("the switch has a statement before its first case", line)
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
        if text in IGNORED and text != "struct":
            return True
        if not self._starts_type():
            return False
        # A type followed by ( or { is a conversion, not a declaration.
        k = 3 if text == "std" else 1
        return self._ahead(k).text not in ("(", "{") or self._ahead(k).kind == "string"

    def _declaration(self, line: int, loop: bool = False) -> Node:
        words = self._words(*_STORAGE, *_ALIGNED, *IGNORED)
        base = self._base()
        words |= self._words("__shared__", "__align__")
        shared, extern, constant, known = [w in words for w in ("__shared__", "extern", "__constant__", "constexpr")]
        found: list[Node] = []
        while True:
            kind = self._pointers(base)
            if self._is("("):
                raise CudaSourceError("pointers to functions are not supported", self._now.line)
            name = self._name()
            kind = self._dimensions(kind)
            init = self._initial(name.line)
            if loop and self._is(":"):
                raise CudaSourceError("for over a range is not supported: use a counter", line)
            found.append(Declare(name.line, kind, name.text, init, shared, extern, constant, known))
            if not self._take(","):
                break
        self.expect(";")
        return found[0] if len(found) == 1 else Block(line, found, scope=False)

    def _words(self, *known: str) -> set[str]:
        """Read those of the words `known` that come next, in any order."""
        found: set[str] = set()
        while self._is(*known):
            text = self._next().text
            found.add(text)
            if text in _ALIGNED:
                self.expect("(")
                self.expression()
                self.expect(")")
        return found

    def _initial(self, line: int) -> Node | None:
        """Parse the initial value of a variable, if there is one: after `=`, in braces or in parentheses."""
        if self._take("="):
            return self._braces() if self._is("{") else self.assignment()
        if self._is("{"):
            return self._braces()
        if not self._take("("):
            return None
        init = self.assignment()
        if self._take(","):
            items = [init, self.assignment()]
            while self._take(","):
                items.append(self.assignment())
            init = Braces(line, items)
        self.expect(")")
        return init
