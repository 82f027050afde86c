"""Takes messages from a JetStream work queue: each until it is acknowledged, shared among all who read under one name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import Error as JetStreamError

from wooly_bus.streams import StreamError

log = logging.getLogger("wooly.bus")
BATCH = 64
#: Seconds after which a message that was neither acknowledged nor refused comes again.
ACK_WAIT_S = 30.0
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """One message. Unless `done` is called, it comes again."""

    message: Msg

    @property
    def subject(self) -> str:
        """Where it was sent."""
        return self.message.subject

    @property
    def data(self) -> bytes:
        """What it says."""
        return self.message.data

    @property
    def headers(self) -> dict[str, str]:
        """What came with it."""
        return self.message.headers or {}

    async def done(self) -> None:
        """What it asks for is done, or will never be: it does not come again."""
        await self.message.ack()

    async def later(self, delay_s: float) -> None:
        """Let it come again after a while."""
        await self.message.nak(delay_s)


async def take(
    js: JetStreamContext, stream: str, subject: str, durable: str, ensure: Callable[[], Awaitable[None]]
) -> AsyncIterator[Taken]:
    """Messages of a queue as they come, for ever. While JetStream is gone, it is tried again every second.

    Args:
        js: JetStream.
        stream: the queue.
        subject: what of it.
        durable: the name that all readers share.
        ensure: makes the stream where it is not there (a server that lost its disk has none).
    """
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_ack_pending=1024)
    complaint = ""
    while True:
        try:
            await ensure()
            subscription = await js.pull_subscribe(subject, durable=durable, stream=stream, config=config)
            complaint = ""
            try:
                while True:
                    for message in await _fetch(subscription):
                        yield Taken(message)
            finally:
                await _leave(subscription)
        except (nats.errors.Error, JetStreamError, OSError, StreamError) as e:
            text = str(e) or type(e).__name__
            if text != complaint:
                log.warning("queue %s cannot be read: %s; trying again", stream, text)
            complaint = text
            await asyncio.sleep(RETRY_S)


async def _fetch(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    try:
        return await subscription.fetch(BATCH, timeout=5.0)
    except (TimeoutError, nats.errors.TimeoutError):
        return []


async def _leave(subscription: JetStreamContext.PullSubscription) -> None:
    try:
        await subscription.unsubscribe()
    except nats.errors.Error:
        return  # it is gone with its connection
