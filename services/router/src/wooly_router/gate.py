"""Authorization, over REST and over NATS: maps tokens to tenants, roles and scopes. It knows tokens by their hashes only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wooly_bus.errors import RefusedError

from wooly_router.owner import Owner
from wooly_router.state.tenants import Role, TenantRecord, hash_of
from wooly_router.state.world import World

#: What each role may read (r) and write (w), by area. The scopes of a token can only reduce its role's rights. The rule behind
#: the table: `user` acts for one tenant and sees only that tenant's part of each area. `operator` runs the cluster: it sees the
#: tasks, traces and credits of all tenants (names, sizes, times, states), and may cancel tasks or change their class. The data
#: of a tenant (blobs: modules, constants, inputs, results) and the means to act as a tenant (its tokens, its credentials, jobs
#: in its name) are reserved for the tenant itself and for `admin`.
TABLE: dict[str, dict[Role, str]] = {
    "tasks": {
        "user": "rw",
        "operator": "rw",
        "admin": "rw",
    },  # also sessions and traces; only `admin` may act in another tenant's name
    "blobs": {"user": "rw", "operator": "", "admin": "rw"},
    "nodes": {"user": "r", "operator": "rw", "admin": "rw"},
    "groups": {"user": "r", "operator": "rw", "admin": "rw"},
    "credits": {"user": "r", "operator": "r", "admin": "rw"},
    "config": {"user": "", "operator": "r", "admin": "rw"},
    "metrics": {"user": "", "operator": "r", "admin": "rw"},
    "audit": {"user": "", "operator": "r", "admin": "rw"},
    "tenants": {"user": "", "operator": "", "admin": "rw"},  # and their tokens
}
AREAS = tuple(TABLE)
_VERBS = {"r": "read", "w": "write"}
ROLES: dict[Role, frozenset[str]] = {
    role: frozenset(f"{area}:{_VERBS[letter]}" for area, may in TABLE.items() for letter in may[role])
    for role in ("user", "operator", "admin")
}
SCOPES = tuple(sorted(ROLES["admin"]))
#: The tenant of a request that names no tenant.
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authorized caller.

    Attributes:
        actor: name in the audit log.
        tenant: the tenant whose tasks the caller sees; None: all tenants.
        own: the tenant that owns everything that the caller creates.
        may: scopes.
        until: expiry, in seconds since the epoch; None: no expiry.
        record: the tenant `own`, if it was read just now.
    """

    actor: str
    tenant: str | None
    own: str
    may: frozenset[str]
    until: float | None = None
    record: TenantRecord | None = None

    @property
    def acts_for_all(self) -> bool:
        """Tell whether the caller may act for any tenant with that tenant's rights: see `TABLE`."""
        return "tenants:write" in self.may


_OWNER = Caller("owner", None, DEFAULT_TENANT, ROLES["admin"])


class Gate:
    """Authorizes callers.

    Args:
        world: tokens.
        auth: "open": every caller is an administrator (for a stack that listens on loopback only); "tokens": a token is
            required.
        clock: returns seconds since the epoch.
        owner: the owner of a local stack, whose NATS has keys that only the owner can read; None: no such person.
    """

    def __init__(
        self, world: World, auth: Literal["open", "tokens"], clock: Callable[[], float], owner: Owner | None = None
    ) -> None:
        self.world, self.auth, self.clock, self.owner = world, auth, clock, owner

    def is_administrator(self, caller: Caller) -> bool:
        """Tell whether the caller proved with a token that it is an administrator. Without required tokens, no caller did."""
        return self.auth == "tokens" and caller.acts_for_all

    async def caller(self, secret: str, address: str) -> Caller:
        """Return the caller with this secret.

        Raises:
            RefusedError: the secret is unknown or has ended, or its tenant is disabled. The error does not say which, so that
                it reveals nothing.
        """
        return await self.of_hash(hash_of(secret) if secret else "", address)

    async def of_hash(self, secret_hash: str, address: str) -> Caller:
        """Return the caller whose secret has this hash; empty: the request showed no secret.

        Raises:
            RefusedError: see `caller`.
        """
        if self.auth == "open":
            return Caller(f"open:{address}", None, DEFAULT_TENANT, ROLES["admin"])
        if self.owner is not None and self.owner.knows(secret_hash):
            return _OWNER
        found = await self.world.tenants.by_hash(secret_hash) if secret_hash else None
        if found is None or not found[0].valid(self.clock()) or found[1].disabled:
            raise RefusedError("router.unauthorized", "a valid token is needed")
        token = found[0]
        may = ROLES[token.role]
        if token.scopes:
            may &= frozenset(token.scopes)
        tenant = token.tenant if token.role == "user" else None
        return Caller(f"token:{token.id}", tenant, token.tenant, may, token.expires_at)

    async def of_tenant(self, tenant: str, claimed: str | None) -> Caller:
        """Return the caller behind a message from a tenant's NATS user.

        NATS has verified the tenant, and its permissions let the message through.

        Raises:
            RefusedError: the tenant is disabled or unknown, or the message names another tenant.
        """
        found = await self.world.tenants.get(tenant)
        unknown = self.auth == "tokens" and self.owner is None
        if found.disabled if found is not None else unknown:
            raise RefusedError("router.unauthorized", f"tenant {tenant} is disabled or unknown")
        if claimed not in (None, DEFAULT_TENANT, tenant):
            raise RefusedError("router.forbidden", f"these credentials belong to tenant {tenant}, not to {claimed}")
        return Caller(f"nats:{tenant}", tenant, tenant, ROLES["user"], record=found)

    async def over_nats(self, credential: str, claimed: str | None, scope: str) -> Caller:
        """Return the caller behind a NATS message, with the tenant of the message as `own`.

        Args:
            credential: a token's secret.
            claimed: the tenant that the message names.
            scope: the scope that the message requires.

        Raises:
            RefusedError: see `caller`; or the token lacks the scope, or belongs to another tenant.
        """
        # Only the owner's NATS keys may publish on a subject without a tenant.
        if self.owner is not None and not credential:
            caller = _OWNER
        else:
            caller = await self.caller(credential, "nats")
        if scope not in caller.may:
            raise RefusedError("router.forbidden", f"this token does not have the scope {scope}")
        named = claimed if self.auth == "open" or caller is _OWNER or claimed != DEFAULT_TENANT else None
        if caller.tenant is not None and named not in (None, caller.tenant):
            raise RefusedError("router.forbidden", f"this token does not belong to tenant {named}")
        own = named if named is not None and caller.acts_for_all else caller.own
        return Caller(caller.actor, caller.tenant or claimed, own, caller.may)

    def makes_for(self, caller: Caller, claimed: str) -> str:
        """Return the tenant that owns the session or job that this caller starts. `claimed`: the tenant that the request names.

        Raises:
            RefusedError: the request names another tenant than the caller's, and the caller is not an administrator.
        """
        if claimed in (DEFAULT_TENANT, caller.own) or caller.acts_for_all:
            return caller.own
        raise RefusedError(
            "router.forbidden", f"this token belongs to tenant {caller.own} and cannot act for tenant {claimed}"
        )
