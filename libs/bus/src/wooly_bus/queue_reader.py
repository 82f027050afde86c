"""Reads messages from a JetStream work queue. Readers with the same durable name share the messages.

JetStream delivers a message again until a reader acknowledges it.
"""

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
#: The most messages that one fetch returns.
BATCH = 64
#: Seconds after which JetStream delivers an unacknowledged message again.
ACK_WAIT_S = 30.0
#: Seconds between two attempts to read a queue that cannot be read.
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Taken(Generic[P]):
    """One message of a work queue. JetStream delivers it again unless `done` is called."""

    event: EventContract[P]
    message: Msg

    @property
    def subject(self) -> str:
        """The subject to which the message was published."""
        return self.message.subject

    def payload(self) -> P:
        """The decoded event.

        Raises:
            EnvelopeError: the bytes of the message are not an event of this contract.
        """
        return self.event.decoded(self.message.data)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the message."""
        return self.message.headers or {}

    async def done(self) -> None:
        """Acknowledge the message, so that JetStream does not deliver it again. Also call this if the work will never be done."""
        await self.message.ack()

    async def later(self, delay_s: float) -> None:
        """Ask JetStream to deliver the message again after `delay_s` seconds."""
        await self.message.nak(delay_s)


async def take(js: JetStreamContext, event: EventContract[P], durable: str) -> AsyncIterator[Taken[P]]:
    """Yield the messages of a queue, without end. While JetStream is unreachable, retry every `RETRY_S` seconds.

    If the queue does not exist, create it: a server that lost its disk has no queue.

    Args:
        js: the JetStream context.
        event: the contract of the events in the queue.
        durable: the durable consumer name that all readers share.
    """
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_ack_pending=1024)
    stream, last_error = event.stream_name, ""
    while True:
        try:
            await ensure_stream(js, event)
            subscription = await js.pull_subscribe(event.pattern, durable=durable, stream=stream, config=config)
            last_error = ""
            try:
                while True:
                    for message in await _fetch(subscription):
                        yield Taken(event, message)
            finally:
                await _leave(subscription)
        except (nats.errors.Error, JetStreamError, OSError, StreamError) as e:
            text = str(e) or type(e).__name__
            if text != last_error:
                log.warning("cannot read queue %s: %s; retrying every second", stream, text)
            last_error = text
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
        return  # the connection is closed, and the subscription with it
