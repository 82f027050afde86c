"""Notes the launches and copies of one link while a profiler runs, and takes the executor's records of them.

The executor's clock is another one than the client's. Round trips align them: the executor reads its clock while it answers, so
its time is that of the client in the middle of the shortest round trip, give or take half of the round trip.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from wooly_wis.frames import PROFILE_BEGIN, PROFILE_END, PROFILE_TAKE, Record

from wooly.link import Link
from wooly.origins import Origin
from wooly.recorder import Recorder
from wooly.storage import Heap

#: Number of round trips that align the clocks, at the start and at the end.
ROUND_TRIPS = 5
#: Number of instructions after which the records are taken. The executor keeps 262,144 records.
TAKE_EVERY = 1 << 16


class LaunchPoint(tuple):  # type: ignore[type-arg] # it is an `Origin`, a pair
    """An origin that also says when an instruction was recorded.

    Attributes:
        at_ns: ns since 1970.
        thread: the system's number of the thread.
        device: index of the device.
        stream: number of the current stream; 0: the default stream.
    """

    at_ns: int
    thread: int
    device: int
    stream: int


class ProgramRun(NamedTuple):
    """A program that was sent: its words, and where each instruction was recorded. For a replay there is one point for all."""

    words: list[int]
    points: list[Origin]
    replayed: LaunchPoint | None


class BytesCopied(NamedTuple):
    """Bytes that were copied to or from the device."""

    nbytes: int
    to_device: bool
    point: LaunchPoint


class MemoryChange(NamedTuple):
    """A storage that was made or freed.

    Attributes:
        at_ns: ns since 1970.
        thread: the system's number of the thread.
        buffer: its id.
        nbytes: its bytes, negative if it was freed.
        live_bytes: bytes of all storages after that.
    """

    at_ns: int
    thread: int
    buffer: int
    nbytes: int
    live_bytes: int


class Watch:
    """Watches the devices of one link from `begin` to `end`.

    Args:
        recorders: recorders of the devices. They are several if a rank shares one device of the executor under several indexes.
        current: returns the index of this thread's current device.
        stream_of: returns the number of this thread's current stream, by device.
        memory: also note storages.

    Attributes:
        recorder: the first recorder.
        frames: what was sent, by number of the frame.
        records: the executor's records.
        memory: storages that were made or freed.
        dropped: number of records that the executor dropped.
        shift_ns: what to add to the executor's clock to get ns since 1970.
        collecting: whether launches and copies are noted now.
    """

    def __init__(
        self,
        recorders: Sequence[Recorder],
        current: Callable[[], int],
        stream_of: Callable[[int], int],
        *,
        memory: bool = False,
    ) -> None:
        self.recorder, self._recorders, self._with_memory = recorders[0], recorders, memory
        self._current, self._stream_of = current, stream_of
        self._memories: list[_Memory] = []
        self.frames: dict[int, ProgramRun | BytesCopied] = {}
        self.records: list[Record] = []
        self.memory: list[MemoryChange] = []
        self.dropped = 0
        self.shift_ns = 0
        self.collecting = True
        self._best_ns = -1
        self._untaken = 0
        self._link: Link | None = None

    def begin(self) -> None:
        """Begin to watch. It waits for the work so far.

        Raises:
            WoolyError: no session is open, or the connection ended.
        """
        recorder = self.recorder
        with recorder.lock:
            self._flush()
            self._link = recorder.require_link()
            for _ in range(ROUND_TRIPS):
                self._ask(PROFILE_BEGIN)
            self._link.observer = self
            for each in self._recorders:
                each.mark_origins(functools.partial(self._mark, each.heap.index))
                if self._with_memory:
                    self._memories.append(_Memory(each.heap, self.memory))

    def end(self) -> None:
        """Stop to watch, wait for the work so far, and take the rest of the records.

        Raises:
            WoolyError: the connection ended.
        """
        recorder, link = self.recorder, self._link
        with recorder.lock:
            try:
                if link is not None and recorder.link is link:
                    self._flush()
                    self._take()
                    for _ in range(ROUND_TRIPS):
                        self._ask(PROFILE_END)
            finally:
                for each in self._recorders:
                    each.mark_origins(None)
                for memory in self._memories:
                    memory.stop()
                if link is not None:
                    link.observer = None

    def _flush(self) -> None:
        for recorder in self._recorders:
            recorder.flush()

    # -- what the recorders and the link report ------------------------------------------------------------------------

    def _mark(self, device: int, where: Origin) -> Origin:
        return self._point(where, device) if self.collecting else where

    def will_run(self) -> None:
        """See `FrameObserver`."""
        if self._untaken > TAKE_EVERY:
            self._take()

    def ran(self, seq: int, words: list[int], origins: list[Origin]) -> None:
        """See `FrameObserver`."""
        self._untaken += len(origins)
        opened = any(origins is recorder.origins for recorder in self._recorders)
        replayed = None if opened or not origins else self._point(origins[0])
        if replayed is None or self.collecting:
            self.frames[seq] = ProgramRun(words, origins, replayed)

    def copied(self, seq: int, nbytes: int, *, to_device: bool) -> None:
        """See `FrameObserver`."""
        self._untaken += 1
        if self.collecting:
            self.frames[seq] = BytesCopied(nbytes, to_device, self._point((self.copied.__code__, 0)))

    def _point(self, where: Origin, device: int | None = None) -> LaunchPoint:
        point = LaunchPoint(where)
        point.at_ns, point.thread = time.time_ns(), threading.get_native_id()
        if device is None:
            device = self._current() if len(self._recorders) > 1 else self.recorder.heap.index
        point.device, point.stream = device, self._stream_of(device)
        return point

    # -- the executor ------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        self._untaken = 0
        while self._ask(PROFILE_TAKE):
            pass

    def _ask(self, what: int) -> int:
        """Take some records. Returns the number of records that are left."""
        assert self._link is not None
        asked = time.time_ns()
        clock, dropped, left, records = self._link.profile(what)
        answered = time.time_ns()
        if not records and (self._best_ns < 0 or answered - asked < self._best_ns):
            self._best_ns, self.shift_ns = answered - asked, (asked + answered) // 2 - clock
        self.records += records
        self.dropped += dropped
        return left


class _Memory:
    """Notes the storages of one heap until `stop`."""

    def __init__(self, heap: Heap, changes: list[MemoryChange]) -> None:
        self._heap, self._changes = heap, changes
        heap.observe(self)

    def stop(self) -> None:
        self._heap.observe(self, on=False)

    def allocated(self, buffer: int, nbytes: int) -> None:
        """See `HeapObserver`."""
        self._changed(buffer, nbytes)

    def freed(self, buffer: int, nbytes: int) -> None:
        """See `HeapObserver`."""
        self._changed(buffer, -nbytes)

    def _changed(self, buffer: int, nbytes: int) -> None:
        live = self._heap.live_bytes + max(nbytes, 0)  # a new storage is counted after this
        self._changes.append(MemoryChange(time.time_ns(), threading.get_native_id(), buffer, nbytes, live))
