"""The mover's jobs for checkpoints: copy buffers off the device, store the copies, read a cut back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from torch import Tensor
from wooly_bus.contents import CHUNK

from wooly_executor.checkpoints.files import TOGETHER, SavedBuffer, SessionFiles, Table, chunks_of
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

    def steps(self) -> Generator[int]:
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

    def steps(self) -> Generator[int]:
        assert self.files is not None
        chunks: list[memoryview] = []
        for each in self.buffers:
            assert each.copy is not None
            chunks += chunks_of(each.copy.numpy().data)
        names: list[bytes] = []
        for part in self.files.together(chunks, self.files.at_once):
            found, ns = self.files.keep(chunks[part])
            names += found
            self.core_ns += ns
            yield sum([len(chunk) for chunk in chunks[part]])
        of = iter(names)
        for each in self.buffers:
            assert each.copy is not None
            nbytes = len(each.copy)
            self.table[each.buffer] = SavedBuffer(nbytes, tuple(itertools.islice(of, -(-nbytes // CHUNK))))
            self.written += nbytes
        self.files.write(self.number, self.table, self.known)
        yield 0


@dataclass(eq=False)
class ReadJob(Job):
    """Reads the list of a cut. `holder`: the files that have it."""

    files: SessionFiles | None = None
    number: int = 0
    table: Table = field(default_factory=dict)
    holder: SessionFiles | None = None

    def steps(self) -> Generator[int]:
        assert self.files is not None
        self.holder = self.files.holder(self.number)
        self.table = self.holder.read(self.number)
        yield 0


@dataclass(eq=False)
class FillJob(Job):
    """Reads the contents of a cut into new device memory: `made`, by buffer."""

    files: SessionFiles | None = None
    table: Table = field(default_factory=dict)
    device: TorchDevice | None = None
    made: dict[int, Tensor] = field(default_factory=dict)

    def steps(self) -> Generator[int]:
        device, files = self.device, self.files
        assert device is not None and files is not None
        coming: list[tuple[int, Tensor]] = []
        chunks: list[tuple[bytes, memoryview]] = []
        nbytes = 0
        wanted = [(buffer, saved) for buffer, saved in self.table.items() if not saved.poison]
        for i, (buffer, saved) in enumerate(wanted, 1):
            host = device.copy_target(saved.nbytes) if device.host else device.host_memory(saved.nbytes)
            coming.append((buffer, host))
            chunks += zip(saved.chunks, chunks_of(host.numpy().data), strict=True)
            nbytes += saved.nbytes
            if i < len(wanted) and nbytes < files.read_at_once and len(chunks) < TOGETHER:
                continue
            for part in files.together([chunk for _, chunk in chunks], files.read_at_once):
                files.load(chunks[part])
                yield sum([len(chunk) for _, chunk in chunks[part]])
            if device.host:
                self.made.update(coming)
            else:
                self._to_device(device, coming)
            coming, chunks, nbytes = [], [], 0
        yield 0

    def _to_device(self, device: TorchDevice, buffers: list[tuple[int, Tensor]]) -> None:
        with device.copy_context():
            for buffer, host in buffers:
                self.made[buffer] = target = device.copy_target(len(host))
                target.copy_(host)


@dataclass(eq=False)
class FilesJob(Job):
    """Removes the files of sessions."""

    work: Callable[[], object] = lambda: None

    def steps(self) -> Generator[int]:
        self.work()
        yield 0
