"""Checks every HTTP request before its application runs: first the token, then the size, then the body.

The head of a request alone decides whether it is refused. Otherwise, web frameworks would read and parse the body of a request
that the application then refuses.
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
    """Requirements of a route.

    Attributes:
        token: whether a valid token is required.
        body: largest body of a request, in bytes.
        streamed: whether the application reads the body in pieces; otherwise the application gets the whole body.
    """

    token: bool
    body: int
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """The caller of an admitted request.

    Attributes:
        caller: data about the caller for the application (`request.state.caller`).
        tenant: tenant of the caller; None: an operator, or authentication is off.
    """

    caller: object
    tenant: str | None


#: Admits a request by its head, or raises a `BusError`. The number is the Content-Length in bytes; 0 if the request has none.
Admit = Callable[[Request, int, Rule], Awaitable[Known | None]]


class Front:
    """ASGI middleware that checks requests.

    Args:
        app: the application for admitted requests.
        service: the service; prefix of the codes of refusals.
        rule: returns the rule of a method and path.
        admit: authenticates the caller.
        refuse: makes the answer to a refused request.
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
        """Pass a request to the application, or refuse it."""
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
        """Check a request. Returns the `receive` from which the application reads the body.

        Raises:
            BusError: the request is refused.
            ClientDisconnect: the client closed the connection.
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
            f"{self._service}.too_large",
            f"the body of the request is too large; the limit of this path is {rule.body} bytes; send less",
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
    """A `receive` that returns a body that was already read, and then the messages after it."""
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
