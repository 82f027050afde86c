"""How much freed memory the C library keeps in this process, for the executors of CPUs.

The device's memory is this process's memory, and the library's operators allocate and free their results all the time. By
default, glibc gives a result's pages back to the system when it is freed, and the next result gets new pages, with a fault and
zeros for each. In a training step with tensors of some MiB, that is a fifth of the time.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

#: Maximum bytes of freed memory that stay at the end of the heap.
KEPT = 256 << 20
#: Larger blocks come from the system each time, and go back to it. glibc itself grows its threshold up to this number.
MAPPED_FROM = 32 << 20
#: Parameters of `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Variables by which people set these parameters themselves.
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed(memory: int, environment: Mapping[str, str] = os.environ) -> int:
    """Let the C library keep some freed memory for the next blocks. Returns the bytes that it may keep; 0: nothing was changed,
    because the library is not glibc, or the environment sets these parameters.

    Call it before other threads start. They then share one heap: a heap of a thread's own has at most 64 MiB, and gives all of it
    back when it is empty.

    Args:
        memory: bytes of the device's memory. At most a sixteenth is kept.
        environment: the process's variables.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in environment for name in _OWN):
        return 0
    kept = min(KEPT, memory // 16)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    wanted = ((_TRIM_THRESHOLD, kept), (_MMAP_THRESHOLD, MAPPED_FROM), (_ARENA_MAX, 1))
    return kept if all(mallopt(name, value) for name, value in wanted) else 0


def give_back() -> None:
    """Give all freed memory back to the system, also what a small block at the end of the heap holds back."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
