"""Who calls over REST, at which rate, and what they may; what they changed."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from wooly_bus.errors import RefusedError

from wooly_router.gate import Caller, Gate
from wooly_router.state.config import AuditRecord

Area = Literal["tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs", "credits"]
Verb = Literal["read", "write"]

#: Callers whose rate is remembered.
CALLERS = 10_000
#: Holds a browser's token (see `login`).
COOKIE = "wooly_token"
#: A header that pages of ours send with what changes something: those of others cannot, without asking us first.
PAGE_HEADER = "x-wooly-page"


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
    """Lets callers of REST in, at their rate, and keeps the audit log.

    Args:
        gate: who they are.
        buckets: rates.
    """

    def __init__(self, gate: Gate, buckets: Buckets) -> None:
        self._gate, self._buckets = gate, buckets
        self.auth = gate.auth

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
            self._take(f"from {address}")  # so that secrets are not guessed
        caller = await self._gate.caller(secret, address)
        self._take(caller.actor)
        return caller

    async def still(self, secret: str, address: str) -> Caller:
        """Who calls, on a connection that was let in before.

        Raises:
            RefusedError: the token has ended.
        """
        return await self._gate.caller(secret, address)

    def _take(self, name: str) -> None:
        if not self._buckets.take(name):
            raise RefusedError("router.too_many", "too many requests; slow down", retryable=True)

    async def log(self, caller: Caller, action: str, target: str, **detail: object) -> None:
        """Somebody changed something."""
        record = AuditRecord(self._gate.clock(), caller.actor, caller.own, action, target[:255], dict(detail))
        await self._gate.world.audit.add(record)


def from_elsewhere(origin: str, host: str, auth: str) -> str:
    """Why a browser must not make this request for a page; empty if nothing speaks against it.

    A page of another origin may not use what its visitor may do here. Where everybody may do everything, the host must also be
    named as nobody else's page can be: a name that an attacker's DNS points here would make its page one of ours.

    Args:
        origin: the header, empty where there is none.
        host: the header.
        auth: see `Gate`.
    """
    try:
        if origin and urlsplit(origin).netloc != host:
            return f"pages of {origin[:100]} may not call this"
        name = urlsplit(f"//{host}").hostname or ""
        if auth == "open" and name not in ("localhost", socket.gethostname().lower()):
            ipaddress.ip_address(name)
    except ValueError:
        return "a router without authentication is called by its address, as localhost, or by its host's name"
    return ""


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
