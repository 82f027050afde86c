"""The history of one session, from the dispatch journal: its requests, its launches, and the launches that it waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from wooly_dispatch.decisions import Decision, DemoteDecision, LaunchDecision, RefuseDecision, SwapInDecision
from wooly_dispatch.events import (
    Event,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    LaunchDoneEvent,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionClosedEvent,
    SessionOpenedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
)

_PLAIN: dict[type, str] = {
    SessionClosedEvent: "closed",
    SessionSuspendedEvent: "suspended",
    SessionResumedEvent: "resumed",
    SwappedInEvent: "memory was swapped in",
    SwappedOutEvent: "memory was swapped out",
    ExclusiveBegunEvent: "has exclusive use of the device",
}


def story(entries: Iterable[tuple[Event, Sequence[Decision]]], session: str) -> Iterator[str]:
    """Yield one line per event of `session`, with the time in us since the first entry.

    While programs of the session wait, the launches of other sessions are summed up and reported with its next launch.
    """
    began: int | None = None
    launches: dict[int, LaunchDecision] = {}
    passed: dict[str, int] = {}
    waiting = 0
    for event, decisions in entries:
        began = event.at if began is None else began
        when = f"{(event.at - began) / 1000:>12.1f}"
        refused = next((d.reason for d in decisions if isinstance(d, RefuseDecision)), "")
        for line in _event_lines(event, session, launches):
            yield f"{when}  {line}" + (f": refused, {refused}" if refused else "")
        if isinstance(event, ProgramSubmittedEvent) and event.session == session and not refused:
            waiting += len(event.kernels)
        for decision in decisions:
            if isinstance(decision, LaunchDecision):
                if decision.session == session:
                    launches[decision.launch] = decision
                    waiting -= decision.last - decision.first
                    yield f"{when}  {_launch_line(decision, passed)}"
                    passed = {}
                elif waiting:
                    passed[decision.session] = passed.get(decision.session, 0) + decision.estimate_ns
            elif isinstance(decision, SwapInDecision) and decision.session == session:
                yield f"{when}  next to run, but swapped out: requested swap-in"
            elif isinstance(decision, DemoteDecision) and decision.session == session:
                yield f"{when}  program {decision.program} exceeds the token bucket and runs as P2"


def _event_lines(event: Event, session: str, launches: dict[int, LaunchDecision]) -> Iterator[str]:
    if isinstance(event, LaunchDoneEvent):
        done = launches.pop(event.launch, None)
        if done is not None:
            how = f"stopped before kernel {event.last}" if 0 <= event.last < done.last else "done"
            yield f"launch {event.launch} {how}, {event.gpu_ns / 1000:.1f} us (estimated {done.estimate_ns / 1000:.1f})"
    elif isinstance(event, ExclusiveEndedEvent):
        yield "the device is shared again"
    elif getattr(event, "session", None) != session:
        return
    elif isinstance(event, SessionOpenedEvent | PolicyChangedEvent):
        what = "opened" if isinstance(event, SessionOpenedEvent) else "now"
        yield f"{what} as P{event.policy.priority}, weight {event.policy.weight}"
    elif isinstance(event, ProgramSubmittedEvent):
        yield f"program {event.program}: {len(event.kernels)} kernels, {sum(event.kernels) / 1000:.1f} us estimated"
    else:
        yield _PLAIN[type(event)]


def _launch_line(decision: LaunchDecision, passed: dict[str, int]) -> str:
    kernels = f"kernels {decision.first} to {decision.last - 1}"
    line = f"launch {decision.launch}: program {decision.program}, {kernels}, as P{decision.priority}"
    if decision.floor:
        line += " by its minimum share"
    if passed:
        line += ", after " + ", ".join(f"{ns / 1000:.1f} us of {name}" for name, ns in sorted(passed.items()))
    return line
