"""Takes messages from a JetStream work queue: each until it is acknowledged, shared among all who read under one name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import Error as JetStreamError

from wooly_bus.contract_types import EventContract, P
from wooly_bus.streams import StreamError, ensure_stream

log = logging.getLogger("wooly.bus")
BATCH = 64
#: Seconds after which a message that was neither acknowledged nor refused comes again.
ACK_WAIT_S = 30.0
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Taken(Generic[P]):
    """One message. Unless `done` is called, it comes again."""

    event: EventContract[P]
    message: Msg

    @property
    def subject(self) -> str:
        """Where it was sent."""
        return self.message.subject

    def payload(self) -> P:
        """What the message says.

        Raises:
            EnvelopeError: its bytes are not such an event.
        """
        return self.event.decoded(self.message.data)

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


async def take(js: JetStreamContext, event: EventContract[P], durable: str) -> AsyncIterator[Taken[P]]:
    """Messages of a queue as they come, for ever. While JetStream is gone, it is tried again every second.

    The queue is made where it is not there: a server that lost its disk has none.

    Args:
        js: JetStream.
        event: what the queue keeps.
        durable: the name that all readers share.
    """
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_ack_pending=1024)
    stream, complaint = event.stream_name, ""
    while True:
        try:
            await ensure_stream(js, event)
            subscription = await js.pull_subscribe(event.pattern, durable=durable, stream=stream, config=config)
            complaint = ""
            try:
                while True:
                    for message in await _fetch(subscription):
                        yield Taken(event, message)
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
