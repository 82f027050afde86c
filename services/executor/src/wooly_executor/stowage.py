"""Where memory lies that is not on the device: pinned host memory and disk, each with a budget.

Files have no name: the kernel deletes them when nobody has them open any more, however the executor ended.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from wooly_executor.errors import LostCopyError
from wooly_executor.memory.swap import Place


class SwapFile:
    """A file of several copies, closed with the last of them."""

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
        """One copy fewer."""
        self._copies -= 1
        if not self._copies:
            self._file.close()

    def write(self, data: memoryview, at: int) -> None:
        """Write all of `data`.

        Raises:
            OSError: the disk is full, or broken.
        """
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], at + done)

    def read(self, into: memoryview, at: int) -> None:
        """Fill `into`.

        Raises:
            LostCopyError: the file has less than was written.
        """
        done = 0
        while done < len(into):
            try:
                n = os.preadv(self._file.fileno(), [into[done:]], at + done)
            except OSError as e:
                raise LostCopyError(f"memory that was swapped to disk cannot be read: {e}") from e
            if not n:
                raise LostCopyError(f"memory that was swapped to disk is lost: its file ends at byte {at + done}")
            done += n


class Copy:
    """A copy of one block.

    Attributes:
        place: in host memory or on disk.
        nbytes: its size.
        file: where, on disk.
    """

    __slots__ = ("_at", "_host", "file", "nbytes", "place")

    def __init__(self, place: Place, nbytes: int, file: SwapFile | None = None) -> None:
        self.place, self.nbytes, self.file = place, nbytes, file
        self._host: Tensor | None = None
        self._at = file.place(nbytes) if file is not None else 0

    def save(self, source: Tensor, start: int, stop: int) -> None:
        """Take bytes from the device.

        Raises:
            OSError: the disk is full, or broken.
        """
        if self.file is not None:
            self.file.write(memoryview(source[start:stop].numpy()), self._at + start)
            return
        if self._host is None:
            self._host = torch.empty(self.nbytes, dtype=torch.uint8)
        self._host[start:stop].copy_(source[start:stop])

    def load(self, target: Tensor, start: int, stop: int) -> None:
        """Bring bytes to the device.

        Raises:
            LostCopyError: they are gone.
        """
        if self.file is not None:
            self.file.read(memoryview(target[start:stop].numpy()), self._at + start)
        elif self._host is None:
            raise LostCopyError("memory that was swapped out is lost")
        else:
            target[start:stop].copy_(self._host[start:stop])

    def forget(self) -> None:
        """Let go of the bytes."""
        self._host = None
        if self.file is not None:
            self.file.drop()
            self.file = None


class Stowage:
    """The budgets. Owned by the device loop's thread.

    Args:
        host: bytes of host memory.
        disk: bytes of disk.
        folder: where the files are.
    """

    def __init__(self, host: int, disk: int, folder: Path) -> None:
        self._budget = {Place.HOST: host, Place.DISK: disk}
        self.used = {Place.HOST: 0, Place.DISK: 0}
        self._folder = folder

    def free(self, place: Place) -> int:
        """Bytes left of a budget."""
        return max(0, self._budget[place] - self.used[place])

    def open(self) -> SwapFile:
        """A file for copies.

        Raises:
            OSError: the folder cannot be used.
        """
        return SwapFile(self._folder)

    def take(self, place: Place, nbytes: int, file: SwapFile | None) -> Copy:
        """A place for a copy; on disk, in `file`."""
        self.used[place] += nbytes
        return Copy(place, nbytes, file if place is Place.DISK else None)

    def drop(self, copy: Copy) -> None:
        """A copy is not needed any more."""
        self.used[copy.place] -= copy.nbytes
        copy.forget()

    def full(self, place: Place) -> None:
        """The place has no room for more than is there now, whatever its budget."""
        self._budget[place] = self.used[place]
