"""The policy of an epoch: how P0 fares, how idle the device is, and whether saying so would move the windows."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_dispatch.state import DispatchState
from wooly_dispatch.windows import MAX_WIDTH, MIN_WIDTH, adapted, windows

from wooly_scheduler.core.meters import ENOUGH, GpuMeters


@dataclass(frozen=True, slots=True)
class EndEpochDecision:
    """Tell the executor what was measured; fields as in `wooly_dispatch.events.EpochEndedEvent`."""

    slowdown_permille: int
    idle_permille: int


def slowdown_permille(state: DispatchState, meters: GpuMeters) -> int:
    """The worst P0 session's p99 over its p99 alone (the least seen, or its declared service time); 0: not measured.

    Never more than lower classes account for by what they ran meanwhile: windows mend nothing else, and a host that is busy with
    other things would narrow them to nothing.
    """
    worst = 0
    for name, pace in meters.paces.items():
        session = state.sessions.get(name)
        if session is None or session.policy.priority != 0 or pace.recent.count < ENOUGH:
            continue
        alone = pace.best_ns or session.policy.service_ns
        if alone:
            slower = pace.recent.quantile(990) * 1000 // alone
            worst = max(worst, min(slower, 1000 + pace.suffered.quantile(990) * 1000 // alone))
    return worst


def decide(state: DispatchState, meters: GpuMeters) -> EndEpochDecision | None:
    """What to tell the executor now; None while too little was measured, or while it would change no window."""
    slowdown = slowdown_permille(state, meters)
    if not slowdown:
        return None
    idle = meters.idle_permille()
    width = adapted(state.config, state.width, slowdown, idle)
    if width == state.width:
        for pace in meters.paces.values():
            if pace.recent.count >= 8 * ENOUGH:
                pace.judged()  # what was long ago says nothing of now
        return None
    live = [
        (s.policy.priority, s.policy.service_ns)
        for s in state.sessions.values()
        if s.policy.priority < 2 and not s.suspended
    ]
    furthest = MIN_WIDTH if width < state.width else MAX_WIDTH
    if windows(state.config, live, furthest) == state.windows:
        return None
    return EndEpochDecision(slowdown, idle)
