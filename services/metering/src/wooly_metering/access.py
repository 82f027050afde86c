"""Access control of REST: a router, asked over NATS, identifies each caller and the caller's rights.

An answer is cached for `REMEMBERED_S` seconds, so that a page with many figures asks once. A revoked token stops working after
that time. If no router answers, all callers are refused.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.http_front import Known, Rule
from wooly_bus.web import Buckets, from_elsewhere
from wooly_wis.messages import CheckTokenReply, CheckTokenRequest

Verb = Literal["read", "write"]
#: Seconds for which a router's answer is cached.
REMEMBERED_S = 3.0
#: Maximum number of tokens in the cache.
TOKENS = 1000
#: Seconds to wait for a router's answer.
ROUTER_TIMEOUT_S = 2.0


class Access:
    """Admits callers, and limits their request rates.

    Args:
        app: the connection to NATS.
        buckets: rate limits, by token and by address.
        clock: returns seconds since the epoch, for the expiry of tokens.
        closed: why all callers are refused if the router requires no tokens; empty: all callers are admitted then.
    """

    def __init__(
        self, app: ServiceApp, buckets: Buckets, clock: Callable[[], float] = time.time, closed: str = ""
    ) -> None:
        self._app, self._buckets, self._clock, self._closed = app, buckets, clock, closed
        self._known: OrderedDict[str, tuple[float, CheckTokenReply]] = OrderedDict()

    async def caller(self, secret: str, address: str) -> CheckTokenReply:
        """The owner of a token (empty: no token).

        Raises:
            RefusedError: the token is not valid, the caller sends too many requests, or no router answers.
        """
        name, now = hashlib.sha256(secret.encode()).hexdigest() if secret else "", self._clock()
        at, known = self._known.get(name, (0.0, None))
        # Callers without a known token share the rate limit of their address; a caller with a valid token has its own limit.
        whose = f"from {address}" if known is None else known.actor
        self._take(whose)
        if known is None or not 0 <= now - at < REMEMBERED_S:
            known = await self._ask(name)
            self._known[name] = now, known
            self._known.move_to_end(name)
            if len(self._known) > TOKENS:
                self._known.popitem(last=False)
        if known.auth == "open" and self._closed:
            raise RefusedError(
                "router.forbidden",
                f"the router requires no tokens, but REST is not open at this address: {self._closed}",
            )
        if known.until is not None and now >= known.until:
            raise RefusedError("router.unauthorized", "a valid token is needed")
        return known

    async def admit(self, request: Request, nbytes: int, rule: Rule) -> Known | None:
        """Admit a request by its headers; see `wooly_bus.http_front`.

        Raises:
            RefusedError: see `caller`; or a browser sends the request for a page of another origin.
        """
        address = request.client.host if request.client else ""
        if not rule.token:
            self._take(f"from {address}")
            return None
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        caller = await self.caller(secret.strip() if scheme.lower() == "bearer" else "", address)
        why = from_elsewhere(request.headers.get("origin", ""), request.headers.get("host", ""), caller.auth)
        if why:
            raise RefusedError("router.forbidden", why)
        return Known(caller, caller.tenant)

    def _take(self, whose: str) -> None:
        if not self._buckets.take(whose):
            rate = f"the limit is {self._buckets.rate:g} per second on average"
            raise RefusedError(
                "metering.too_many", f"too many requests {whose}: {rate}; send fewer requests", retryable=True
            )

    async def _ask(self, name: str) -> CheckTokenReply:
        ask = CheckTokenRequest(secret_hash=name)
        try:
            return await self._app.request(contracts.ROUTER_TOKEN_CHECK, ask, timeout=ROUTER_TIMEOUT_S)
        except RefusedError:
            self._known.pop(name, None)
            raise
        except BusError as e:
            why = f"the token cannot be checked, because no router answers: {e}; try again"
            raise RefusedError("metering.no_router", why, retryable=True) from e


bearer = HTTPBearer(auto_error=False, description="An API token of a tenant, the same as for the router.")


def needs(verb: Verb, *, everybody: bool = False) -> Callable[..., Awaitable[CheckTokenReply]]:
    """A dependency that returns the caller, after a check of the caller's right to do `verb` with credits.

    Args:
        verb: the action.
        everybody: the request is about all tenants.
    """

    async def check(
        request: Request, shown: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
    ) -> CheckTokenReply:
        caller: CheckTokenReply = request.state.caller  # from `Access.admit`; `shown` exists only for the documentation
        if f"credits:{verb}" not in caller.may:
            raise RefusedError("router.forbidden", f"this token does not have the right to {verb} credits")
        if everybody and caller.tenant is not None:
            raise RefusedError("router.forbidden", "this token can access only the credits of its own tenant")
        return caller

    return check


def tenant_of(caller: CheckTokenReply, asked: str) -> str:
    """The tenant that a request is about; empty: all tenants.

    Raises:
        RefusedError: the caller may not see this tenant.
    """
    if caller.tenant is not None and asked not in ("", caller.tenant):
        raise RefusedError("router.forbidden", "this token can access only the credits of its own tenant")
    return caller.tenant or asked
