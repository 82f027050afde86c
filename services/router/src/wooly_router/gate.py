"""Who may ask for what, over REST and over NATS: tokens become tenants, roles and scopes. Knows tokens by their hashes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wooly_bus.errors import RefusedError

from wooly_router.owner import Owner
from wooly_router.state.tenants import Role, hash_of
from wooly_router.state.world import World

#: What each role may read (r) and write (w), by area. A token's scopes, where it has any, take from it.
#:
#: The rule behind the table: `user` acts for one tenant, and every area shows it that tenant's part alone. `operator` runs the
#: cluster: it sees all tenants' tasks, traces and credits, by name, size, time and state, and may cancel tasks or give them
#: another class. What tenants put in and get out (blobs: modules, constants, inputs, results) and what lets one act as a tenant
#: (its tokens, its credentials, jobs in its name) is for the tenant itself and for `admin`.
TABLE: dict[str, dict[Role, str]] = {
    "tasks": {
        "user": "rw",
        "operator": "rw",
        "admin": "rw",
    },  # and sessions, traces; in its own name only, but for admin
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
        until: when this ends, in seconds since the epoch; None: not by itself.
    """

    actor: str
    tenant: str | None
    own: str
    may: frozenset[str]
    until: float | None = None

    @property
    def acts_for_all(self) -> bool:
        """Whether they may do for any tenant what that tenant may: see `TABLE`."""
        return "tenants:write" in self.may


_OWNER = Caller("owner", None, DEFAULT_TENANT, ROLES["admin"])


class Gate:
    """Lets callers in.

    Args:
        world: tokens.
        auth: "open": everybody is an administrator (for a stack that listens on loopback only); "tokens": who shows one.
        clock: seconds since the epoch.
        owner: of a local stack, whose NATS has keys that only its owner can read; None: there is no such person.
    """

    def __init__(
        self, world: World, auth: Literal["open", "tokens"], clock: Callable[[], float], owner: Owner | None = None
    ) -> None:
        self.world, self.auth, self.clock, self.owner = world, auth, clock, owner

    def is_administrator(self, caller: Caller) -> bool:
        """Whether a caller proved to be one; where nobody is asked for a token, nobody did."""
        return self.auth == "tokens" and caller.acts_for_all

    async def caller(self, secret: str, address: str) -> Caller:
        """Who has this secret.

        Raises:
            RefusedError: nobody, it has ended, or its tenant is disabled; the answer does not say which.
        """
        return await self.of_hash(hash_of(secret) if secret else "", address)

    async def of_hash(self, secret_hash: str, address: str) -> Caller:
        """Who has the secret of this hash; empty: none was shown. As `caller`.

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
        """Who sent a message by a NATS user of that tenant's: NATS says so. What they may, its permissions have let through.

        Raises:
            RefusedError: the tenant is disabled or gone, or the message is about another.
        """
        found = await self.world.tenants.get(tenant)
        unknown = self.auth == "tokens" and self.owner is None
        if found.disabled if found is not None else unknown:
            raise RefusedError("router.unauthorized", f"tenant {tenant} may not ask any more")
        if claimed not in (None, DEFAULT_TENANT, tenant):
            raise RefusedError("router.forbidden", f"these credentials are not of tenant {claimed}, but of {tenant}")
        return Caller(f"nats:{tenant}", tenant, tenant, ROLES["user"])

    async def over_nats(self, credential: str, claimed: str | None, scope: str) -> Caller:
        """Who sent a message, with the tenant that it is about as `own`.

        Args:
            credential: a token's secret.
            claimed: the tenant that the message names.
            scope: what it needs.

        Raises:
            RefusedError: see `caller`; or the token may not do it, or not for that tenant.
        """
        if (
            self.owner is not None and not credential
        ):  # only the owner's keys of NATS may publish where no tenant is named
            caller = _OWNER
        else:
            caller = await self.caller(credential, "nats")
        if scope not in caller.may:
            raise RefusedError("router.forbidden", f"this token does not have the scope {scope}")
        named = claimed if self.auth == "open" or caller is _OWNER or claimed != DEFAULT_TENANT else None
        if caller.tenant is not None and named not in (None, caller.tenant):
            raise RefusedError("router.forbidden", f"this token is not one of tenant {named}")
        own = named if named is not None and caller.acts_for_all else caller.own
        return Caller(caller.actor, caller.tenant or claimed, own, caller.may)

    def makes_for(self, caller: Caller, claimed: str) -> str:
        """The tenant that a session or a job belongs to which this caller starts, who says that it is for `claimed`.

        Raises:
            RefusedError: it is for another tenant than the caller's, and only administrators act for others.
        """
        if claimed in (DEFAULT_TENANT, caller.own) or caller.acts_for_all:
            return caller.own
        raise RefusedError(
            "router.forbidden", f"this token is one of tenant {caller.own}, and acts for no other ({claimed})"
        )
