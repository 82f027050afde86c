"""Pinned host memory that the executor can access: the part of a channel's shared memory behind its rings.

A tensor in it is uploaded and downloaded with one copy, which the executor makes. The memory is that of the connection which was
opened last; other pinned tensors are in ordinary memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
from wooly_bus.channel.segment import LEAST, Segment

#: Alignment of tensors, in bytes; PyTorch's CPU allocator has the same alignment.
_ALIGNMENT = 64


class PinnedArea:
    """Allocates pinned memory in a segment. Any thread may use it.

    Args:
        segment: the memory that the executor accepts.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        #: Free ranges by their first bytes, in ascending order: (first, end).
        self._free = [(LEAST, segment.nbytes)]
        #: Ranges whose arrays are gone. A finalizer fills it, which may interrupt `allocate`.
        self._gone: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> np.ndarray | None:
        """Bytes in shared memory, which are free again when the array is gone; None: there is no room."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            while self._gone:
                self._put_back(*self._gone.popleft())
            found = next((k for k, (first, end) in enumerate(self._free) if end - first >= size), None)
            if found is None:
                return None
            first, end = self._free[found]
            try:
                if self._segment.descriptor < 0:
                    return None
                made = np.frombuffer(self._segment.view, np.uint8, nbytes, first)
            except ValueError:  # another thread has just closed the segment
                return None
            self._free[found : found + 1] = [(first + size, end)] if first + size < end else []
        weakref.finalize(made, self._gone.append, (first, first + size)).atexit = False
        return made

    def _put_back(self, first: int, end: int) -> None:
        free = [*self._free, (first, end)]
        free.sort()
        joined = free[:1]
        for first, end in free[1:]:
            if first == joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((first, end))
        self._free = joined


_last: weakref.ref[PinnedArea] | None = None


def use(area: PinnedArea) -> None:
    """Allocate pinned memory in this area from now on."""
    global _last
    _last = weakref.ref(area)


def allocate(nbytes: int) -> np.ndarray | None:
    """Pinned bytes that the executor can access; None: no session is open, it shares no memory, or there is no room."""
    area = None if _last is None else _last()
    return None if area is None else area.allocate(nbytes)
