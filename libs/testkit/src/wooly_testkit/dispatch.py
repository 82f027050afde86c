"""A device in virtual time around the dispatch core, small enough for tests: every event is audited as it happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from wooly_dispatch.core import step as real_step
from wooly_dispatch.decisions import Decision, LaunchDecision
from wooly_dispatch.events import (
    Config,
    Event,
    LaunchDoneEvent,
    Policy,
    ProgramSubmittedEvent,
    SessionOpenedEvent,
)
from wooly_dispatch.invariants import Auditor, check_state
from wooly_dispatch.metrics import Metrics
from wooly_dispatch.state import DispatchState

Step = Callable[[DispatchState, Event], tuple[DispatchState, list[Decision]]]


class Rig:
    """Feeds events, keeps what is in flight, and raises `InvariantError` at the first broken law.

    Args:
        step: The core, or a mutant of it.
        config: Constants of the rule.
        books: Compare the core's own books after every event too.
    """

    def __init__(self, step: Step = real_step, config: Config | None = None, books: bool = True) -> None:
        self.step, self.books = step, books
        self.state = DispatchState(config)
        self.auditor, self.metrics = Auditor(), Metrics()
        self.entries: list[tuple[Event, list[Decision]]] = []
        self.in_flight: deque[LaunchDecision] = deque()
        self.submitted: dict[str, int] = {}
        self.run_ns: dict[str, int] = {}
        self.now = 0

    def send(self, event: Event) -> list[Decision]:
        """One event, at its own time."""
        self.state, decisions = self.step(self.state, event)
        self.entries.append((event, decisions))
        if self.books:
            check_state(self.state)
        self.auditor.audit(event, decisions, self.state.windows)
        self.metrics.observe(event, decisions)
        self.in_flight.extend(d for d in decisions if isinstance(d, LaunchDecision))
        return decisions

    def open(self, session: str, priority: int = 2, **policy: Any) -> list[Decision]:
        """Open a session now; `policy`: fields of `Policy`, and `resident`."""
        resident = policy.pop("resident", True)
        decisions = self.send(SessionOpenedEvent(self.now, session, Policy(priority, **policy), resident=resident))
        if not decisions:  # neither refused nor launched anything, which opening never does
            self.submitted[session] = 0
        return decisions

    def submit(self, session: str, *kernels: int) -> list[Decision]:
        """Submit the session's next program now."""
        number = self.submitted[session] = self.submitted.get(session, 0) + 1
        return self.send(ProgramSubmittedEvent(self.now, session, number, kernels))

    def finish(self, gpu_ns: int | None = None, last: int = -1) -> LaunchDecision:
        """The oldest launch ends, after as long as was estimated unless told otherwise; stopped before kernel `last` if told."""
        launch = self.in_flight.popleft()
        took = launch.estimate_ns if gpu_ns is None else gpu_ns
        self.now += took
        self.run_ns[launch.session] = self.run_ns.get(launch.session, 0) + took
        self.send(LaunchDoneEvent(self.now, launch.launch, took, last=last))
        return launch

    def drain(self) -> list[LaunchDecision]:
        """Finish everything, as estimated; in the order of launches."""
        found = []
        while self.in_flight:
            found.append(self.finish())
        return found
