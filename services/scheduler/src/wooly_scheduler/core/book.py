"""The sessions of a GPU: those in its journal, and those that this scheduler admitted a moment ago."""

from __future__ import annotations

from wooly_scheduler.core.admission import Demand
from wooly_scheduler.core.follower import Follower

PENDING_S = 15.0
"""Seconds in which an admitted session must appear in the journal. After that, the scheduler assumes that the session runs
elsewhere.
"""


class Book:
    """The sessions of one GPU. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[float, Demand]] = {}

    def promise(self, demand: Demand, now: float) -> None:
        """Count an admitted session from now on."""
        self._pending[demand.session] = (now + PENDING_S, demand)

    def demands(self, follower: Follower, now: float) -> list[Demand]:
        """All sessions, ordered by name."""
        sessions = follower.state.sessions if not follower.lost else {}
        found = {
            name: Demand(name, s.tenant, s.policy, follower.meters.longest.get(name, 0), s.suspended)
            for name, s in sessions.items()
        }
        for name, (until, demand) in list(self._pending.items()):
            if name in found or now > until:
                del self._pending[name]
            else:
                found[name] = demand
        return [found[name] for name in sorted(found)]
