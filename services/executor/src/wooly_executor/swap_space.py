"""Memory outside the device for swapped-out data: pinned host memory and disk, each with a budget.

Swap files have no name, so the kernel deletes them when the executor ends for any reason.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from wooly_executor.errors import LostCopyError
from wooly_executor.memory.swap import Place
from wooly_executor.runtime.device import HOST

#: Minimum size, in bytes, of memory that is kept for reuse.
WORTH = 1 << 20
#: Time, in ns, for which nothing more goes to a place that had no room, although its budget has. Other programs fill disks, and
#: empty them again.
FULL_NS = 60_000_000_000


class Pages:
    """Reuses host memory. The kernel hands out new pages ten times slower than memory can be copied to old ones.

    Any thread may call `take` and `give`.

    Args:
        limit: maximum bytes that are kept.
        fresh: allocates a flat tensor of this many bytes.
    """

    def __init__(self, limit: int, fresh: Callable[[int], Tensor] = HOST.host_memory) -> None:
        self._limit = limit
        self._fresh = fresh
        self._kept: list[tuple[int, int, Tensor]] = []  # (bytes, age, memory), sorted by bytes
        self._bytes = self._age = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Memory of this many bytes, with undefined content."""
        if nbytes >= WORTH:
            with self._lock:
                at = bisect_left(self._kept, (nbytes,))
                if at < len(self._kept) and self._kept[at][0] <= 2 * nbytes:
                    size, _, found = self._kept.pop(at)
                    self._bytes -= size
                    return found[:nbytes]
        return self._fresh(nbytes)

    def give(self, memory: Tensor) -> None:
        """Return memory that nothing else uses any more."""
        whole = whole_of(memory)
        size = len(whole)
        if size < WORTH or size > self._limit:
            return
        with self._lock:
            self._age += 1
            insort(self._kept, (size, self._age, whole))
            self._bytes += size
            while self._bytes > self._limit:
                oldest = min(range(len(self._kept)), key=lambda i: self._kept[i][1])
                self._bytes -= self._kept.pop(oldest)[0]


def whole_of(memory: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = memory.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage, 0, (storage.nbytes(),), (1,))


class SwapFile:
    """A file with several copies. It is closed with its last copy."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="swap-", buffering=0)  # noqa: SIM115 - closed with the last copy
        self._copies = 0
        self._end = 0

    def place(self, nbytes: int) -> int:
        """The offset of a new copy."""
        at, self._end = self._end, self._end + nbytes
        self._copies += 1
        return at

    def drop(self) -> None:
        """Remove one copy."""
        self._copies -= 1
        if not self._copies:
            self._file.close()

    def write(self, data: memoryview, at: int) -> None:
        """Write all of `data`.

        Raises:
            OSError: the disk is full or has failed.
        """
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], at + done)

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into`.

        Raises:
            LostCopyError: the file cannot be read, or is shorter than what was written.
        """
        done = 0
        while done < len(into):
            try:
                n = os.preadv(self._file.fileno(), [into[done:]], at + done)
            except OSError as e:
                raise LostCopyError(f"memory that was swapped to disk cannot be read back: {e}") from e
            if not n:
                raise LostCopyError(f"memory that was swapped to disk is lost: the swap file ends at byte {at + done}")
            done += n


class Copy:
    """A copy of one block outside the device.

    Args:
        place: host memory or disk.
        nbytes: size of the block.
        pages: host memory for reuse.
        file: the swap file, for a copy on disk.
        in_place: the device's memory is host memory, so that files are written from it and read into it directly.
    """

    __slots__ = ("_at", "_host", "_in_place", "_pages", "file", "nbytes", "place")

    def __init__(
        self, place: Place, nbytes: int, pages: Pages, file: SwapFile | None = None, in_place: bool = True
    ) -> None:
        self.place, self.nbytes, self.file, self._pages, self._in_place = place, nbytes, file, pages, in_place
        self._host: Tensor | None = None
        self._at = file.place(nbytes) if file is not None else 0

    def save(self, source: Tensor, start: int, stop: int) -> None:
        """Copy bytes from the device. A copy to host memory is complete only after the device has been waited for.

        Raises:
            OSError: the disk is full or has failed.
        """
        if self.file is not None:
            part = source[start:stop]
            host = part if self._in_place else self._pages.take(stop - start).copy_(part)
            self.file.write(host.numpy().data, self._at + start)
            self._done_with(host)
            return
        if self._host is None:
            self._host = self._pages.take(self.nbytes)
        self._host[start:stop].copy_(source[start:stop], non_blocking=True)

    def load(self, target: Tensor, start: int, stop: int) -> None:
        """Copy bytes to the device. A copy from host memory is complete only after the device has been waited for.

        Raises:
            LostCopyError: the bytes are lost.
        """
        if self.file is not None:
            part = target[start:stop]
            host = part if self._in_place else self._pages.take(stop - start)
            self.file.read(host.numpy().data, self._at + start)
            if not self._in_place:
                part.copy_(host)
            self._done_with(host)
        elif self._host is None:
            raise LostCopyError("memory that was swapped out is lost: its copy in host memory was never written")
        else:
            target[start:stop].copy_(self._host[start:stop], non_blocking=True)

    def _done_with(self, staged: Tensor) -> None:
        if not self._in_place:
            self._pages.give(staged)

    def forget(self) -> None:
        """Release the bytes of the copy."""
        if self._host is not None:
            self._pages.give(self._host)
        self._host = None
        if self.file is not None:
            self.file.drop()
            self.file = None


class SwapSpace:
    """The budgets of host memory and disk. The device loop's thread owns it.

    Args:
        host: budget of host memory, in bytes.
        disk: budget of disk, in bytes.
        folder: folder of the swap files.
        pages: host memory for reuse.
        in_place: see `Copy`.
        clock: returns monotonic ns.
    """

    def __init__(
        self,
        host: int,
        disk: int,
        folder: Path,
        pages: Pages | None = None,
        *,
        in_place: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.pages = pages or Pages(0)
        self._clock = clock
        #: By place that had no room: what was used then, and until when in ns no more is used.
        self._full: dict[Place, tuple[int, int]] = {}
        self._in_place = in_place
        self._budget = {Place.HOST: host, Place.DISK: disk}
        self.used = {Place.HOST: 0, Place.DISK: 0}
        self._folder = folder

    def free(self, place: Place) -> int:
        """Free bytes of a budget."""
        budget = self._budget[place]
        if place in self._full:
            used, until = self._full[place]
            if self._clock() < until:
                budget = min(budget, used)
            else:
                del self._full[place]
        return max(0, budget - self.used[place])

    def open(self) -> SwapFile:
        """Create a swap file.

        Raises:
            OSError: the folder cannot be used.
        """
        return SwapFile(self._folder)

    def take(self, place: Place, nbytes: int, file: SwapFile | None) -> Copy:
        """Reserve space for a copy; on disk, in `file`."""
        self.used[place] += nbytes
        return Copy(place, nbytes, self.pages, file if place is Place.DISK else None, self._in_place)

    def drop(self, copy: Copy) -> None:
        """Release a copy that is no longer needed."""
        self.used[copy.place] -= copy.nbytes
        copy.forget()

    def full(self, place: Place) -> None:
        """Use no more of a place than is used now, for `FULL_NS`, because the place has no more room."""
        self._full[place] = self.used[place], self._clock() + FULL_NS

    @property
    def again(self) -> int | None:
        """When a place that had no room may be used again, monotonic ns; None: all may be used now."""
        now = self._clock()
        return min([until for _, until in self._full.values() if until > now], default=None)
