"""Limits on open tunnels: in total, per tenant and per session, so that one tenant cannot block the others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from wooly_bus.errors import RefusedError

#: 1 / KEPT_PART of all places is reserved for tenants without a tunnel, so that one tenant cannot take the last places.
KEPT_PART = 4


@dataclass(frozen=True, slots=True)
class TunnelLimits:
    """Limits on tunnels that are open at the same time.

    Attributes:
        total: all tunnels of this executor.
        per_tenant: tunnels of one tenant. If NATS has no tenants, only `total` applies.
        per_session: tunnels of one session's credentials. A session needs one tunnel, and briefly a second one if it retries.
    """

    total: int = 64
    per_tenant: int = 16
    per_session: int = 2


class TunnelPlaces:
    """Counts tunnels per tenant and session, including tunnels that are being opened.

    Attributes:
        taken: number of all tunnels.
    """

    def __init__(self, limits: TunnelLimits) -> None:
        self._limits = limits
        self._of_tenants: Counter[str] = Counter()
        self._of_sessions: Counter[str] = Counter()
        self.taken = 0

    @contextlib.contextmanager
    def take(self, tenant: str, session: str) -> Iterator[contextlib.ExitStack]:
        """Take a place for a tunnel. The end of the block frees it, unless the caller keeps the stack (`pop_all`).

        Args:
            tenant: name of the tenant; empty if unknown.
            session: name of the session's credentials; empty if unknown.

        Raises:
            RefusedError: a limit is reached. The message names the limit, the number of tunnels and the remedy.
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
                    f"session {session} has {self._of_sessions[session]} open tunnels on this executor; the limit for one "
                    f"session is {limits.per_session}; close one of them, or open another session"
                )
            if own >= limits.per_tenant:
                return (
                    f"tenant {tenant} has {own} open tunnels on this executor; the limit for one tenant is {limits.per_tenant} "
                    "(WOOLY_EXECUTOR_TUNNELS_PER_TENANT); end sessions that use a tunnel, or connect without a tunnel"
                )
            if own and limits.total - self.taken <= kept:
                return (
                    f"{self.taken} of {limits.total} tunnels (WOOLY_EXECUTOR_TUNNELS) are open on this executor; the last "
                    f"{kept} are reserved for tenants without a tunnel, and tenant {tenant} has {own}; end a session that uses "
                    "a tunnel, or try again later"
                )
        if self.taken >= limits.total:
            return (
                f"{self.taken} tunnels are open on this executor; the limit is {limits.total} (WOOLY_EXECUTOR_TUNNELS); "
                "try again later, or connect without a tunnel"
            )
        return ""

    def _give_back(self, tenant: str, session: str) -> None:
        self.taken -= 1
        if tenant:
            for of, name in ((self._of_tenants, tenant), (self._of_sessions, session)):
                of[name] -= 1
                if not of[name]:
                    del of[name]
