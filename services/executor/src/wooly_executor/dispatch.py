"""Between sessions and the device: a frame that occupies it is a program of the dispatch core, whose launches are carried out.

    dispatch.submit(session, frame)                 the core may decide on a launch: `dispatch.launch`
    dispatch.take()                                 which session's frame, and which of its kernels
    dispatch.done(gpu_ns)                           the core decides on the next

Owned by the device loop's thread. Other threads only take from `entries`, the journal to be.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from wooly_dispatch.core import ALONE, overtaken, step
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
#: One launch at a time, and it is stopped where a higher class arrives: nothing that was decided earlier stands between P0 and a
#: device whose runtime runs while one waits. What nobody interrupts costs a decision every 4 ms; so long do equals wait for each
#: other. What P0 and P1 take that declare nothing is bounded (`policing`): WOOLY_EXECUTOR_UNDECLARED_PERCENT.
CONFIG = Config(max_flights=1, stoppable=True, piece_ns=4_000_000, undeclared_permille=200)
_ARRIVALS = "arrivals"


class Dispatch:
    """Feeds the core.

    Args:
        fifo: all sessions are one to the core, so that frames run in the order of their arrival. For comparison only.
        undeclared_permille: see `Config`.
        clock: monotonic ns.

    Attributes:
        launch: what the core has decided to run next.
        wanted: sessions whose memory the core wants on the device: their turn has come.
        entries: where events and decisions are kept for the journal; None: nowhere.
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
                log.warning("the dispatch core refused %s: %s", event, decision.reason)
        return decisions

    # -- work --------------------------------------------------------------------------------------------------------

    def submit(self, session: Session, frame: Frame) -> None:
        """A frame waits for the device; `frame.cut` says what it is expected to take."""
        flow = _ARRIVALS if self._fifo else session.id
        number = self._numbers[flow] = self._numbers[flow] + 1
        self._flows[flow].append((session, frame))
        self._feed(ProgramSubmittedEvent(self._clock(), flow, number, frame.cut.kernels))

    def take(self) -> tuple[Session, Frame, int, int] | None:
        """What `launch` says to run now: kernels from the first up to the last. None: its session is gone; it is done with 0 ns.

        From now on the launch is in flight.
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
        """The launch in flight took so long on the device. `stopped`: before that kernel of that frame."""
        launch, last = self._flying, -1
        assert launch is not None
        if stopped is not None:
            session, frame, end = stopped
            last = launch.last - (frame.next - end)  # the core may know the frame from a later kernel on
            frame.next = end
            flow = self._flows.get(launch.session)
            if flow is not None and (not flow or flow[0][1] is not frame):
                flow.appendleft((session, frame))
        self._feed(LaunchDoneEvent(self._clock(), launch.launch, gpu_ns, core_ns, last))

    def overtaken(self) -> bool:
        """Whether the launch in flight is to be stopped: see the core's `overtaken`."""
        return overtaken(self.state)

    def patience_ns(self) -> int:
        """How long nobody need look for new frames: half of what may be in flight beside a session of a higher class.

        While one session is open, another comes by a call of the control plane first, and that is seen after each launch.
        """
        windows, launch = self.state.windows, self._flying
        if len(self.state.sessions) == 1 and not self._fifo:
            return CONFIG.piece_ns * ALONE
        return (windows[launch.priority] if launch is not None else min(windows)) // 2

    # -- sessions ----------------------------------------------------------------------------------------------------

    def opened(self, session: Session, policy: Policy, tenant: str) -> None:
        """A session takes part."""
        if not self._fifo:
            self._open(session.id, policy, tenant)

    def _open(self, flow: str, policy: Policy, tenant: str) -> None:
        self._flows[flow] = deque()
        self._numbers[flow] = 0
        self._feed(SessionOpenedEvent(self._clock(), flow, policy, tenant))

    def closed(self, session: Session) -> None:
        """A session takes part no more. What it has queued will not run."""
        if not self._fifo:
            del self._flows[session.id], self._numbers[session.id]
            self._feed(SessionClosedEvent(self._clock(), session.id))

    def swapped_out(self, session: Session) -> None:
        """A session's memory, or the room that its next program needs, is not on the device: it is passed over, and asked for."""
        if not self._fifo:
            self._feed(SwappedOutEvent(self._clock(), session.id))

    def swapped_in(self, session: Session) -> None:
        """It is there now."""
        if not self._fifo:
            self._feed(SwappedInEvent(self._clock(), session.id))

    def priority_of(self, session_id: str) -> int:
        """A session's class, as it was set; 2 for one that is not (any more)."""
        found = self.state.sessions.get(session_id)
        return found.policy.priority if found is not None else 2

    def treatment(self, session_id: str) -> tuple[Policy, bool, bool]:
        """How a session is treated: its policy, whether it is suspended, whether it has the device to itself.

        Raises:
            SteeringError: there is nothing to steer by.
            UnknownSessionError: there is none of that id.
        """
        if self._fifo:
            raise SteeringError("this executor runs frames in the order of their arrival")
        found = self.state.sessions.get(session_id)
        if found is None:
            raise UnknownSessionError(f"session {session_id} is not open here")
        return found.policy, found.suspended, self.state.exclusive == session_id

    def steer(self, session_id: str, policy: Policy, suspended: bool, exclusive: bool) -> None:
        """Treat a session like this from now on.

        Raises:
            SteeringError: another session has the device to itself, or there is nothing to steer by. Nothing was changed.
            UnknownSessionError: there is none of that id.
        """
        before = self.treatment(session_id)
        now = self._clock()
        if exclusive and not before[2]:
            if self.state.exclusive:
                raise SteeringError(f"session {self.state.exclusive} has the device to itself")
            self._feed(ExclusiveBegunEvent(now, session_id))
        elif before[2] and not exclusive:
            self._feed(ExclusiveEndedEvent(now))
        if policy != before[0]:
            self._feed(PolicyChangedEvent(now, session_id, policy))
        if suspended != before[1]:
            self._feed((SessionSuspendedEvent if suspended else SessionResumedEvent)(now, session_id))

    def epoch_ended(self, slowdown_permille: int, idle_permille: int) -> tuple[int, ...]:
        """What an epoch measured. Returns the windows now in force, in ns, by class."""
        self._feed(EpochEndedEvent(self._clock(), slowdown_permille, idle_permille))
        return self.state.windows

    # -- the journal -------------------------------------------------------------------------------------------------

    def begin_journal(self) -> Entries:
        """Forget all history and keep the entries from here on: who is open, how each is treated, what each has queued.

        Where a journal begins, the core's state is that of a new one; what sessions were owed is forgotten. Between launches.
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
        """Keep no more entries: nobody takes them."""
        self.entries = None
