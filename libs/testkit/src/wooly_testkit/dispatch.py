"""A simulated device around the dispatch core, for tests. Time is virtual, and every event is audited at once."""

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
    """Sends events to the core, tracks launches in flight, and raises `InvariantError` at the first violated invariant.

    Args:
        step: the core, or a mutant of it.
        config: constants of the dispatch rule.
        books: also check the core's internal state after every event.
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
        """Send one event, and return the decisions."""
        self.state, decisions = self.step(self.state, event)
        self.entries.append((event, decisions))
        if self.books:
            check_state(self.state)
        self.auditor.audit(event, decisions, self.state.windows)
        self.metrics.observe(event, decisions)
        self.in_flight.extend(d for d in decisions if isinstance(d, LaunchDecision))
        return decisions

    def open(self, session: str, priority: int = 2, **policy: Any) -> list[Decision]:
        """Open a session now. `policy` has fields of `Policy`, and `resident`."""
        resident = policy.pop("resident", True)
        decisions = self.send(SessionOpenedEvent(self.now, session, Policy(priority, **policy), resident=resident))
        if not decisions:  # the session was not refused; opening never launches
            self.submitted[session] = 0
        return decisions

    def submit(self, session: str, *kernels: int) -> list[Decision]:
        """Submit the session's next program now."""
        number = self.submitted[session] = self.submitted.get(session, 0) + 1
        return self.send(ProgramSubmittedEvent(self.now, session, number, kernels))

    def finish(self, gpu_ns: int | None = None, last: int = -1) -> LaunchDecision:
        """End the oldest launch in flight.

        Args:
            gpu_ns: measured duration; None: as estimated.
            last: the launch stopped before this kernel; -1: it ran to its end.
        """
        launch = self.in_flight.popleft()
        took = launch.estimate_ns if gpu_ns is None else gpu_ns
        self.now += took
        self.run_ns[launch.session] = self.run_ns.get(launch.session, 0) + took
        self.send(LaunchDoneEvent(self.now, launch.launch, took, last=last))
        return launch

    def drain(self) -> list[LaunchDecision]:
        """End all launches in their order, each as estimated. Returns them."""
        found = []
        while self.in_flight:
            found.append(self.finish())
        return found
