"""Patterns that fresh memory is filled with, so that what was never written is seen.

`MALLOC_PERTURB_` of glibc fills all that a process allocates and frees; the library's own switch fills the memory of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from wooly_executor.runtime import fresh_memory
from wooly_executor.runtime.torch_private import junk_fill, zero_fill


@dataclass(frozen=True)
class Pattern:
    """One way to fill fresh memory.

    Attributes:
        perturb: value of MALLOC_PERTURB_: freed bytes are set to it, allocated ones to its complement; 0: they are left alone.
        junk: tensors' memory is filled with 0x7fedbeef, which is a NaN.
    """

    name: str
    perturb: int
    junk: bool = False


#: No two of them leave the same byte anywhere: bytes are 0xa5 or 0x5a, 0x01 or 0xfe, or those of 0x7fedbeef.
PATTERNS = (Pattern("a5", 90), Pattern("01", 254), Pattern("junk", 0, junk=True))


class _Switch:
    """`zero_fill`, where all memory of tensors that is not zeroed is full of junk."""

    @property
    def value(self) -> bool:
        return zero_fill.value

    @value.setter
    def value(self, on: bool) -> None:
        junk_fill.value = zero_fill.value = False  # the library wants at most one of them
        (zero_fill if on else junk_fill).value = True


@contextlib.contextmanager
def junk() -> Iterator[None]:
    """The library's fresh memory is full of junk, unless the executor has it zeroed."""
    with mock.patch.object(fresh_memory, "zero_fill", _Switch()):
        junk_fill.value = True
        try:
            yield
        finally:
            junk_fill.value = zero_fill.value = False
