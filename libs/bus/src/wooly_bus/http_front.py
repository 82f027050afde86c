"""What every HTTP request passes before its application: first its token, then its size, then its body.

The head of a request alone decides. An application that frameworks parse bodies for would otherwise read
and parse what it refuses afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wooly_bus.errors import BusError, RefusedError
from wooly_bus.http_listener import Connection


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route takes.

    Attributes:
        token: whether a valid one is needed.
        body: bytes of a request's body.
        streamed: whether the application reads the body piece by piece; otherwise it gets it whole.
    """

    token: bool
    body: int
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """Who was let in: what the application is told (`request.state.caller`), and the tenant; None: an operator, or everybody."""

    caller: object
    tenant: str | None


#: Lets a request in by its head, or raises a `BusError`. The number: bytes that its body says to have, 0 where it does not say.
Admit = Callable[[Request, int, Rule], Awaitable[Known | None]]


class Front:
    """ASGI middleware.

    Args:
        app: answers what is let in.
        service: whose codes refusals have.
        rule: what the route of a method and path takes.
        admit: who asks.
        refuse: the answer to a request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: str,
        rule: Callable[[str, str], Rule],
        admit: Admit,
        refuse: Callable[[BusError], ASGIApp],
    ) -> None:
        self._app, self._service, self._rule, self._admit, self._refuse = app, service, rule, admit, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            receive = await self._let_in(scope, receive)
        except BusError as e:
            await self._refuse(e)(scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await self._app(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive) -> Receive:
        """What the application reads the body from.

        Raises:
            BusError: nobody may ask so.
            ClientDisconnect: it is gone.
        """
        request = Request(scope)
        rule = self._rule(scope["method"], scope["path"])
        length = request.headers.get("content-length", "")
        said = int(length) if length.isdecimal() else 0
        known = await self._admit(request, said, rule)
        if known is not None:
            connection: Connection | None = getattr(request.state, "connection", None)
            if connection is not None:
                connection.let_in(known.tenant)
            request.state.caller = known.caller
        if said > rule.body:
            raise self._too_large(rule)
        if not said and "transfer-encoding" not in request.headers:
            return receive
        if rule.streamed:
            return self._counted(receive, rule)
        return _again(await self._whole(receive, rule), receive)

    def _too_large(self, rule: Rule) -> RefusedError:
        return RefusedError(
            f"{self._service}.too_large", f"the body of such a request has at most {rule.body} bytes; send less"
        )

    def _counted(self, receive: Receive, rule: Rule) -> Receive:
        read = 0

        async def counting() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > rule.body:
                raise self._too_large(rule)
            return message

        return counting

    async def _whole(self, receive: Receive, rule: Rule) -> bytes:
        body, counting = bytearray(), self._counted(receive, rule)
        while True:
            message = await counting()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read already, then what comes after it."""
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
