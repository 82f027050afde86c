"""Who calls over REST, at which rate, and what they may; what they changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from wooly_bus.errors import RefusedError
from wooly_bus.web import Buckets, from_elsewhere

from wooly_router.gate import Caller, Gate
from wooly_router.owner import Owner
from wooly_router.state.config import AuditRecord

Area = Literal["tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs", "credits"]
Verb = Literal["read", "write"]

#: Holds a browser's token (see `login`).
COOKIE = "wooly_token"
#: A header that pages of ours send with what changes something: those of others cannot, without asking us first.
PAGE_HEADER = "x-wooly-page"


class Access:
    """Lets callers of REST in, at their rate, and keeps the audit log.

    Args:
        gate: who they are.
        buckets: rates.
    """

    def __init__(self, gate: Gate, buckets: Buckets) -> None:
        self._gate, self._buckets = gate, buckets
        self.auth = gate.auth

    @property
    def owner(self) -> Owner | None:
        """Of a local stack; None: there is no such person."""
        return self._gate.owner

    def refuse_others(self, request: Request) -> None:
        """Let no page of another origin's in.

        Raises:
            RefusedError: one sends this; see `from_elsewhere`.
        """
        why = from_elsewhere(request.headers.get("origin", ""), request.headers.get("host", ""), self.auth)
        if why:
            raise RefusedError("router.forbidden", why)

    async def caller(self, secret: str, address: str) -> Caller:
        """Who calls.

        Raises:
            RefusedError: no valid token, or too many requests of this caller's, or from this address where tokens are asked for.
        """
        if self._gate.auth == "tokens":
            self.take(f"from {address}")  # so that secrets are not guessed
        caller = await self._gate.caller(secret, address)
        self.take(caller.actor)
        return caller

    async def still(self, secret: str, address: str) -> Caller:
        """Who calls, on a connection that was let in before.

        Raises:
            RefusedError: the token has ended.
        """
        return await self._gate.caller(secret, address)

    def take(self, name: str) -> None:
        """Count one request.

        Raises:
            RefusedError: too many.
        """
        if not self._buckets.take(name):
            raise RefusedError("router.too_many", "too many requests; slow down", retryable=True)

    async def log(self, caller: Caller, action: str, target: str, **detail: object) -> None:
        """Somebody changed something."""
        record = AuditRecord(self._gate.clock(), caller.actor, caller.own, action, target[:255], dict(detail))
        await self._gate.world.audit.add(record)


bearer = HTTPBearer(auto_error=False, description="An API token of a tenant's.")


async def admitted(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    """A dependency: the caller, by the header or, in a browser, by the cookie."""
    access: Access = request.app.state.access
    access.refuse_others(request)
    return await access.caller(secret_of(request, credentials), request.client.host if request.client else "")


def secret_of(request: Request, credentials: HTTPAuthorizationCredentials | None) -> str:
    """What a request shows; empty if nothing.

    Raises:
        RefusedError: a browser changes something, and no page of ours had it do so.
    """
    if credentials is not None:
        return credentials.credentials
    secret = request.cookies.get(COOKIE, "")
    if secret and request.method not in ("GET", "HEAD") and PAGE_HEADER not in request.headers:
        raise RefusedError("router.forbidden", f"a change that a cookie vouches for needs the header {PAGE_HEADER}")
    return secret


def needs(area: Area, verb: Verb) -> Callable[..., Awaitable[Caller]]:
    """A dependency: the caller, who may do this in that area."""

    async def check(caller: Annotated[Caller, Depends(admitted)]) -> Caller:
        if f"{area}:{verb}" not in caller.may:
            raise RefusedError("router.forbidden", f"this token may not {verb} {area}")
        return caller

    return check
