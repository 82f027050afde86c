"""Five dispatch policies with one interface: `step(event)` returns the launches to make.

The baseline policies use only some events of the core: opened sessions, submitted programs, ended launches. All policies get the
same estimates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from wooly_dispatch.core import step
from wooly_dispatch.decisions import Decision, LaunchDecision
from wooly_dispatch.events import Config, Event, LaunchDoneEvent, ProgramSubmittedEvent, SessionOpenedEvent
from wooly_dispatch.state import DispatchState


class Dispatcher(Protocol):
    """The interface of a policy."""

    def step(self, event: Event) -> list[Decision]:
        """Process an event, and return the decisions."""
        ...


class Wooly:
    """The dispatch core."""

    def __init__(self, config: Config) -> None:
        self.state = DispatchState(config)

    def step(self, event: Event) -> list[Decision]:
        self.state, decisions = step(self.state, event)
        return decisions


class _Queued:
    __slots__ = ("ends", "next", "number", "session")

    def __init__(self, event: ProgramSubmittedEvent) -> None:
        self.session, self.number = event.session, event.program
        self.ends = list(accumulate(event.kernels))
        self.next = 0


class _Baseline:
    """State of the baseline policies. Subclasses choose the launches in `_fill`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.queues: dict[str, deque[_Queued]] = {}
        self.priority: dict[str, int] = {}
        self.flights: dict[int, tuple[str, int]] = {}
        self.in_flight_ns = 0
        self.launches = 0

    def step(self, event: Event) -> list[Decision]:
        if isinstance(event, SessionOpenedEvent):
            self.queues[event.session] = deque()
            self.priority[event.session] = event.policy.priority
        elif isinstance(event, ProgramSubmittedEvent):
            queued = _Queued(event)
            self.queues[event.session].append(queued)
            self._arrived(queued)
        elif isinstance(event, LaunchDoneEvent):
            self.in_flight_ns -= self.flights.pop(event.launch)[1]
        decisions: list[Decision] = []
        self._fill(decisions)
        return decisions

    def _arrived(self, queued: _Queued) -> None:
        """Called after a program was added to the queue of its session."""

    def _fill(self, decisions: list[Decision]) -> None:
        raise NotImplementedError

    def _launch(self, program: _Queued, longest: int) -> LaunchDecision:
        """Launch the next kernels of a program for at most `longest` ns, but at least one kernel."""
        first = program.next
        done = program.ends[first - 1] if first else 0
        last = bisect_right(program.ends, done + longest, first + 1)
        estimate = program.ends[last - 1] - done
        program.next = last
        if last == len(program.ends):
            self.queues[program.session].popleft()
        self.launches += 1
        self.flights[self.launches] = (program.session, estimate)
        self.in_flight_ns += estimate
        priority = self.priority[program.session]
        return LaunchDecision(self.launches, program.session, program.number, first, last, priority, estimate)


class Fifo(_Baseline):
    """First in, first out over all sessions, with 4 ms in flight."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.line: deque[_Queued] = deque()

    def _arrived(self, queued: _Queued) -> None:
        self.line.append(queued)

    def _fill(self, decisions: list[Decision]) -> None:
        while self.line and self.in_flight_ns < self.config.free_window_ns:
            program = self.line[0]
            decisions.append(self._launch(program, self.config.piece_ns))
            if program.next == len(program.ends):
                self.line.popleft()


class RoundRobin(_Baseline):
    """One program of each session in turn, with 4 ms in flight."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.turn: deque[str] = deque()
        self.current: _Queued | None = None

    def _arrived(self, queued: _Queued) -> None:
        if queued.session not in self.turn:
            self.turn.append(queued.session)

    def _fill(self, decisions: list[Decision]) -> None:
        while self.in_flight_ns < self.config.free_window_ns:
            if self.current is None:
                if not self.turn:
                    return
                self.current = self.queues[self.turn.popleft()][0]
            program = self.current
            decisions.append(self._launch(program, self.config.piece_ns))
            if program.next == len(program.ends):
                self.current = None
                if self.queues[program.session] and program.session not in self.turn:
                    self.turn.append(program.session)


class TimeSlicing(_Baseline):
    """2 ms of one session, then the next session with work, as a GPU does for several processes."""

    slice_ns = 2_000_000

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.turn: deque[str] = deque()  # sessions with work, except the current one
        self.current: str | None = None
        self.left = 0

    def _arrived(self, queued: _Queued) -> None:
        if queued.session != self.current and queued.session not in self.turn:
            self.turn.append(queued.session)

    def _fill(self, decisions: list[Decision]) -> None:
        while True:
            if self.current is not None and self.left > 0 and self.queues[self.current]:
                launch = self._launch(self.queues[self.current][0], min(self.left, self.config.piece_ns))
                self.left -= max(launch.estimate_ns, 1)
                decisions.append(launch)
                continue
            if self.flights:
                return  # the slice ends when its launches have ended
            if self.current is not None and self.queues[self.current]:
                self.turn.append(self.current)
            self.current = self.turn.popleft() if self.turn else None
            if self.current is None:
                return
            self.left = self.slice_ns


class CountWindows(_Baseline):
    """Strict priority of classes, round robin inside a class, and a window of eight launches with one kernel each."""

    launches_in_flight = 8

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.turns: list[deque[str]] = [deque() for _ in range(5)]

    def _arrived(self, queued: _Queued) -> None:
        turn = self.turns[self.priority[queued.session]]
        if queued.session not in turn:
            turn.append(queued.session)

    def _fill(self, decisions: list[Decision]) -> None:
        while len(self.flights) < self.launches_in_flight:
            turn = next((turn for turn in self.turns if turn), None)
            if turn is None:
                return
            session = turn.popleft()
            decisions.append(self._launch(self.queues[session][0], 0))
            if self.queues[session]:
                turn.append(session)


POLICIES: dict[str, Callable[[Config], Dispatcher]] = {
    "wooly": Wooly,
    "fifo": Fifo,
    "slices": TimeSlicing,
    "count": CountWindows,
    "robin": RoundRobin,
}
