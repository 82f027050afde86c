"""Memory that both ends of a channel can access: the part of its shared memory behind the rings.

Data that lies there is sent and received with one copy, which the server makes.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque

from wooly_bus.channel.segment import LEAST, Segment

#: Alignment of each piece of memory, in bytes; PyTorch's CPU allocator has the same alignment.
_ALIGNMENT = 64


class PinnedArea:
    """Allocates memory in a segment. Any thread may use it.

    Args:
        segment: the memory that the server accepts.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        #: Free ranges by their first bytes, in ascending order: (first, end).
        self._free = [(LEAST, segment.nbytes)]
        #: Ranges that nothing refers to any more. A finalizer fills it, which may interrupt `allocate`.
        self._gone: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8] | None:
        """Bytes in shared memory, which are free again when nothing refers to this array; None: there is no room.

        Arrays of NumPy and tensors over it refer to it, which they would not do for a `memoryview` of the segment's view.
        """
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
                made = (ctypes.c_uint8 * nbytes).from_buffer(self._segment.view, first)
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
