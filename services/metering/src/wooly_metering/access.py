"""Who calls over REST, and what they may: a router knows, and is asked over NATS.

What it said is remembered for `REMEMBERED_S`, so that a page of figures asks once: a token that was revoked opens nothing after
that. Where no router answers nobody is let in.
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
#: Seconds for which an answer of the router's holds.
REMEMBERED_S = 3.0
#: Tokens whose answer is remembered.
TOKENS = 1000
#: Seconds that a router has for an answer.
ROUTER_TIMEOUT_S = 2.0


class Access:
    """Lets callers in, at their rate.

    Args:
        app: the connection to NATS.
        buckets: rates, by token and by address.
        clock: seconds since the epoch: tokens end at one.
        closed: why nobody is let in where the router asks for no tokens; empty: everybody is.
    """

    def __init__(
        self, app: ServiceApp, buckets: Buckets, clock: Callable[[], float] = time.time, closed: str = ""
    ) -> None:
        self._app, self._buckets, self._clock, self._closed = app, buckets, clock, closed
        self._known: OrderedDict[str, tuple[float, CheckTokenReply]] = OrderedDict()

    async def caller(self, secret: str, address: str) -> CheckTokenReply:
        """Who has this secret (empty: who shows none).

        Raises:
            RefusedError: no valid token, too many requests, or no router answers.
        """
        name, now = hashlib.sha256(secret.encode()).hexdigest() if secret else "", self._clock()
        at, known = self._known.get(name, (0.0, None))
        # Strangers share the rate of their address; whoever showed a valid token has one of their own.
        whose = f"from {address}" if known is None else known.actor
        self._take(whose)
        if known is None or not 0 <= now - at < REMEMBERED_S:
            known = await self._ask(name)
            self._known[name] = now, known
            self._known.move_to_end(name)
            if len(self._known) > TOKENS:
                self._known.popitem(last=False)
        if known.auth == "open" and self._closed:
            raise RefusedError("router.forbidden", f"the router is open, and this address is not: {self._closed}")
        if known.until is not None and now >= known.until:
            raise RefusedError("router.unauthorized", "a valid token is needed")
        return known

    async def admit(self, request: Request, nbytes: int, rule: Rule) -> Known | None:
        """Let a request in by its head; see `wooly_bus.http_front`.

        Raises:
            RefusedError: see `caller`; or a page of another origin's has a browser ask.
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
            rate = f"on average {self._buckets.rate:g} a second are answered"
            raise RefusedError("metering.too_many", f"too many requests {whose}: {rate}; slow down", retryable=True)

    async def _ask(self, name: str) -> CheckTokenReply:
        ask = CheckTokenRequest(secret_hash=name)
        try:
            return await self._app.request(contracts.ROUTER_TOKEN_CHECK, ask, timeout=ROUTER_TIMEOUT_S)
        except RefusedError:
            self._known.pop(name, None)
            raise
        except BusError as e:
            why = f"who may read the ledger is for a router to say, and none answers: {e}"
            raise RefusedError("metering.no_router", why, retryable=True) from e


bearer = HTTPBearer(auto_error=False, description="An API token of a tenant's, as for the router.")


def needs(verb: Verb, *, everybody: bool = False) -> Callable[..., Awaitable[CheckTokenReply]]:
    """A dependency: the caller, who may do this with credits.

    Args:
        verb: what.
        everybody: what they ask for is about all tenants.
    """

    async def check(
        request: Request, shown: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
    ) -> CheckTokenReply:
        caller: CheckTokenReply = request.state.caller  # `Access.admit` let them in; `shown` is for the documentation
        if f"credits:{verb}" not in caller.may:
            raise RefusedError("router.forbidden", f"this token may not {verb} credits")
        if everybody and caller.tenant is not None:
            raise RefusedError("router.forbidden", "this token sees the credits of its own tenant only")
        return caller

    return check


def tenant_of(caller: CheckTokenReply, asked: str) -> str:
    """The tenant that a request is about; empty: all.

    Raises:
        RefusedError: it is not the caller's.
    """
    if caller.tenant is not None and asked not in ("", caller.tenant):
        raise RefusedError("router.forbidden", "this token sees the credits of its own tenant only")
    return caller.tenant or asked
