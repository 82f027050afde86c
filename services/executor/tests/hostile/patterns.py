"""Patterns that fill new memory and make unwritten parts of results visible.

`MALLOC_PERTURB_` of glibc fills all memory that a process allocates and frees. The library's own switch fills the memory of
tensors.
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
    """One way to fill new memory.

    Attributes:
        perturb: value of MALLOC_PERTURB_: freed bytes are set to it, allocated ones to its complement; 0: memory is not changed.
        junk: the memory of tensors is filled with 0x7fedbeef, a NaN.
    """

    name: str
    perturb: int
    junk: bool = False


#: No two patterns leave the same byte at any place: bytes are 0xa5 or 0x5a, 0x01 or 0xfe, or those of 0x7fedbeef.
PATTERNS = (Pattern("a5", 90), Pattern("01", 254), Pattern("junk", 0, junk=True))


class _Switch:
    """Replacement for `zero_fill`: while it is off, new memory of tensors is filled with junk."""

    @property
    def value(self) -> bool:
        return zero_fill.value

    @value.setter
    def value(self, on: bool) -> None:
        junk_fill.value = zero_fill.value = False  # the library allows only one of them at a time
        (zero_fill if on else junk_fill).value = True


@contextlib.contextmanager
def junk() -> Iterator[None]:
    """Fill the library's new memory with junk, unless the executor zeroes it."""
    with mock.patch.object(fresh_memory, "zero_fill", _Switch()):
        junk_fill.value = True
        try:
            yield
        finally:
            junk_fill.value = zero_fill.value = False
