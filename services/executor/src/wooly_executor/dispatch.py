"""Connects sessions to the dispatch core: submits their frames as programs, and returns the launches that the core decides.

    dispatch.submit(session, frame)                 the core may decide a launch, which is then in `dispatch.launch`
    dispatch.take()                                 the session, the frame and the kernels of that launch
    dispatch.done(gpu_ns)                           the launch has ended; the core decides the next one

The device loop's thread owns this module. Other threads only take from `entries`, the future journal.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

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
)
from wooly_dispatch.state import DispatchState

from wooly_executor.errors import SteeringError, UnknownSessionError
from wooly_executor.frames import Frame
from wooly_executor.session import Session

log = logging.getLogger("wooly.executor")
Entries = deque[tuple[Event, list[Decision]]]
#: One launch at a time, and a session of a higher class stops it at the next edge. So a P0 session never waits for launches that
#: were decided earlier. `piece_ns` (4 ms) bounds how long sessions of equal class wait for each other; each piece costs one
#: decision. `undeclared_permille` bounds P0 and P1 sessions that declare no rate (`policing`, WOOLY_EXECUTOR_UNDECLARED_PERCENT).
CONFIG = Config(max_flights=1, stoppable=True, piece_ns=4_000_000, undeclared_permille=200)
_ARRIVALS = "arrivals"
#: Time, in ns, between two polls for new frames while one session is open.
_PATIENCE_ALONE_NS = CONFIG.piece_ns * ALONE


class Dispatch:
    """Feeds the dispatch core with events and keeps its decisions.

    Args:
        fifo: treat all sessions as one, so that frames run in the order of arrival. For comparison only.
        undeclared_permille: see `Config`.
        clock: returns monotonic ns.

    Attributes:
        launch: the launch that the core decided next.
        wanted: sessions whose turn has come and whose memory must be brought to the device.
        entries: queue of events and decisions for the journal; None: no journal.
    """

    def __init__(
        self,
        *,
        fifo: bool = False,
        undeclared_permille: int = CONFIG.undeclared_permille,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = replace(CONFIG, undeclared_permille=undeclared_permille)
        self.state = DispatchState()
        self.launch: LaunchDecision | None = None
        self.entries: Entries | None = None
        self.wanted: deque[str] = deque()
        self.fifo = self._fifo = fifo
        self._clock = clock
        self._flying: LaunchDecision | None = None
        self._flows: dict[str, deque[tuple[Session, Frame]]] = {}
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
        number = self._numbers[flow] = self._numbers[flow] + 1
        self._flows[flow].append((session, frame))
        self._feed(ProgramSubmittedEvent(self._clock(), flow, number, frame.cut.kernels))

    def take(self) -> tuple[Session, Frame, int, int] | None:
        """Take the frame and the kernels that `launch` says to run now. The launch is in flight from then on.

        Returns:
            Session, frame, first kernel, and the kernel after the last. None if the session has ended; then report 0 ns.
        """
        launch = self.launch
        assert launch is not None
        self.launch, self._flying = None, launch
        flow = self._flows.get(launch.session)
        if flow is None:
            return None
        session, frame = flow[0]
        first = frame.next
        frame.next = last = first + launch.last - launch.first
        if last == len(frame.cut.kernels):
            flow.popleft()
        return session, frame, first, last

    def done(self, gpu_ns: int, stopped: tuple[Session, Frame, int] | None = None, core_ns: int = 0) -> None:
        """Report the end of the launch in flight.

        Args:
            gpu_ns: its device time.
            stopped: session, frame and first kernel that did not run, if the launch was stopped early.
            core_ns: its core time.
        """
        launch, last = self._flying, -1
        assert launch is not None
        if stopped is not None:
            session, frame, end = stopped
            # the journal may have begun within the frame, so the core's numbers may start at a later kernel
            last = launch.last - (frame.next - end)
            frame.next = end
            flow = self._flows.get(launch.session)
            if flow is not None and (not flow or flow[0][1] is not frame):
                flow.appendleft((session, frame))
        self._feed(LaunchDoneEvent(self._clock(), launch.launch, gpu_ns, core_ns, last))

    def should_stop(self) -> bool:
        """Whether the launch in flight must stop for a higher class: see the core's `should_stop`."""
        return should_stop(self.state)

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
            for number, (_, frame) in enumerate(queued, 1):
                self._numbers[flow] = number
                self._feed(ProgramSubmittedEvent(self._clock(), flow, number, frame.cut.kernels[frame.next :]))
        return entries

    def end_journal(self) -> None:
        """Stop recording entries."""
        self.entries = None
