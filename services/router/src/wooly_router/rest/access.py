"""Who calls over REST, at which rate, and what they may; what they changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from wooly_bus.errors import RefusedError
from wooly_bus.http_front import Known, Rule
from wooly_bus.web import Buckets, from_elsewhere

from wooly_router.gate import Caller, Gate
from wooly_router.limits import LimitError
from wooly_router.owner import Owner
from wooly_router.state.config import AuditRecord
from wooly_router.state.tenants import hash_of

Area = Literal["tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs", "credits"]
Verb = Literal["read", "write"]

#: Holds a browser's token (see `login`).
COOKIE = "wooly_token"
#: A header that pages of ours send with what changes something: those of others cannot, without asking us first.
PAGE_HEADER = "x-wooly-page"
#: Bytes of a body that cost as much of a caller's rate as one request more: they are parsed where others wait.
COST_BYTES = 16 << 10
#: What a login costs of its address's rate: requests. Pages log in once, guessers often.
LOGIN_COST = 40.0
#: Tokens that are remembered as valid: whoever shows one is not held up by others who guess from the same address.
PROVED = 10_000


class Access:
    """Lets callers of REST in, at their rate, and keeps the audit log.

    Args:
        gate: who they are.
        buckets: rates.
    """

    def __init__(self, gate: Gate, buckets: Buckets) -> None:
        self._gate, self._buckets = gate, buckets
        self._proved: OrderedDict[str, None] = OrderedDict()
        self.auth = gate.auth

    @property
    def owner(self) -> Owner | None:
        """Of a local stack; None: there is no such person."""
        return self._gate.owner

    async def admit(self, request: Request, nbytes: int, rule: Rule) -> Known | None:
        """Let a request in by its head; see `wooly_bus.http_front`.

        Raises:
            RefusedError: see `refuse_others`, `secret_of` and `caller`.
        """
        cost = 1.0 if rule.streamed else 1.0 + nbytes / COST_BYTES
        address = request.client.host if request.client else ""
        if not rule.token:
            if self._gate.auth == "tokens":
                self._take(f"from {address}", cost)
            return None
        self.refuse_others(request)
        caller = await self.caller(secret_of(request), address, cost)
        return Known(caller, caller.tenant)

    def refuse_others(self, request: Request) -> None:
        """Let no page of another origin's in.

        Raises:
            RefusedError: one sends this; see `from_elsewhere`.
        """
        why = from_elsewhere(request.headers.get("origin", ""), request.headers.get("host", ""), self.auth)
        if why:
            raise RefusedError("router.forbidden", why)

    async def caller(self, secret: str, address: str, cost: float = 1.0) -> Caller:
        """Who calls.

        Raises:
            RefusedError: no valid token, or too many requests of this caller's, or from this address where tokens are asked for.
        """
        name = hash_of(secret)
        if self._gate.auth == "tokens" and name not in self._proved:
            self._take(f"from {address}", 1.0)  # so that secrets are not guessed
        caller = await self.proved(secret, address)
        self._take(caller.actor, cost)
        return caller

    async def proved(self, secret: str, address: str) -> Caller:
        """Who has a secret for which its address has paid: requests that show it cost its address nothing from now on.

        Raises:
            RefusedError: no valid token.
        """
        name = hash_of(secret)
        try:
            caller = await self._gate.caller(secret, address)
        except RefusedError:
            self._proved.pop(name, None)
            raise
        self._proved[name] = None
        self._proved.move_to_end(name)
        if len(self._proved) > PROVED:
            self._proved.popitem(last=False)
        return caller

    async def still(self, secret: str, address: str) -> Caller:
        """Who calls, on a connection that was let in before.

        Raises:
            RefusedError: the token has ended.
        """
        return await self._gate.caller(secret, address)

    def take_login(self, request: Request) -> None:
        """One login more from this address.

        Raises:
            RefusedError: too many.
        """
        if self._gate.auth == "tokens":
            self._take(f"from {request.client.host if request.client else ''}", LOGIN_COST)

    def _take(self, name: str, cost: float) -> None:
        if not self._buckets.take(name, cost):
            raise LimitError(
                f"too many requests {'' if name.startswith('from') else 'of '}{name}: on average "
                f"{self._buckets.rate:g} a second are answered (WOOLY_ROUTER_RATE_LIMIT); slow down",
                code="router.too_many",
                retry_s=1.0,
            )

    async def log(self, caller: Caller, action: str, target: str, **detail: object) -> None:
        """Somebody changed something."""
        record = AuditRecord(self._gate.clock(), caller.actor, caller.own, action, target[:255], dict(detail))
        await self._gate.world.audit.add(record)


bearer = HTTPBearer(auto_error=False, description="An API token of a tenant's.")


async def admitted(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    """A dependency: the caller, whom `Access.admit` let in before the body was read. `credentials` is for the documentation."""
    caller: Caller = request.state.caller
    return caller


def secret_of(request: Request) -> str:
    """What a request shows, in the header or, from a browser, in the cookie; empty if nothing.

    Raises:
        RefusedError: a browser changes something, and no page of ours had it do so.
    """
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and shown.strip():
        return shown.strip()
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
