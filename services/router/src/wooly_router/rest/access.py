"""Who calls, and what they may: roles, scopes, tenants, rates. Knows tokens by their hashes alone."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from wooly_bus.errors import RefusedError

from wooly_router.state.config import AuditRecord
from wooly_router.state.tenants import Role, TokenRecord
from wooly_router.state.world import World

Area = Literal["tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs"]
Verb = Literal["read", "write"]

#: What each role may. A token's scopes, where it has any, take from it.
ROLES: dict[Role, frozenset[str]] = {
    "user": frozenset({"tasks:read", "tasks:write", "blobs:read", "blobs:write", "nodes:read", "groups:read"}),
    "operator": frozenset(
        {
            *("tasks:read", "tasks:write", "blobs:read", "blobs:write", "nodes:read", "nodes:write"),
            *("groups:read", "groups:write", "config:read", "metrics:read", "audit:read"),
        }
    ),
    "admin": frozenset(
        f"{area}:{verb}"
        for area in ("tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs")
        for verb in ("read", "write")
    ),
}
SCOPES = tuple(sorted(ROLES["admin"]))
#: Callers whose rate is remembered.
CALLERS = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who was let in.

    Attributes:
        actor: for the audit log.
        tenant: whose tasks they see; None: everybody's.
        own: the tenant that what they make belongs to.
        may: scopes.
    """

    actor: str
    tenant: str | None
    own: str
    may: frozenset[str]


class Buckets:
    """A bucket of requests per caller: `burst` at once, refilled with `rate` a second.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> bool:
        """One request more. False if it is too much."""
        now = self._clock()
        left, at = self._left.get(caller, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        self._left[caller] = (left - 1 if left >= 1 else left, now)
        self._left.move_to_end(caller)
        if len(self._left) > CALLERS:
            self._left.popitem(last=False)
        return left >= 1


class Access:
    """Lets callers in.

    Args:
        world: tokens, the audit log.
        auth: "open": everybody is admin (for a stack that listens on loopback only); "tokens": who shows one.
        buckets: rates.
    """

    def __init__(
        self, world: World, auth: Literal["open", "tokens"], buckets: Buckets, clock: Callable[[], float]
    ) -> None:
        self.world, self.auth, self._buckets, self._clock = world, auth, buckets, clock

    async def of_secret(self, secret: str) -> TokenRecord:
        """The token of a secret.

        Raises:
            RefusedError: it is none, has ended, or its tenant is disabled; the answer does not say which.
        """
        found = await self.world.tenants.by_secret(secret) if secret else None
        if found is None or not found[0].valid(self._clock()) or found[1].disabled:
            raise RefusedError("router.unauthorized", "a valid token is needed")
        return found[0]

    async def caller(self, secret: str, address: str) -> Caller:
        """Who calls.

        Raises:
            RefusedError: no valid token, or too many requests.
        """
        if self.auth == "open":
            caller = Caller(f"open:{address}", None, "default", ROLES["admin"])
        else:
            if not self._buckets.take(f"from {address}"):
                raise RefusedError("router.too_many", "too many requests; slow down", retryable=True)
            token = await self.of_secret(secret)
            may = ROLES[token.role]
            if token.scopes:
                may &= frozenset(token.scopes)
            tenant = token.tenant if token.role == "user" else None
            caller = Caller(f"token:{token.id}", tenant, token.tenant, may)
        if not self._buckets.take(caller.actor):
            raise RefusedError("router.too_many", "too many requests; slow down", retryable=True)
        return caller

    async def log(self, caller: Caller, action: str, target: str, **detail: object) -> None:
        """Somebody changed something."""
        await self.world.audit.add(
            AuditRecord(self._clock(), caller.actor, caller.own, action, target[:255], dict(detail))
        )


_bearer = HTTPBearer(auto_error=False, description="An API token of a tenant's.")


async def _caller(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    access: Access = request.app.state.access
    secret = credentials.credentials if credentials is not None else ""
    return await access.caller(secret, request.client.host if request.client else "")


def needs(area: Area, verb: Verb) -> Callable[..., Awaitable[Caller]]:
    """A dependency: the caller, who may do this in that area."""

    async def check(caller: Annotated[Caller, Depends(_caller)]) -> Caller:
        if f"{area}:{verb}" not in caller.may:
            raise RefusedError("router.forbidden", f"this token may not {verb} {area}")
        return caller

    return check
