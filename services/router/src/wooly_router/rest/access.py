"""Access over REST: authentication, rate limits, scopes, and the audit log."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from wooly_bus.errors import RefusedError
from wooly_bus.http_front import Known, Rule
from wooly_bus.web import Buckets, from_elsewhere

from wooly_router.gate import Caller, Gate
from wooly_router.limits import LimitError
from wooly_router.owner import Owner
from wooly_router.state.config import AuditRecord
from wooly_router.state.database import log_away
from wooly_router.state.tenants import hash_of

Area = Literal["tasks", "nodes", "groups", "config", "tenants", "metrics", "audit", "blobs", "credits"]
Verb = Literal["read", "write"]

#: Name of the cookie with a browser's token (see `login`).
COOKIE = "wooly_token"
#: Header that our pages send with every change. A browser lets pages of other origins send it only if this router allows it.
PAGE_HEADER = "x-wooly-page"
#: Body bytes that cost as much of a caller's rate as one request, because parsing a body delays other requests.
COST_BYTES = 16 << 10
#: Cost of a login for its address's rate, in requests: a page logs in once, an attacker who guesses tokens often.
LOGIN_COST = 40.0
#: Maximum number of tokens that are remembered as valid: they are not slowed down by wrong guesses from the same address.
MAX_VALID_TOKENS = 10_000


class Access:
    """Admits callers of REST within their rates, and writes the audit log.

    Args:
        gate: authorizes callers.
        buckets: rate limits.
    """

    def __init__(self, gate: Gate, buckets: Buckets) -> None:
        self._gate, self._buckets = gate, buckets
        self._valid_tokens: OrderedDict[str, None] = OrderedDict()
        self.auth = gate.auth

    @property
    def owner(self) -> Owner | None:
        """The owner of a local stack; None: no such person."""
        return self._gate.owner

    async def admit(self, request: Request, nbytes: int, rule: Rule) -> Known | None:
        """Admit a request by its headers; see `wooly_bus.http_front`.

        Raises:
            RefusedError: see `refuse_other_origins`, `secret_of` and `caller`.
        """
        cost = 1.0 if rule.streamed else 1.0 + nbytes / COST_BYTES
        address = request.client.host if request.client else ""
        if not rule.token:
            if self._gate.auth == "tokens":
                self._take(f"from {address}", cost)
            return None
        self.refuse_other_origins(request)
        caller = await self.caller(secret_of(request), address, cost)
        return Known(caller, caller.tenant)

    def refuse_other_origins(self, request: Request) -> None:
        """Refuse requests from pages of other origins.

        Raises:
            RefusedError: such a page sent the request; see `from_elsewhere`.
        """
        why = from_elsewhere(request.headers.get("origin", ""), request.headers.get("host", ""), self.auth)
        if why:
            raise RefusedError("router.forbidden", why)

    async def caller(self, secret: str, address: str, cost: float = 1.0) -> Caller:
        """Return the caller of a request.

        Raises:
            RefusedError: the token is not valid, or this caller, or this address if tokens are required, sends too many
                requests.
        """
        name = hash_of(secret)
        if self._gate.auth == "tokens" and name not in self._valid_tokens:
            self._take(f"from {address}", 1.0)  # slows down guessing of secrets
        caller = await self.proved(secret, address)
        self._take(caller.actor, cost)
        return caller

    async def proved(self, secret: str, address: str) -> Caller:
        """Return the caller with a secret that was paid for by its address.

        Later requests with the secret cost the address nothing.

        Raises:
            RefusedError: the token is not valid, or the database does not answer.
        """
        name = hash_of(secret)
        try:
            caller = await self._gate.caller(secret, address)
        except RefusedError:
            self._valid_tokens.pop(name, None)
            raise
        except SQLAlchemyError as e:  # no handler of the application catches it: the request is not admitted yet
            log_away("a token cannot be checked", e)
            raise RefusedError(
                "router.database", "the controller's database does not answer; see the router's log", retryable=True
            ) from e
        self._valid_tokens[name] = None
        self._valid_tokens.move_to_end(name)
        if len(self._valid_tokens) > MAX_VALID_TOKENS:
            self._valid_tokens.popitem(last=False)
        return caller

    async def still(self, secret: str, address: str) -> Caller:
        """Return the caller of a connection that was admitted before.

        Raises:
            RefusedError: the token has ended.
        """
        return await self._gate.caller(secret, address)

    def take_login(self, request: Request) -> None:
        """Count one login from this address.

        Raises:
            RefusedError: too many logins.
        """
        if self._gate.auth == "tokens":
            self._take(f"from {request.client.host if request.client else ''}", LOGIN_COST)

    def _take(self, name: str, cost: float) -> None:
        if not self._buckets.take(name, cost):
            raise LimitError(
                f"too many requests {'' if name.startswith('from') else 'of '}{name}: the limit is "
                f"{self._buckets.rate:g} per second on average (WOOLY_ROUTER_RATE_LIMIT); send fewer requests",
                code="router.too_many",
                retry_s=1.0,
            )

    async def log(self, caller: Caller, action: str, target: str, **detail: object) -> None:
        """Add an entry to the audit log."""
        record = AuditRecord(self._gate.clock(), caller.actor, caller.own, action, target[:255], dict(detail))
        await self._gate.world.audit.add(record)


bearer = HTTPBearer(auto_error=False, description="An API token of a tenant.")


async def admitted(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    """A dependency: the caller that `Access.admit` admitted before the body was read. `credentials` is for the OpenAPI schema."""
    caller: Caller = request.state.caller
    return caller


def secret_of(request: Request) -> str:
    """Return the secret of a request, from the header or, for a browser, from the cookie; empty if it has none.

    Raises:
        RefusedError: the request uses a cookie to change something, but does not come from our pages.
    """
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and shown.strip():
        return shown.strip()
    secret = request.cookies.get(COOKIE, "")
    if secret and request.method not in ("GET", "HEAD") and PAGE_HEADER not in request.headers:
        raise RefusedError(
            "router.forbidden", f"a change that is authenticated by a cookie needs the header {PAGE_HEADER}"
        )
    return secret


def needs(area: Area, verb: Verb) -> Callable[..., Awaitable[Caller]]:
    """Make a dependency: the caller, which must have the scope `area:verb`."""

    async def check(caller: Annotated[Caller, Depends(admitted)]) -> Caller:
        if f"{area}:{verb}" not in caller.may:
            raise RefusedError("router.forbidden", f"this token does not have the scope {area}:{verb}")
        return caller

    return check
