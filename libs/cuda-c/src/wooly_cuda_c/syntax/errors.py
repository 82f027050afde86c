"""The error of a source."""

from __future__ import annotations

from wooly_wis.errors import WisError


class CudaSourceError(WisError):
    """A source is not valid CUDA C, or uses an unsupported construct.

    Attributes:
        line: line of the source, counted from 1.
    """

    code = "cuda_c.source"

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
