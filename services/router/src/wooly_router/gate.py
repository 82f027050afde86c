"""Who may ask for what, over REST and over NATS: tokens become tenants, roles and scopes. Knows tokens by their hashes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wooly_bus.errors import RefusedError

from wooly_router.state.tenants import Role
from wooly_router.state.world import World

AREAS = ("tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs", "credits")
#: What each role may. A token's scopes, where it has any, take from it.
ROLES: dict[Role, frozenset[str]] = {
    "user": frozenset(
        {"tasks:read", "tasks:write", "blobs:read", "blobs:write", "nodes:read", "groups:read", "credits:read"}
    ),
    "operator": frozenset(
        {
            *("tasks:read", "tasks:write", "blobs:read", "blobs:write", "nodes:read", "nodes:write"),
            *("groups:read", "groups:write", "config:read", "metrics:read", "audit:read", "credits:read"),
        }
    ),
    "admin": frozenset(f"{area}:{verb}" for area in AREAS for verb in ("read", "write")),
}
SCOPES = tuple(sorted(ROLES["admin"]))
#: The tenant of those who name none.
DEFAULT_TENANT = "default"


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


class Gate:
    """Lets callers in.

    Args:
        world: tokens.
        auth: "open": everybody is an administrator (for a stack that listens on loopback only); "tokens": who shows one.
        clock: seconds since the epoch.
    """

    def __init__(self, world: World, auth: Literal["open", "tokens"], clock: Callable[[], float]) -> None:
        self.world, self.auth, self.clock = world, auth, clock

    async def caller(self, secret: str, address: str) -> Caller:
        """Who has this secret.

        Raises:
            RefusedError: nobody, it has ended, or its tenant is disabled; the answer does not say which.
        """
        if self.auth == "open":
            return Caller(f"open:{address}", None, DEFAULT_TENANT, ROLES["admin"])
        found = await self.world.tenants.by_secret(secret) if secret else None
        if found is None or not found[0].valid(self.clock()) or found[1].disabled:
            raise RefusedError("router.unauthorized", "a valid token is needed")
        token = found[0]
        may = ROLES[token.role]
        if token.scopes:
            may &= frozenset(token.scopes)
        return Caller(f"token:{token.id}", token.tenant if token.role == "user" else None, token.tenant, may)

    async def over_nats(self, credential: str, claimed: str | None, scope: str) -> Caller:
        """Who sent a message, with the tenant that it is about as `own`.

        Args:
            credential: a token's secret.
            claimed: the tenant that the message names.
            scope: what it needs.

        Raises:
            RefusedError: see `caller`; or the token may not do it, or not for that tenant.
        """
        caller = await self.caller(credential, "nats")
        if scope not in caller.may:
            raise RefusedError("router.forbidden", f"this token does not have the scope {scope}")
        named = claimed if self.auth == "open" or claimed != DEFAULT_TENANT else None
        if caller.tenant is not None and named not in (None, caller.tenant):
            raise RefusedError("router.forbidden", f"this token is not one of tenant {named}")
        return Caller(caller.actor, caller.tenant or claimed, named or caller.own, caller.may)
