"""Types: names, pointers, arrays, arguments of templates."""

from __future__ import annotations

from typing import Final

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.parser.cursor import Cursor
from wooly_cuda_c.syntax.tree import ArrayOf, Named, Node, PointerTo, ReferenceTo, Written
from wooly_cuda_c.syntax.words import IGNORED, PHRASES, TYPES, VECTOR_TYPES

_PHRASE: Final = frozenset(w for p in PHRASES for w in p)


class TypeParser(Cursor):
    """Parses types. `ExpressionParser` parses the expressions in them."""

    def expression(self) -> Node:
        """Parse one expression, including commas."""
        raise NotImplementedError

    def _binary(self, least: int) -> Node:
        raise NotImplementedError

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
        """Parse a type without its stars. Words without effect are skipped before and after it."""
        const = False
        words: list[str] = []
        found = ""
        line = self._now.line
        while self._now.kind == "name":
            text = self._now.text
            if text in ("const", "constexpr"):
                const = True
            elif text in IGNORED:
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
                raise CudaSourceError(f"{' '.join(words)} is not a type", line)
            found = PHRASES[phrase]
        if not found:
            self._refuse_word()
            raise CudaSourceError(f"expected a type, found {self._now.text!r}", self._now.line)
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
        """Parse a complete type without a name, as in a cast."""
        found = self._pointers(self._base())
        if self._is("(") and self._ahead().text == "*":
            raise CudaSourceError("pointers to functions are not supported", self._now.line)
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
        """Parse types and constants up to a closing bracket."""
        found: list[Written | Node] = []
        self._angles += 1
        while not (self._now.kind == "end" if end == "end" else self._is(end)):
            found.append(self.type() if self._starts_type() else self._binary(8))
            if not self._take(","):
                break
        self._angles -= 1
        if end == "end":
            if self._now.kind != "end":
                raise CudaSourceError(f"unexpected {self._now.text!r} in template arguments", self._now.line)
        else:
            self.expect(end)
        return found
