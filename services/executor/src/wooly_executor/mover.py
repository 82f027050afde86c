"""The thread that copies memory between device, host memory and disk, and hashes contents, outside the device's thread.

Work is cut into chunks, and after each chunk the most urgent job continues. So a returning P0 session waits for at most one chunk
of another job.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_bus.supervision import start_thread

from wooly_executor.errors import ExecutorError, LostCopyError
from wooly_executor.memory.swap import Place
from wooly_executor.runtime.device import HOST, TorchDevice
from wooly_executor.swap_space import Copy, Pages

log = logging.getLogger("wooly.executor")
#: Size of a chunk, in bytes, after which the mover chooses the most urgent job again.
PIECE = 8 << 20
#: On a GPU, the mover waits for the device only after so many bytes, unless enqueuing them took so many ns.
TURN, TURN_NS = 64 << 20, 1_000_000
#: Priority of jobs for which no session waits.
LEAST_URGENT = 5


@dataclass(eq=False)
class Job:
    """A job of the mover.

    Attributes:
        priority: class of the job; 0 goes first.
        done: called in the mover's thread with the job, and with the error or None. The mover's thread may keep the job for a
            while afterwards, so whoever takes over its memory removes it from the job.
        cancelled: any thread may set it; the job ends after the current chunk.
        moved: bytes moved so far.
        begun_ns: time of the request, in ns since 1970.
    """

    priority: int
    done: Callable[[Job, Exception | None], None]
    cancelled: bool = False
    moved: int = 0
    begun_ns: int = field(default_factory=time.time_ns)

    def steps(self) -> Generator[int]:
        """Do the job, and yield the bytes of each chunk."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel the job. Any thread may call this."""
        self.cancelled = True


@dataclass
class Saving:
    """One block that is copied off the device."""

    key: tuple[str, int]
    source: Tensor
    copy: Copy


@dataclass
class Loading:
    """One block that is copied to the device. `target` is set when it has all bytes; `lost` says why they are missing."""

    key: tuple[str, int]
    copy: Copy
    target: Tensor | None = None
    lost: str = ""


@dataclass(eq=False)
class SaveJob(Job):
    """Copies blocks off the device.

    Attributes:
        pieces: the blocks.
        place: where the block goes that is being copied.
    """

    pieces: list[Saving] = field(default_factory=list)
    place: Place | None = None

    def steps(self) -> Generator[int]:
        small = 0
        for piece in self.pieces:
            size, self.place = piece.copy.nbytes, piece.copy.place
            for start in range(0, size, PIECE):
                stop = min(start + PIECE, size)
                piece.copy.save(piece.source, start, stop)
                small += stop - start
                if small >= PIECE:
                    yield small
                    small = 0
        yield small


@dataclass(eq=False)
class LoadJob(Job):
    """Copies blocks to the device."""

    pieces: list[Loading] = field(default_factory=list)
    pages: Pages = field(default_factory=lambda: Pages(0))

    def steps(self) -> Generator[int]:
        small = 0
        for piece in self.pieces:
            size = piece.copy.nbytes
            target = self.pages.take(size)
            for start in range(0, size, PIECE):
                stop = min(start + PIECE, size)
                try:
                    piece.copy.load(target, start, stop)
                except LostCopyError as e:
                    piece.lost = str(e)
                    break
                small += stop - start
                if small >= PIECE:
                    yield small
                    small = 0
            else:
                piece.target = target
        yield small


@dataclass(eq=False)
class HashJob(Job):
    """Computes the digest of a block's first chunk and the block's content id.

    A cancelled job drops its reference to the block at once, because the block's memory may no longer be charged to any session.
    """

    source: Tensor | None = None
    head: bytes = b""
    content: bytes = b""

    def steps(self) -> Generator[int]:
        source = self.source
        if source is None:
            return
        size, digests = len(source), []
        for at in range(0, size, CHUNK):
            digests.append(chunk_digest(source[at : at + CHUNK].cpu().numpy().data))
            yield min(CHUNK, size - at)
        self.head, self.content = digests[0], content_id(digests, size)

    def cancel(self) -> None:
        """Cancel the job and drop its block: see `Job`."""
        self.cancelled, self.source = True, None


class _Begun(NamedTuple):
    """A job in the queue and its remaining steps. The queue is ordered by priority, then by number; numbers are unique."""

    priority: int
    number: int
    job: Job
    steps: Generator[int]


class Mover:
    """Runs jobs by priority, then by age. Any thread may call `submit`.

    Args:
        device: the device whose memory is moved.
    """

    def __init__(self, device: TorchDevice = HOST) -> None:
        self._device = device
        self._jobs: list[_Begun] = []
        self._count = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.moved = 0

    def submit(self, job: Job) -> None:
        """Queue a job."""
        with self._changed:
            self._count += 1
            heapq.heappush(self._jobs, _Begun(job.priority, self._count, job, job.steps()))
            if self._thread is None:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        """Start the thread. Its operators run on one core: those of the device's thread use all cores, and two teams of worker
        threads would wait for each other at every operator. And only the own time of this thread is billed.
        """
        threads, alone = torch.get_num_threads(), threading.Event()
        self._thread = start_thread(lambda: self._run(alone), "mover")
        alone.wait()
        torch.set_num_threads(threads)  # for this thread and for those that start later

    def stop(self) -> None:
        """End the thread. Remaining jobs are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self, alone: threading.Event) -> None:
        torch.get_num_threads()  # the library sets a thread's number at its first use there
        torch.set_num_threads(1)
        alone.set()
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not self._jobs and not self._stopping:
                        self._changed.wait()
                    if self._stopping:
                        return
                    entry = heapq.heappop(self._jobs)
                self._step(entry)
                del entry  # its job has memory of the device, which a session may free while this thread waits

    def _enqueue(self, steps: Iterator[int]) -> int:
        """Do the next step of a job, on a GPU several. Returns their bytes.

        Raises:
            StopIteration: there are no more steps.
        """
        n = next(steps)
        if self._device.host:
            return n
        until = time.perf_counter_ns() + TURN_NS
        while n < TURN and time.perf_counter_ns() < until:
            more = next(steps, None)
            if more is None:
                break
            n += more
        return n

    def _step(self, entry: _Begun) -> None:
        job = entry.job
        error: Exception | None = None
        if not job.cancelled:
            try:
                with self._device.copy_context():
                    n = self._enqueue(entry.steps)
            except StopIteration:
                pass
            except Exception as e:
                error = e
                if not isinstance(e, (OSError, ExecutorError)):
                    log.exception("unexpected error while moving memory; the job fails")
            else:
                job.moved += n
                self.moved += n
                with self._changed:
                    heapq.heappush(self._jobs, entry)
                return
        entry.steps.close()  # the steps of a cancelled job still refer to its memory
        job.done(job, error)
