"""Reads a JetStream stream in order from a sequence number, without end. It continues after NATS was unreachable.

Messages on their way to a connection that breaks count as delivered and do not come again. So the consumer's own numbers are
compared: if one is missing, another consumer begins behind the last message that has come.
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
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import Error as JetStreamError

from wooly_bus.contract_types import EventContract, P

log = logging.getLogger("wooly.bus")
#: The most messages that one fetch returns.
BATCH = 64
#: Seconds between two attempts to read a stream that cannot be read.
RETRY_S = 1.0
#: Seconds without messages after which to ask whether some were delivered that have not come.
LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class StreamMessage(Generic[P]):
    """One message of a stream.

    Attributes:
        event: contract of the event.
        subject: the subject to which the message was published.
        data: the bytes of the message.
        sequence: sequence number in the stream.
        at: time at which the stream stored the message, in seconds since the epoch.
        pending: number of messages after this one.
    """

    event: EventContract[P]
    subject: str
    data: bytes
    sequence: int
    at: float
    pending: int

    def payload(self) -> P:
        """The decoded event.

        Raises:
            EnvelopeError: the bytes of the message are not an event of this contract.
        """
        return self.event.decoded(self.data)


async def read_stream(
    js: JetStreamContext, event: EventContract[P], *, first: int = 1, poll_s: float = 0.5
) -> AsyncIterator[StreamMessage[P] | None]:
    """Yield all events from sequence number `first` on, of all addresses. Yield None if no event arrives for `poll_s` seconds.

    Events that the stream dropped are skipped. There are no acknowledgements: the caller stores its position. While JetStream,
    the stream or the consumer does not exist, retry every `RETRY_S` seconds.
    """
    stream, last_error = event.stream_name, ""
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
            last_error, delivered, idle_s = "", 0, 0.0
            try:
                while True:
                    messages = await _fetch(subscription, poll_s)
                    idle_s = 0.0 if messages else idle_s + poll_s
                    if idle_s > LOOK_S:
                        idle_s = 0.0
                        if await _delivered(subscription) != delivered:
                            break
                    for message in messages:
                        if message.metadata.sequence.consumer != delivered + 1:
                            break
                        delivered += 1
                        kept = _kept(event, message)
                        first = kept.sequence + 1
                        yield kept
                    else:
                        if not messages:
                            yield None
                        continue
                    break
                log.info("messages of stream %s were lost on their way; they are read again", stream)
            finally:
                await _leave(subscription)
        except (nats.errors.Error, JetStreamError, OSError) as e:
            text = str(e) or type(e).__name__
            if text != last_error:
                log.warning("cannot read stream %s: %s; retrying every second", stream, text)
            last_error = text
            yield None
            await asyncio.sleep(RETRY_S)


async def _fetch(subscription: JetStreamContext.PullSubscription, poll_s: float) -> list[Msg]:
    try:
        return await subscription.fetch(BATCH, timeout=poll_s)
    except (TimeoutError, nats.errors.TimeoutError):
        return []


async def _delivered(subscription: JetStreamContext.PullSubscription) -> int:
    info = await subscription.consumer_info()
    return 0 if info.delivered is None else info.delivered.consumer_seq


async def _leave(subscription: JetStreamContext.PullSubscription) -> None:
    try:
        await subscription.unsubscribe()
    except nats.errors.Error:
        return  # the connection is closed, and the subscription with it


def _kept(event: EventContract[P], message: Msg) -> StreamMessage[P]:
    found = message.metadata
    return StreamMessage(
        event, message.subject, message.data, found.sequence.stream, found.timestamp.timestamp(), found.num_pending
    )
