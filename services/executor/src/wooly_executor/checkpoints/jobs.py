"""The mover's jobs for checkpoints: copy buffers off the device, store the copies, read a cut back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from wooly_bus.contents import CHUNK

from wooly_executor.checkpoints.files import SavedBuffer, SessionFiles, Table, chunks_of
from wooly_executor.mover import PIECE, Job
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.swap_space import Pages


@dataclass(eq=False)
class Copied:
    """A buffer of a cut: its bytes on the device, and later its copy in host memory."""

    buffer: int
    source: Tensor | None
    copy: Tensor | None = None


@dataclass(eq=False)
class CopyJob(Job):
    """Copies buffers to host memory. The session waits for it."""

    buffers: list[Copied] = field(default_factory=list)
    pages: Pages = field(default_factory=lambda: Pages(0))

    def steps(self) -> Iterator[int]:
        small = 0
        for each in self.buffers:
            source, size = each.source, 0 if each.source is None else len(each.source)
            each.copy = self.pages.take(size)
            for start in range(0, size, PIECE):
                stop = min(start + PIECE, size)
                assert source is not None
                each.copy[start:stop].copy_(source[start:stop])
                small += stop - start
                if small >= PIECE:
                    yield small
                    small = 0
            each.source = None
        yield small


@dataclass(eq=False)
class StoreJob(Job):
    """Stores copied buffers, and then the list of the cut.

    Attributes:
        table: the buffers that did not change, and at the end all buffers.
        written: bytes of the copied buffers.
        core_ns: core time so far.
    """

    files: SessionFiles | None = None
    number: int = 0
    known: int = 0
    buffers: list[Copied] = field(default_factory=list)
    table: Table = field(default_factory=dict)
    written: int = 0
    core_ns: int = 0

    def steps(self) -> Iterator[int]:
        assert self.files is not None
        small = 0
        for each in self.buffers:
            assert each.copy is not None
            digests = []
            for chunk in chunks_of(each.copy.numpy().data):
                begun = time.thread_time_ns()
                digests.append(self.files.keep(chunk))
                self.core_ns += time.thread_time_ns() - begun
                small += len(chunk)
                if small >= CHUNK:
                    yield small
                    small = 0
            self.table[each.buffer] = SavedBuffer(len(each.copy), tuple(digests))
            self.written += len(each.copy)
        self.files.write(self.number, self.table, self.known)
        yield small


@dataclass(eq=False)
class ReadJob(Job):
    """Reads the list of a cut."""

    files: SessionFiles | None = None
    number: int = 0
    table: Table = field(default_factory=dict)

    def steps(self) -> Iterator[int]:
        assert self.files is not None
        self.table = self.files.read(self.number)
        yield 0


@dataclass(eq=False)
class FillJob(Job):
    """Reads the contents of a cut into new device memory: `made`, by buffer."""

    files: SessionFiles | None = None
    table: Table = field(default_factory=dict)
    device: TorchDevice | None = None
    made: dict[int, Tensor] = field(default_factory=dict)

    def steps(self) -> Iterator[int]:
        device, files = self.device, self.files
        assert device is not None and files is not None
        small = 0
        for buffer, saved in self.table.items():
            if saved.poison:
                continue
            target = device.copy_target(saved.nbytes)
            host = target if device.host else device.host_memory(saved.nbytes)
            for digest, chunk in zip(saved.chunks, chunks_of(host.numpy().data), strict=True):
                files.load(digest, chunk)
                small += len(chunk)
                if small >= CHUNK:
                    yield small
                    small = 0
            if host is not target:
                target.copy_(host)
            self.made[buffer] = target
        yield small


@dataclass(eq=False)
class FilesJob(Job):
    """Removes the files of sessions."""

    work: Callable[[], object] = lambda: None

    def steps(self) -> Iterator[int]:
        self.work()
        yield 0
