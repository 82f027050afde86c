"""Connects sessions to the dispatch core: submits their frames as programs, and returns the launches that the core decides.

    dispatch.submit(session, frame)                 queues a frame
    dispatch.commit()                               the core may decide a launch, which is then in `dispatch.launch`
    dispatch.take()                                 the pieces of that launch: frames, and their kernels
    dispatch.done(gpu_ns)                           the launch has ended; the core decides the next one

Frames of a session that arrive together are one program for the core, and a launch may contain several of them: a decision costs
the host as much as dozens of small operators. A launch ends with its first frame if another session waits, and the launcher can
stop it between two frames, as within one. So sessions take turns as if each frame was a program.

The device loop's thread owns this module. Other threads only take from `entries`, the future journal.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from wooly_dispatch.core import ALONE, should_stop, step
from wooly_dispatch.decisions import Decision, LaunchDecision, RefuseDecision, SwapInDecision
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    EpochEndedEvent,
    Event,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    LaunchDoneEvent,
    Policy,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionClosedEvent,
    SessionOpenedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
    WithheldEvent,
)
from wooly_dispatch.state import DispatchState
from wooly_dispatch.windows import PROTECTED

from wooly_executor.errors import SteeringError, UnknownSessionError
from wooly_executor.frames import Frame
from wooly_executor.session import Session

log = logging.getLogger("wooly.executor")
Entries = deque[tuple[Event, list[Decision]]]
#: One launch at a time, and a session of a higher class stops it at the next edge. So a P0 session never waits for launches that
#: were decided earlier. `piece_ns` (4 ms) bounds how long sessions of equal class wait for each other; each piece costs one
#: decision. `undeclared_permille` bounds P0 and P1 sessions that declare no rate (`policing`, WOOLY_EXECUTOR_UNDECLARED_PERCENT).
#: `withheld_permille` bounds the time for which the device waits for the next program of P0 and P1
#: (WOOLY_EXECUTOR_WITHHELD_PERCENT).
CONFIG = Config(max_flights=1, stoppable=True, piece_ns=4_000_000, undeclared_permille=200, withheld_permille=250)
_ARRIVALS = "arrivals"
#: Maximum number of frames that are one program for the core. It bounds what a launch that is stopped returns to the queue.
TOGETHER = 64
#: Time, in ns, between two polls for new frames while one session is open.
_PATIENCE_ALONE_NS = CONFIG.piece_ns * ALONE


#: A part of a launch: the session, the frame, its first kernel, and the kernel after its last one.
Piece = tuple[Session, Frame, int, int]


class _Batch:
    """Frames that are one program for the core. `at` is the index of the first frame with kernels that were not launched."""

    __slots__ = ("at", "frames")

    def __init__(self, frames: list[tuple[Session, Frame]]) -> None:
        self.frames, self.at = frames, 0

    def kernels(self) -> tuple[int, ...]:
        """The estimated times of the kernels that were not launched."""
        if len(self.frames) == 1:
            frame = self.frames[0][1]
            return frame.cut.kernels[frame.next :] if frame.next else frame.cut.kernels
        return tuple(chain.from_iterable([frame.cut.kernels[frame.next :] for _, frame in self.frames[self.at :]]))


class Dispatch:
    """Feeds the dispatch core with events and keeps its decisions.

    Args:
        fifo: treat all sessions as one, so that frames run in the order of arrival. For comparison only.
        undeclared_permille: see `Config`.
        withheld_permille: see `Config`.
        clock: returns monotonic ns.

    Attributes:
        launch: the launch that the core decided next.
        pending: frames that are queued and not committed.
        going: the session of which the launch in flight has frames that have not begun; empty: there are no such frames.
        wanted: sessions whose turn has come and whose memory must be brought to the device.
        entries: queue of events and decisions for the journal; None: no journal.
    """

    def __init__(
        self,
        *,
        fifo: bool = False,
        undeclared_permille: int = CONFIG.undeclared_permille,
        withheld_permille: int = CONFIG.withheld_permille,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = replace(CONFIG, undeclared_permille=undeclared_permille, withheld_permille=withheld_permille)
        self.state = DispatchState()
        self.launch: LaunchDecision | None = None
        self.entries: Entries | None = None
        self.wanted: deque[str] = deque()
        self.fifo = self._fifo = fifo
        self._clock = clock
        self.pending: dict[str, list[tuple[Session, Frame]]] = {}
        self.going = ""
        self._flying: LaunchDecision | None = None
        self._pieces: list[Piece] = []
        self._untaken = 0  # kernels of the launch in flight that were not taken
        self._batch: _Batch | None = None
        self._flows: dict[str, deque[_Batch]] = {}
        self._numbers: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._feed(ConfigChangedEvent(self._clock(), self.config))
        if self._fifo:
            self._open(_ARRIVALS, Policy(), "")

    def _feed(self, event: Event) -> list[Decision]:
        self.state, decisions = step(self.state, event)
        if self.entries is not None:
            self.entries.append((event, decisions))
        for decision in decisions:
            if isinstance(decision, LaunchDecision):
                self.launch = decision
            elif isinstance(decision, SwapInDecision):
                self.wanted.append(decision.session)
            elif isinstance(decision, RefuseDecision):
                log.warning("the dispatch core refused the event %s: %s", event, decision.reason)
        return decisions

    # -- work --------------------------------------------------------------------------------------------------------

    def submit(self, session: Session, frame: Frame) -> None:
        """Queue a frame for the device. `frame.cut` has the estimated times."""
        flow = _ARRIVALS if self._fifo else session.id
        together = self.pending.setdefault(flow, [])
        together.append((session, frame))
        # each program of P0 and P1 is charged to a bucket, so it is decided by itself which class it has
        if len(together) >= TOGETHER or self._fifo or self.state.sessions[flow].policy.priority < PROTECTED:
            self.commit()

    def commit(self) -> None:
        """Tell the core about the queued frames."""
        pending = self.pending
        if not pending:
            return
        self.pending = {}
        for flow, frames in pending.items():
            batch = _Batch(frames)
            number = self._numbers[flow] = self._numbers[flow] + 1
            self._flows[flow].append(batch)
            self._feed(ProgramSubmittedEvent(self._clock(), flow, number, batch.kernels()))

    def take(self) -> list[Piece]:
        """Take the frames and the kernels that `launch` says to run now. The launch is in flight from then on.

        Returns:
            The pieces, in order. There are none if the session has ended; then report 0 ns.
        """
        launch = self.launch
        assert launch is not None
        self.launch, self._flying, self._pieces, self._untaken = None, launch, [], 0
        flow = self._flows.get(launch.session)
        if flow is None:
            return self._pieces
        self._batch = batch = flow[0]
        if len(batch.frames) > 1:
            return self._take_several(launch, batch, flow)
        session, frame = batch.frames[0]
        first = frame.next
        frame.next = end = first + launch.last - launch.first
        if end == len(frame.cut.kernels):
            flow.popleft()
        self._pieces = pieces = [(session, frame, first, end)]
        return pieces

    def _take_several(self, launch: LaunchDecision, batch: _Batch, flow: deque[_Batch]) -> list[Piece]:
        """See `take`. The batch has several frames."""
        frames, left, at = batch.frames, launch.last - launch.first, batch.at
        while left:
            session, frame = frames[at]
            first, size = frame.next, len(frame.cut.kernels)
            frame.next = end = min(first + left, size)
            self._pieces.append((session, frame, first, end))
            left -= end - first
            at += end == size
            if left and self.others_wait():
                self._untaken, left = left, 0
        batch.at = at
        if at == len(frames):
            flow.popleft()
        if len(self._pieces) > 1:
            self.going = launch.session
        return self._pieces

    def done(self, gpu_ns: int, stopped: tuple[Piece, int] | None = None, core_ns: int = 0) -> None:
        """Report the end of the launch in flight.

        Args:
            gpu_ns: its device time.
            stopped: if the launch was stopped early, the last piece that ran, and its first kernel that did not run.
            core_ns: its core time.
        """
        if self.pending:
            self.commit()  # before the core decides the next launch
        launch, undone = self._flying, self._untaken
        assert launch is not None
        self.going = ""
        if stopped is not None:
            undone += self._put_back(launch.session, *stopped)
        self._pieces, self._batch = [], None  # a session that has ended must not stay
        # counted from the end: the journal may have begun within the frames, so the core may count from a later kernel
        last = launch.last - undone if undone else -1
        self._feed(LaunchDoneEvent(self._clock(), launch.launch, gpu_ns, core_ns, last))

    def _put_back(self, name: str, stopped: Piece, end: int) -> int:
        """Return what did not run to the head of its queue. Returns its number of kernels."""
        pieces, batch = self._pieces, self._batch
        assert batch is not None
        undone = stopped[3] - end
        stopped[1].next = end
        for _, frame, first, behind in pieces[pieces.index(stopped) + 1 :]:
            undone += behind - first
            frame.next = first
        batch.at = next(k for k, (_, frame) in enumerate(batch.frames) if frame.next < len(frame.cut.kernels))
        flow = self._flows.get(name)
        if flow is not None and (not flow or flow[0] is not batch):
            flow.appendleft(batch)
        return undone

    def withheld_s(self) -> float:
        """Seconds until the core decides again. Call it only while the core keeps the device idle (`state.withheld_until`)."""
        return max((self.state.withheld_until - self._clock()) / 1e9, 0.0)

    def end_withholding(self) -> None:
        """Let the core decide again if the time of its `WithholdDecision` has come. Call it as `withheld_s`."""
        now = self._clock()
        if now >= self.state.withheld_until:
            self._feed(WithheldEvent(now))

    def should_stop(self) -> bool:
        """Whether the launch in flight must stop for a higher class: see the core's `should_stop`."""
        return should_stop(self.state)

    def others_wait(self) -> bool:
        """Whether a session waits for its turn, beside that of the launch in flight."""
        state, launch = self.state, self._flying
        if state.waiting != 1 or launch is None:
            return state.waiting > 1
        own = state.sessions.get(launch.session)
        return own is None or own.lane < 0

    def patience_ns(self) -> int:
        """Maximum time, in ns, between two polls for new frames: half of the window of the class in flight.

        With only one session, a longer time suffices: a second session must first be opened by a call, and calls are checked
        after each launch.
        """
        if len(self.state.sessions) == 1 and not self._fifo:
            return _PATIENCE_ALONE_NS
        windows, launch = self.state.windows, self._flying
        return (windows[launch.priority] if launch is not None else min(windows)) // 2

    # -- sessions ----------------------------------------------------------------------------------------------------

    def opened(self, session: Session, policy: Policy, tenant: str) -> None:
        """Tell the core about a new session."""
        if not self._fifo:
            self._open(session.id, policy, tenant)

    def _open(self, flow: str, policy: Policy, tenant: str) -> None:
        self._flows[flow] = deque()
        self._numbers[flow] = 0
        self._feed(SessionOpenedEvent(self._clock(), flow, policy, tenant))

    def closed(self, session: Session) -> None:
        """Tell the core that a session has ended. Its queued frames will not run."""
        if not self._fifo:
            self.pending.pop(session.id, None)
            del self._flows[session.id], self._numbers[session.id]
            self._feed(SessionClosedEvent(self._clock(), session.id))

    def swapped_out(self, session: Session) -> None:
        """Tell the core that a session's memory, or room for its next program, is not on the device. The core passes the session
        over, and asks for the memory when its turn comes.
        """
        if not self._fifo:
            self._feed(SwappedOutEvent(self._clock(), session.id))

    def swapped_in(self, session: Session) -> None:
        """Tell the core that the memory is on the device."""
        if not self._fifo:
            self._feed(SwappedInEvent(self._clock(), session.id))

    def priority_of(self, session_id: str) -> int:
        """The class of a session; 2 if the session is not open."""
        found = self.state.sessions.get(session_id)
        return found.policy.priority if found is not None else 2

    def treatment(self, session_id: str) -> tuple[Policy, bool, bool]:
        """A session's policy, whether it is suspended, and whether it has the device exclusively.

        Raises:
            SteeringError: this executor runs frames in order of arrival.
            UnknownSessionError: no session has this id.
        """
        if self._fifo:
            raise SteeringError(
                "this executor runs frames in order of arrival (WOOLY_EXECUTOR_DISPATCH=fifo): sessions have no class"
            )
        found = self.state.sessions.get(session_id)
        if found is None:
            raise UnknownSessionError(f"session {session_id} is not open on this executor")
        return found.policy, found.suspended, self.state.exclusive == session_id

    def steer(self, session_id: str, policy: Policy, suspended: bool, exclusive: bool) -> None:
        """Change how a session is scheduled.

        Raises:
            SteeringError: another session has the device exclusively, or this executor runs frames in order of arrival. Nothing
                changes.
            UnknownSessionError: no session has this id.
        """
        before = self.treatment(session_id)
        now = self._clock()
        if exclusive and not before[2]:
            if self.state.exclusive:
                raise SteeringError(f"session {self.state.exclusive} has exclusive use of the device; end that first")
            self._feed(ExclusiveBegunEvent(now, session_id))
        elif before[2] and not exclusive:
            self._feed(ExclusiveEndedEvent(now))
        if policy != before[0]:
            self.commit()
            self._feed(PolicyChangedEvent(now, session_id, policy))
        if suspended != before[1]:
            self._feed((SessionSuspendedEvent if suspended else SessionResumedEvent)(now, session_id))

    def epoch_ended(self, slowdown_permille: int, idle_permille: int) -> tuple[int, ...]:
        """Feed the measurements of an epoch to the core. Returns the new windows by class, in ns."""
        self._feed(EpochEndedEvent(self._clock(), slowdown_permille, idle_permille))
        return self.state.windows

    # -- the journal -------------------------------------------------------------------------------------------------

    def begin_journal(self) -> Entries:
        """Start a journal: reset the core, and record the open sessions, their policies and their queued frames as its first
        entries.

        The reset forgets what the core owed to sessions. Call it between launches.
        """
        assert not self.state.flights or self.launch is not None, "a launch is in flight"
        self.commit()
        old, flows = self.state, self._flows
        self.state, self.launch = DispatchState(), None
        self._flows, self._numbers = {}, {}
        entries: Entries = deque()
        self.entries = entries
        self._begin()
        for flow in flows:
            session = old.sessions[flow]
            if not self._fifo:
                self._open(flow, session.policy, session.tenant)
            if session.suspended:
                self._feed(SessionSuspendedEvent(self._clock(), flow))
            if not session.resident:
                self._feed(SwappedOutEvent(self._clock(), flow))
            if old.exclusive == flow:
                self._feed(ExclusiveBegunEvent(self._clock(), flow))
        for flow, queued in flows.items():
            self._flows[flow] = queued
            for number, batch in enumerate(queued, 1):
                self._numbers[flow] = number
                self._feed(ProgramSubmittedEvent(self._clock(), flow, number, batch.kernels()))
        return entries

    def end_journal(self) -> None:
        """Stop recording entries."""
        self.entries = None
