"""The frame of every service: a FastStream broker, handlers on subjects, replies in the one shape, an orderly end.

`ServiceApp` only wires. What a service decides is in its actors and their pure cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from faststream.nats import NatsBroker
from faststream.nats.annotations import NatsMessage
from wooly_wis.messages import Message

from wooly_bus.envelope import KIND_HEADER, decode, encode
from wooly_bus.errors import BusConnectError, EnvelopeError
from wooly_bus.tracing import consumer_span

log = logging.getLogger("wooly.bus")
Q = TypeVar("Q", bound=Message)
HandlerFunction = Callable[[Q], Awaitable[Message | None]]


class ServiceApp:
    """One service's connection to NATS.

    Args:
        name: service name, as in subjects.
        nats_url: where NATS is.
    """

    def __init__(self, name: str, nats_url: str) -> None:
        self.name = name
        self.url = nats_url
        self.broker = NatsBroker(
            nats_url,
            logger=None,
            name=f"wooly-{name}",
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            connect_timeout=3,
        )

    def serve(self, subject: str, model: type[Q], handler: HandlerFunction[Q], *, queue: str = "") -> None:
        """Answer requests on `subject`. With `queue`, instances of the service share them."""

        async def answer(body: bytes, message: NatsMessage) -> None:
            with consumer_span(self.name, subject, message.headers):
                try:
                    request = decode(bytes(message.body), model)
                except EnvelopeError as e:
                    reply: Message | None = e.to_reply()
                else:
                    reply = await handler(request)
            if reply is not None and message.reply_to:
                data, headers = encode(reply)
                await self.broker.publish(data, message.reply_to, headers=headers)

        self.broker.subscriber(subject, queue=queue, decoder=_raw)(answer)

    def listen(self, subject: str, model: type[Q], handler: HandlerFunction[Q]) -> None:
        """Hear events on `subject`. A malformed one is logged and dropped: it will not get better."""

        async def hear(body: bytes, message: NatsMessage) -> None:
            try:
                event = decode(bytes(message.body), model)
            except EnvelopeError as e:
                log.warning("%s: %s", subject, e)
                return
            await handler(event)

        self.broker.subscriber(subject, decoder=_raw)(hear)

    async def publish(self, subject: str, message: Message) -> None:
        """Send an event."""
        data, headers = encode(message)
        await self.broker.publish(data, subject, headers=headers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ServiceApp]:
        """Connected and subscribed inside the block.

        Raises:
            BusConnectError: NATS does not answer.
        """
        try:
            await self.broker.start()
        except Exception as e:
            raise BusConnectError(f"cannot reach NATS at {self.url}: {e}") from e
        try:
            yield self
        finally:
            await self.broker.stop()


async def _raw(message: Any) -> bytes:
    return bytes(message.body)


async def until_signalled() -> None:
    """Return at SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


__all__ = ["KIND_HEADER", "ServiceApp", "until_signalled"]
