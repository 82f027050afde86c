"""Who may open one more tunnel: limits in all, per tenant and per session, so that no tenant shuts the others out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from wooly_bus.errors import RefusedError

#: Of the places for tunnels, one in so many is kept for tenants that have no tunnel yet: no tenant takes the last places.
KEPT_PART = 4


@dataclass(frozen=True, slots=True)
class TunnelLimits:
    """How many tunnels there may be at a time.

    Attributes:
        total: in all.
        per_tenant: of one tenant. Where NATS knows no tenants, only `total` holds.
        per_session: of one session's credentials. A session needs one, and another for a moment when a first attempt failed.
    """

    total: int = 64
    per_tenant: int = 16
    per_session: int = 2


class TunnelPlaces:
    """Who has how many tunnels, those included that are being opened."""

    def __init__(self, limits: TunnelLimits) -> None:
        self._limits = limits
        self._of_tenants: Counter[str] = Counter()
        self._of_sessions: Counter[str] = Counter()
        self.taken = 0

    @contextlib.contextmanager
    def take(self, tenant: str, session: str) -> Iterator[contextlib.ExitStack]:
        """A place, given back with the block unless somebody keeps the stack (`pop_all`). Both names are empty where not known.

        Raises:
            RefusedError: there is none; the message says which limit, how many there are, and what to do.
        """
        why = self._refusal(tenant, session)
        if why:
            raise RefusedError("channel.busy", why, retryable=True)
        self.taken += 1
        with contextlib.ExitStack() as place:
            place.callback(self._give_back, tenant, session)
            if tenant:
                self._of_tenants[tenant] += 1
                self._of_sessions[session] += 1
            yield place

    def _refusal(self, tenant: str, session: str) -> str:
        limits = self._limits
        if tenant:
            own, kept = self._of_tenants[tenant], limits.total // KEPT_PART
            if self._of_sessions[session] >= limits.per_session:
                return (
                    f"session {session} has {self._of_sessions[session]} tunnels here, and {limits.per_session} is the limit "
                    "for one session; close one of them, or open another session"
                )
            if own >= limits.per_tenant:
                return (
                    f"tenant {tenant} has {own} tunnels here, and {limits.per_tenant} is the limit for one tenant "
                    "(WOOLY_EXECUTOR_TUNNELS_PER_TENANT); end sessions that use a tunnel, or reach the executor directly"
                )
            if own and limits.total - self.taken <= kept:
                return (
                    f"{self.taken} of {limits.total} tunnels are open here (WOOLY_EXECUTOR_TUNNELS), and the last {kept} places "
                    f"are kept for tenants without any; tenant {tenant} has {own}: end a session that uses one, or try later"
                )
        if self.taken >= limits.total:
            return (
                f"{self.taken} tunnels are open here, and {limits.total} is the limit (WOOLY_EXECUTOR_TUNNELS); "
                "try again later, or reach the executor directly"
            )
        return ""

    def _give_back(self, tenant: str, session: str) -> None:
        self.taken -= 1
        if tenant:
            for of, name in ((self._of_tenants, tenant), (self._of_sessions, session)):
                of[name] -= 1
                if not of[name]:
                    del of[name]
