"""The policy of an epoch: how much P0 is slowed down, how idle the device is, and whether the executor must change its
windows.
"""

from __future__ import annotations

from dataclasses import dataclass

from wooly_dispatch.state import DispatchState
from wooly_dispatch.windows import MAX_WIDTH, MIN_WIDTH, adapted, windows

from wooly_scheduler.core.meters import ENOUGH, GpuMeters


@dataclass(frozen=True, slots=True)
class EndEpochDecision:
    """Send these measurements to the executor; fields as in `wooly_dispatch.events.EpochEndedEvent`."""

    slowdown_permille: int
    idle_permille: int


def slowdown_permille(state: DispatchState, meters: GpuMeters) -> int:
    """The worst ratio of a P0 session's p99 to its p99 alone, in permille; 0: not measured.

    The p99 alone is the lowest p99 so far, or the session's declared service time. The slowdown is limited to the work that lower
    classes ran at the same time. Windows affect only that work; without this limit, other load on the host would narrow the
    windows to nothing.
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
    """The measurements to send to the executor; None if there are too few, or if no window would change."""
    slowdown = slowdown_permille(state, meters)
    if not slowdown:
        return None
    idle = meters.idle_permille()
    width = adapted(state.config, state.width, slowdown, idle)
    if width == state.width:
        for pace in meters.paces.values():
            if pace.recent.count >= 8 * ENOUGH:
                pace.restart_measurements()  # old measurements do not describe the present
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
