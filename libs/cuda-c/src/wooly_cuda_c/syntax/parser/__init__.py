"""Parses tokens to a tree by recursive descent. An unsupported construct is an error with its line."""

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
    """Parse a source.

    Raises:
        CudaSourceError: the source has an error or an unsupported construct.
    """
    return UnitParser(preprocess(text)).unit()


def parse_arguments(text: str, unit: Unit) -> list[Written | Node]:
    """Parse template arguments: of ``f<float, 4>``, the text between the brackets.

    Raises:
        CudaSourceError: the text has an error.
    """
    parser = UnitParser(preprocess(text))
    parser.types |= set(unit.aliases) | set(unit.structs)
    return parser.template_arguments("end")


def constant_of_tokens(tokens: Sequence[Token], line: int) -> int:
    """Return the value of an integer expression of literals, as after ``#if``.

    Raises:
        CudaSourceError: the expression is not constant.
    """
    parser = UnitParser([*tokens, Token("end", "the end of the line", line)])
    value = parser.expression()
    parser.expect("the end of the line")
    return folded(value)
