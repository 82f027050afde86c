"""Collectives of the sessions of one device. The device loop's thread owns this module.

A COLLECTIVE frame waits until the frames of all ranks are there (`groups`) and the memory of all ranks is on the device. Then the
operands are checked, and the work is done (`work`): small work at once, large work by the mover. Meanwhile the fold lets runs of
the session go on that do not use the frame's buffers. Each rank is billed for an equal share. Of groups with ranks on several
executors, other executors carry all or a share (`remote`).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from wooly_bus.channel import ProtocolError
from wooly_wis.collectives import REDUCING, SHARED_MEMORY, Collective, CollectiveReader, Range, What

from wooly_executor.collectives.groups import Arrival, Groups, Meeting
from wooly_executor.collectives.remote import RemoteCollectives
from wooly_executor.collectives.work import PIECE_ON_GPU, PIECE_ON_HOST, Memory, Part, WorkJob, parts_of, steps
from wooly_executor.errors import CollectiveError, ContextLostError, ExecutorError, forget_frames
from wooly_executor.flow import Readiness, Residence, Signal
from wooly_executor.frames import Frame
from wooly_executor.mover import Job
from wooly_executor.post import Post
from wooly_executor.runs import Runs
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.session import Session
from wooly_executor.vram import Vram

log = logging.getLogger("wooly.executor")
#: Maximum bytes that a collective reads and writes in the device's thread. On a host, this takes less than half a millisecond.
DONE_HERE = 512 << 10
#: Minimum seconds between two searches for ranks that have waited too long.
_CHECK_S = 0.05
#: Seconds for which a rank waits for the other shares of a collective after one has failed. Usually all of them fail.
GRACE_S = 5.0


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A session's collective that has begun.

    Attributes:
        call: the frame, whole.
        arrival: what this executor carries of it; None: nothing.
        shared: other executors carry something of it.
        error: the first failure; empty: there is none.
    """

    call: Collective
    arrival: Arrival | None
    shared: bool
    error: str = ""


class Collectives:
    """The collectives of one device.

    Args:
        vram: the device's memory.
        runs: has the sessions' buffers.
        device: the device.
        call: runs a function in the device's thread; any thread may use it.
        post: queue of events of sessions.
        find: finds an open session by its id.
        lose: ends a session, which may go on in another executor, with a reason.
        clock: returns monotonic seconds.
        most: maximum bytes of host memory for a collective of a session that another executor carries.
        tls_ca: certificate authorities of other executors; None: those of the system.
    """

    def __init__(
        self,
        vram: Vram,
        runs: Runs,
        device: TorchDevice,
        call: Callable[[Callable[[], None]], Any],
        post: Post,
        find: Callable[[str], Session | None],
        lose: Callable[[str, str], Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        most: int = 1 << 30,
        tls_ca: Path | None = None,
    ) -> None:
        self._vram, self._runs, self._device, self._call, self._post = vram, runs, device, call, post
        self._find, self._lose, self._clock = find, lose, clock
        self._piece = PIECE_ON_HOST if device.host else PIECE_ON_GPU
        self.groups = Groups()
        self._reader = CollectiveReader()
        self.remote = RemoteCollectives(
            vram,
            call,
            post,
            lambda session, call, r, writing: self._tensor(session, call, r, writing=writing),
            self._bill,
            self._piece,
            most,
            tls_ca,
            clock,
        )
        self._under_way: dict[str, _UnderWay] = {}
        self._deadline: float | None = None
        #: Sessions that have room for copies of the shared buffers that they write.
        self._with_room: set[str] = set()
        #: Sessions that end, because another rank has lost its executor.
        self._losing: set[str] = set()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def reach(self, session: Session, frame: Frame) -> Signal:
        """Bring a session's COLLECTIVE frame together with those of the other ranks.

        Returns:
            MEMORY_READY if the frame can be processed; `finish` tells the outcome. PEERS_AWAITED: the session waits for other
            ranks, and PEERS_CAME follows. MEMORY_AWAITED: MEMORY_CAME follows.

        Raises:
            DecodeError: the frame is malformed.
        """
        now = self._under_way.get(session.id)
        if now is None:
            now = self._start(session, self._reader.unpack(frame.payload))
            if now is None:
                return Signal.MEMORY_AWAITED
        found = []
        if now.arrival is not None:
            found.append(self._go_on(session, now.arrival))
        if now.shared:
            found.append(self.remote.go_on(session))
        error = self._error(session, now)
        if error and (why := self._loss(session, now)):
            return self._lost(session, why)
        pending = [signal for signal in found if signal is not Signal.MEMORY_READY]
        if not pending:
            session.holdings.parked = 0
            return Signal.MEMORY_READY
        if error and not now.error:
            self._hurry(session, now)
        now.error = now.error or error
        arrival = now.arrival
        working = arrival is not None and any(m.complete and not m.done for m in arrival.meetings)
        if not working and self.remote.waits(session):
            session.holdings.parked = session.holdings.parked or self._vram.clock()
        self._note_deadline()
        session.holdings.travelling = _buffers(now.call)
        return Signal.MEMORY_AWAITED if Signal.MEMORY_AWAITED in pending else Signal.PEERS_AWAITED

    def _start(self, session: Session, call: Collective) -> _UnderWay | None:
        """Begin a session's collective. None: its memory must be on the device first."""
        now = _UnderWay(call, None, False)
        try:
            here, others = self.remote.divide(session, call)
            if others:
                if not self._vram.present(session):
                    return None
                why = self._unusable_ranges(session, call, call.reads, call.writes)
                why = self.remote.begin(session, call, others, why)
                here, now.shared = here if here is None else replace(here, fault=why), True
            if here is not None:
                before = [u.arrival for u in self._under_way.values() if u.arrival is not None]
                now.arrival = self.groups.arrive(session.tenant, session.id, here, self._clock())
                self._wake([a for a in before if a.settled])
        except CollectiveError as e:
            now.error = str(e)
            self._hurry(session, now)
        self._under_way[session.id] = now
        return now

    def _go_on(self, session: Session, arrival: Arrival) -> Signal:
        """Go on with what this executor carries of a session's collective: see `reach`."""
        if not arrival.settled and any(m.complete for m in arrival.meetings):
            session.holdings.parked = 0
            if not self._vram.present(session) or not self._writable(session, arrival.call):
                return Signal.MEMORY_AWAITED
            self._with_room.add(session.id)
        self._advance(arrival)
        return Signal.MEMORY_READY if arrival.settled else Signal.PEERS_AWAITED

    def _error(self, session: Session, now: _UnderWay) -> str:
        """Why a session's collective, or a share of it, has failed; empty: nothing has failed yet."""
        here = now.arrival.error if now.arrival is not None and now.arrival.settled else ""
        return now.error or here or (self.remote.error(session) if now.shared else "")

    def _loss(self, session: Session, now: _UnderWay) -> str:
        """Why a session must go on elsewhere together with the other ranks; empty: it need not."""
        if now.arrival is not None and now.arrival.settled and now.arrival.lost:
            return now.arrival.error
        return self.remote.lost(session) if now.shared else ""

    def _hurry(self, session: Session, now: _UnderWay) -> None:
        """A share has failed: wait for the others only a little while, because ranks may be missing there for ever."""
        until = self._clock() + GRACE_S
        if now.arrival is not None:
            now.arrival.deadline = min(now.arrival.deadline, until)
        self.remote.hurry(session, until)

    def _lost(self, session: Session, why: str) -> Signal:
        """Let a session end, so that it goes on elsewhere together with the other ranks of its group."""
        if session.id not in self._losing:
            self._losing.add(session.id)
            self._call(lambda: self._lose(session.id, why))
        return Signal.PEERS_AWAITED

    def _note_deadline(self) -> None:
        known = [d for d in (self.groups.next_deadline(), self.remote.next_deadline()) if d is not None]
        self._deadline = min(known, default=None)

    def _writable(self, session: Session, call: Collective) -> bool:
        """Whether shared buffers that the rank writes have room for copies of their own, or will not get it."""
        guarded = [w.buffer for w in call.writes if w.buffer in session.holdings.guarded]
        need = self._vram.ledger.cost_of_writing(session.holdings.account, guarded) if guarded else 0
        return self._vram.room_for(session, need)

    def _wake(self, arrivals: Iterable[Arrival]) -> None:
        """Let sessions look at their frames again."""
        for arrival in arrivals:
            session = self._find(arrival.session)
            if session is not None:
                if session.flow.readiness is Readiness.MEMORY:
                    self._post.add(session, Signal.MEMORY_CAME)
                self._post.add(session, Signal.PEERS_CAME)

    def _advance(self, arrival: Arrival) -> None:
        """Begin the work of meetings that are complete and whose ranks have their memory on the device."""
        for meeting in arrival.meetings:
            if not meeting.complete or meeting.done or meeting.running:
                continue
            sessions = [s for a in meeting.arrivals if (s := self._find(a.session)) is not None]
            too_large = self._too_large(sessions)
            if too_large:
                self._settle(meeting, too_large)
                continue
            absent = [a for a, s in zip(meeting.arrivals, sessions, strict=True) if not self._is_here(s, a.call)]
            if absent:
                self._wake([a for a in absent if a is not arrival])
            elif not any(isinstance(job, WorkJob) for s in sessions for job in s.holdings.jobs):
                self._begin(meeting, sessions)

    def _is_here(self, session: Session, call: Collective) -> bool:
        """Whether a rank's memory is on the device, with room for copies of shared buffers that the rank writes."""
        guarded = session.holdings.guarded
        shared = bool(guarded) and any(w.buffer in guarded for w in call.writes)
        return session.flow.residence is Residence.HERE and (not shared or session.id in self._with_room)

    def _too_large(self, sessions: Sequence[Session]) -> str:
        """Why the sessions' memory can never be on the device together; empty if it can."""
        if all(s.flow.residence is Residence.HERE for s in sessions):
            return ""
        need = sum([s.held_bytes for s in sessions])
        if need <= self._vram.capacity:
            return ""
        return (
            f"the {len(sessions)} ranks of the group hold {need} bytes together, but the device has {self._vram.capacity}; use "
            "fewer ranks per device, or smaller models"
        )

    # -- work --------------------------------------------------------------------------------------------------------

    def _begin(self, meeting: Meeting, sessions: list[Session]) -> None:
        """Check the operands of a complete meeting, and begin its work."""
        begun = time.perf_counter_ns()
        arrivals = sorted(meeting.arrivals, key=lambda a: a.call.rank) if meeting.read < 0 else meeting.arrivals
        sessions = [s for a in arrivals for s in sessions if s.id == a.session]
        call = arrivals[0].call
        parts: list[Part] = []
        small = False
        try:
            why = next((w for a, s in zip(arrivals, sessions, strict=True) if (w := self._unusable(s, a, meeting))), "")
            if not why:
                parts = self._parts(meeting, arrivals, sessions)
                small = sum([part.nbytes for part in parts]) <= DONE_HERE
                for _ in steps(parts, call, self._piece) if small else ():
                    pass
        except ContextLostError:
            raise
        except Exception as e:
            if not isinstance(e, ExecutorError):
                log.exception("unexpected error in a collective; its ranks get it")
            why = str(e)
            forget_frames(e)
        if why or small:
            took = time.perf_counter_ns() - begun
            self._bill(sessions, took, took)
            self._settle(meeting, why)
            return
        self._runs.settle()
        meeting.running = True

        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._done(meeting, sessions, job, error))

        priority = min([self._vram.priority(s) for s in sessions])
        job = WorkJob(priority, done, parts=parts, call=call, piece=self._piece)
        for session in sessions:
            session.holdings.jobs.append(job)
        self._vram.mover.submit(job)

    def _ranges(self, meeting: Meeting, arrival: Arrival) -> tuple[Sequence[Range], Sequence[Range]]:
        """The ranges of a rank that take part in a meeting."""
        call = arrival.call
        if call.what is not What.EXCHANGE:
            return call.reads, call.writes
        if arrival is meeting.arrivals[0]:
            return (call.reads[meeting.read],), ()
        return (), (call.writes[meeting.write],)

    def _unusable(self, session: Session, arrival: Arrival, meeting: Meeting) -> str:
        """Why an operand of a rank cannot be used; empty if all can. Nothing is changed."""
        return self._unusable_ranges(session, arrival.call, *self._ranges(meeting, arrival))

    def _unusable_ranges(
        self, session: Session, call: Collective, reads: Sequence[Range], writes: Sequence[Range]
    ) -> str:
        if call.fault:
            return call.fault
        why = next((why for r in reads if (why := self._unusable_range(session, call, r, writing=False))), "")
        why = why or next((why for w in writes if (why := self._unusable_range(session, call, w, writing=True))), "")
        why = why or overlap(call, reads, writes)
        if not why:
            return ""
        return f"rank {call.rank}, {call.name}" + (f" at {call.origin}" if call.origin else "") + f": {why}"

    def _unusable_range(self, session: Session, call: Collective, operand: Range, *, writing: bool) -> str:
        size = call.dtype.itemsize
        buffer, offset, nbytes = operand.buffer, operand.offset, operand.elements * size
        if not nbytes:
            return ""
        known = session.buffers.get(buffer)
        if buffer == SHARED_MEMORY:
            if why := self._not_shared(session, offset, nbytes):
                return why
        elif known is None:
            return f"buffer {buffer} does not exist"
        elif known.base is None and not (writing and nbytes == known.nbytes):
            return f"its data is missing, because an operation failed: {known.poison}"
        elif offset + nbytes > known.nbytes:
            return f"bytes {offset} to {offset + nbytes} are out of bounds: buffer {buffer} has {known.nbytes} bytes"
        elif writing and buffer in session.holdings.ipc:
            return (
                f"buffer {buffer} is shared with another process, so a collective cannot write it; use a clone, and copy the "
                "result"
            )
        return f"byte offset {offset} is not a multiple of the elements' {size} bytes" if offset % size else ""

    def _not_shared(self, session: Session, at: int, nbytes: int) -> str:
        """Why bytes at a place of the memory that client and executor share cannot be operands; empty: they can."""
        conn = session.conn
        if conn is None or conn.segment is None or not self._device.host:
            return "client and executor share no memory that a collective can use"
        try:
            conn.segment.part(at, nbytes)
        except ProtocolError as e:
            return str(e)
        return ""

    def _parts(self, meeting: Meeting, arrivals: Sequence[Arrival], sessions: Sequence[Session]) -> list[Part]:
        memory: list[Memory] = []
        for arrival, session in zip(arrivals, sessions, strict=True):
            reads, writes = self._ranges(meeting, arrival)
            written = [self._tensor(session, arrival.call, w, writing=True) for w in writes]
            read = (
                written if reads == writes else [self._tensor(session, arrival.call, r, writing=False) for r in reads]
            )
            memory.append((read, written))
        if meeting.read >= 0:
            return [Part((memory[0][0][0],), (memory[1][1][0],))]
        return parts_of([a.call for a in arrivals], memory)

    def _tensor(self, session: Session, call: Collective, operand: Range, *, writing: bool) -> Tensor:
        """The elements of a range. Elements that are only moved are bytes."""
        dtype = TORCH_DTYPE[call.dtype] if call.what in REDUCING else torch.uint8
        nbytes = operand.elements * call.dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype, device=self._device.named)
        if operand.buffer == SHARED_MEMORY:
            assert session.conn is not None and session.conn.segment is not None
            return torch.frombuffer(session.conn.segment.part(operand.offset, nbytes), dtype=dtype)
        if writing and session.holdings.guarded:  # with its content, because the rank may work in place
            self._vram.contents.unshare(session, [operand.buffer])
        return self._runs.memory(session, operand.buffer, operand.offset, nbytes, writing=writing).view(dtype)

    def _done(self, meeting: Meeting, sessions: Sequence[Session], job: Job, error: Exception | None) -> None:
        assert isinstance(job, WorkJob)
        open_ones = []
        for session in sessions:
            session.holdings.jobs.remove(job)
            if session.holdings.closed:
                self._vram.release(session)
            else:
                open_ones.append(session)
        job.parts = []
        self._bill(open_ones, job.took_ns, job.core_ns)
        why = f"{type(error).__name__}: {error}" if error is not None else ""
        self._settle(meeting, why or ("it was cancelled, because a rank has ended" if job.cancelled else ""))
        # a rank of several transfers begins the next one now
        self._wake([a for a in meeting.arrivals if not a.settled])

    def _bill(self, sessions: Sequence[Session], device_ns: int, core_ns: int) -> None:
        for session in sessions:
            session.used.launched(device_ns // len(sessions), core_ns // len(sessions), self._vram.clock())

    def _settle(self, meeting: Meeting, error: str = "") -> None:
        if error:
            calls = [a.call for a in meeting.arrivals]
            error = f"{calls[0].name} of {len(calls)} ranks failed: {error}"
        self._wake(self.groups.finish(meeting, error))
        self._note_deadline()

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self, session: Session, frame: Frame) -> None:
        """Process a COLLECTIVE frame that `reach` has let pass.

        Raises:
            CollectiveError: the collective failed. The buffers that this rank should have written are poisoned.
            DecodeError: the frame is malformed.
        """
        now = self._under_way.pop(session.id, None)
        self._with_room.discard(session.id)
        session.holdings.travelling = frozenset()
        if now is None:
            self._reader.unpack(frame.payload)
            return
        error = self._error(session, now)
        self.remote.finish(session, now.call)
        if error:
            written = [w.buffer for w in now.call.writes if w.elements and w.buffer != SHARED_MEMORY]
            self._runs.poison(session, written, error)
            raise CollectiveError(error)

    def closed(self, session: Session, why: str, *, passing: bool = False) -> None:
        """A session has ended. Ranks that wait for it fail; if it may go on in another executor (`passing`), those that can go on
        with it there end instead.
        """
        self._losing.discard(session.id)
        self._under_way.pop(session.id, None)
        self._with_room.discard(session.id)
        self.remote.closed(session, why, passing=passing)
        self._wake(self.groups.leave(session.id, why, passing=passing))
        self._note_deadline()

    def timeout(self) -> float | None:
        """Seconds until `expire` has something to do. None: no rank waits for others."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0) + _CHECK_S

    @property
    def due(self) -> bool:
        """Whether `expire` has something to do."""
        return self._deadline is not None and self._clock() > self._deadline

    def expire(self) -> None:
        """Fail the collectives whose deadline has passed."""
        self._wake(self.groups.expire(self._clock()))
        self.remote.expire()
        self._note_deadline()


def _buffers(call: Collective) -> frozenset[int]:
    return frozenset([r.buffer for r in (*call.reads, *call.writes)])


def overlap(call: Collective, reads: Sequence[Range], writes: Sequence[Range]) -> str:
    """Which ranges of a rank overlap in a way that would make the result depend on the order of the work; empty: none.

    A rank may work in place: its own part of what it reads may be its own part of what it writes.
    """
    if len(reads) == len(writes) == 1 and reads[0] == writes[0] and _is_own(call, 0, 0):  # DDP's buckets
        return ""
    size = call.dtype.itemsize
    spans = sorted([(w.buffer, w.offset, w.offset + w.elements * size, k) for k, w in enumerate(writes) if w.elements])
    for (buffer, _, end, k), (other, start, _, j) in itertools.pairwise(spans):
        if buffer == other and start < end:
            return f"the ranges {k} and {j} that it writes overlap"
    starts = [(buffer, start) for buffer, start, _, _ in spans]
    for number, r in enumerate(reads):
        end = r.offset + r.elements * size
        at = bisect.bisect_left(starts, (r.buffer, end))  # the ranges from here on begin behind the range that is read
        while r.elements and at:
            at -= 1
            buffer, start, stop, k = spans[at]
            if buffer != r.buffer or stop <= r.offset:
                break
            if (start, stop) != (r.offset, end) or not _is_own(call, number, k):
                return f"range {number} that it reads overlaps range {k} that it writes"
    return ""


def _is_own(call: Collective, read: int, write: int) -> bool:
    """Whether two ranges are a rank's own part, so that no other rank's data goes from one to the other or needs both."""
    own = call.rank
    reads = own if call.what in (What.REDUCE_SCATTER, What.SCATTER, What.ALL_TO_ALL) else 0
    writes = own if call.what in (What.ALL_GATHER, What.GATHER, What.ALL_TO_ALL) else 0
    return call.what is not What.EXCHANGE and (read, write) == (reads, writes)
