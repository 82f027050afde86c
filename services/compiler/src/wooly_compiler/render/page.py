"""Lines of C: how types and numbers are written, and the names of a kernel's values."""

from __future__ import annotations

import math
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Number
from wooly_wis.kernel.ops import FLOATS, rounded

from wooly_compiler.render.dialects import Dialect


class Page:
    """The lines of a source while it is printed.

    Args:
        dialect: the dialect of C.
        types: types of the values that are known so far.

    Attributes:
        d: the dialect.
        lines: the lines so far.
        depth: indentation of the next line, in levels.
        text: text of each value: a name, a number, or an expression in parentheses.
        types: type of each value.
    """

    def __init__(self, dialect: Dialect, types: dict[int, DType]) -> None:
        self.d: Final = dialect
        self.lines: list[str] = []
        self.depth = 1
        self.text: dict[int, str] = {}
        self.types = types

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
            value = rounded(value, dtype)
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


def bare(text: str) -> str:
    """Remove the parentheses around a text that stands alone."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth and k + 1 < len(text):
            return text
    return text[1:-1]
