"""Tokens to a tree, by recursive descent. What is not understood is an error with its line."""

from __future__ import annotations

from collections.abc import Sequence

from wooly_cuda_c.syntax.lexer import Token
from wooly_cuda_c.syntax.parser.constants import fold, folded
from wooly_cuda_c.syntax.parser.cursor import MAX_DEPTH
from wooly_cuda_c.syntax.parser.units import UnitParser
from wooly_cuda_c.syntax.preprocess import preprocess
from wooly_cuda_c.syntax.tree import Node, Unit, Written

__all__ = ["MAX_DEPTH", "constant_of_tokens", "fold", "parse", "parse_arguments"]


def parse(text: str) -> Unit:
    """The tree of a source.

    Raises:
        CudaSourceError: it is not understood.
    """
    return UnitParser(preprocess(text)).unit()


def parse_arguments(text: str, unit: Unit) -> list[Written | Node]:
    """Template arguments as they are in a name expression: of ``f<float, 4>`` the part between the brackets.

    Raises:
        CudaSourceError: they are not understood.
    """
    parser = UnitParser(preprocess(text))
    parser.types |= set(unit.aliases) | set(unit.structs)
    return parser.template_arguments("end")


def constant_of_tokens(tokens: Sequence[Token], line: int) -> int:
    """The value of an integer expression of literals, as after ``#if``.

    Raises:
        CudaSourceError: it is none.
    """
    parser = UnitParser([*tokens, Token("end", "the end of the line", line)])
    value = parser.expression()
    parser.expect("the end of the line")
    return folded(value)
