"""A position in the tokens of a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.lexer import Token
from wooly_cuda_c.syntax.words import REFUSED

#: Maximum depth of nested blocks, parentheses and operators. It bounds the parser's recursion.
MAX_DEPTH: Final = 80


class Cursor:
    """A position in a source's tokens, and the names of types that were declared before it."""

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
        """Return the next token, which must be `text`."""
        # `>>` may close two template lists.
        if text == ">" and self._now.text in (">>", ">>>"):
            token = self._now
            self._tokens[self._at : self._at + 1] = [Token("op", ">", token.line) for _ in token.text]
        if not self._is(text):
            self._refuse_word()
            raise CudaSourceError(f"expected {text!r}, found {self._now.text!r}", self._now.line)
        return self._next()

    def _name(self) -> Token:
        self._refuse_word()
        if self._now.kind != "name":
            raise CudaSourceError(f"expected a name, found {self._now.text!r}", self._now.line)
        return self._next()

    def _refuse_word(self) -> None:
        why = REFUSED.get(self._now.text)
        if why and self._now.kind in ("name", "op"):
            raise CudaSourceError(f"{self._now.text}: {why}", self._now.line)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CudaSourceError(
                f"blocks, parentheses or operators are nested deeper than {MAX_DEPTH}", self._now.line
            )
