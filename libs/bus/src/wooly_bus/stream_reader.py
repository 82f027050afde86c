"""Reads a JetStream stream in order, from a position on, for ever: what is missed while NATS is away comes afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import Error as JetStreamError

from wooly_bus.contract_types import EventContract, P

log = logging.getLogger("wooly.bus")
BATCH = 64
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Kept(Generic[P]):
    """One message of a stream.

    Attributes:
        event: what it is by its subject.
        subject: where it was published.
        data: its bytes.
        sequence: its number in the stream.
        at: when the stream took it, seconds since the epoch.
        pending: how many come after it.
    """

    event: EventContract[P]
    subject: str
    data: bytes
    sequence: int
    at: float
    pending: int

    def payload(self) -> P:
        """What the message says.

        Raises:
            EnvelopeError: its bytes are not such an event.
        """
        return self.event.decoded(self.data)


async def read_stream(
    js: JetStreamContext, event: EventContract[P], *, first: int = 1, poll_s: float = 0.5
) -> AsyncIterator[Kept[P] | None]:
    """All events from sequence `first` on, of all addresses; None where there is nothing more for `poll_s` seconds.

    What the stream discarded is skipped. No acknowledgements: whoever reads remembers how far it came. While JetStream, the
    stream or the reader's consumer is gone, it is tried again every second.
    """
    stream, complaint = event.stream_name, ""
    while True:
        try:
            config = ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=max(first, 1),
                ack_policy=AckPolicy.NONE,
                inactive_threshold=60.0,
                mem_storage=True,
            )
            subscription = await js.pull_subscribe(event.pattern, stream=stream, config=config)
            complaint = ""
            try:
                while True:
                    messages = await _fetch(subscription, poll_s)
                    for message in messages:
                        kept = _kept(event, message)
                        first = kept.sequence + 1
                        yield kept
                    if not messages:
                        yield None
            finally:
                await _leave(subscription)
        except (nats.errors.Error, JetStreamError, OSError) as e:
            text = str(e) or type(e).__name__
            if text != complaint:
                log.warning("stream %s cannot be read: %s; trying again", stream, text)
            complaint = text
            yield None
            await asyncio.sleep(RETRY_S)


async def _fetch(subscription: JetStreamContext.PullSubscription, poll_s: float) -> list[Msg]:
    try:
        return await subscription.fetch(BATCH, timeout=poll_s)
    except (TimeoutError, nats.errors.TimeoutError):
        return []


async def _leave(subscription: JetStreamContext.PullSubscription) -> None:
    try:
        await subscription.unsubscribe()
    except nats.errors.Error:
        return  # it is gone with its connection


def _kept(event: EventContract[P], message: Msg) -> Kept[P]:
    found = message.metadata
    return Kept(
        event, message.subject, message.data, found.sequence.stream, found.timestamp.timestamp(), found.num_pending
    )
