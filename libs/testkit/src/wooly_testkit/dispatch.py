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
    WithheldEvent,
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

    def wait(self) -> list[Decision]:
        """Let the time pass for which the core keeps the device idle."""
        self.now = max(self.now, self.state.withheld_until)
        return self.send(WithheldEvent(self.now))

    def drain(self) -> list[LaunchDecision]:
        """End all launches in their order, each as estimated. Returns them."""
        found = []
        while self.in_flight or self.state.withheld_until:
            if self.in_flight:
                found.append(self.finish())
            else:
                self.wait()
        return found


def rhythm_beside_work(
    rig: Rig, wall_ns: int, pause_ns: int, piece_ns: int, program_ns: int = 100_000
) -> tuple[int, int]:
    """Let session "front" compute in a rhythm for some time, while session "behind" always has pieces of `piece_ns` to run.

    As in an executor, a program that arrives during a piece is submitted at the end of the piece. `pause_ns` is the time between
    the end of a program of "front" and its next one. Launches can be stopped.

    Returns:
        The time that "behind" ran, in ns, and the number of programs of "front" that ended.
    """
    until, arrives, ended = rig.now + wall_ns, rig.now, 0
    before = rig.run_ns.get("behind", 0)
    while rig.now < until:
        if not rig.state.sessions["behind"].programs:
            rig.submit("behind", *[piece_ns] * 8)
        if arrives <= rig.now:
            rig.submit("front", program_ns)
            arrives = until
        elif rig.in_flight:
            launch = rig.in_flight[0]
            took = program_ns if launch.session == "front" else piece_ns
            if arrives <= rig.now + took:
                rig.now += took
                rig.submit("front", program_ns)
                rig.now, arrives = rig.now - took, until
            rig.finish(took, launch.first + 1)
            if launch.session == "front":
                ended, arrives = ended + 1, rig.now + pause_ns
        else:
            rig.now = min(arrives, rig.state.withheld_until)
            if rig.now == rig.state.withheld_until:
                rig.wait()
    return rig.run_ns.get("behind", 0) - before, ended
