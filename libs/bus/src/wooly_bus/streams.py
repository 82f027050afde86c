"""JetStream streams: created explicitly, as `contracts` says, by the services that publish to them; in-order publishing."""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError
from nats.js.errors import Error as JetStreamError

from wooly_bus.access import NatsSettings
from wooly_bus.contract_types import Event, EventContract, Log, P, Q, Stream
from wooly_bus.envelope import encode
from wooly_bus.errors import BusConnectError

#: What JetStream says where a stream cannot have so many copies: no peers, no room on them, no cluster.
_TOO_FEW_SERVERS = (10005, 10023, 10074)


class StreamError(BusConnectError):
    """JetStream is away, switched off, or will not do it. The message says what it said."""

    code = "bus.stream"
    retryable = True


def replicas() -> int:
    """Copies of every stream and bucket that this process makes; see `NatsSettings`."""
    return NatsSettings().replicas


def refusal(name: str, error: Exception) -> StreamError:
    """What JetStream said of a stream or bucket, and the cure where it has too few servers for its copies."""
    why = str(error) or type(error).__name__
    if isinstance(error, APIError) and error.err_code in _TOO_FEW_SERVERS:
        why = (
            f"WOOLY_NATS_REPLICAS asks for {replicas()} copies, and the NATS cluster has fewer servers with JetStream and room "
            f"({error.description}); start more of them, or ask for fewer copies"
        )
    return StreamError(f"{name}: {why}")


async def ensure_stream(js: JetStreamContext, event: EventContract[Any]) -> None:
    """Have the stream that keeps an event: on disk, in `replicas` copies. A stream that is there gets the limits of the contract.

    Raises:
        ValueError: no stream keeps the event.
        StreamError: JetStream does not answer, or refuses.
    """
    if event.stream is None:
        raise ValueError(f"no stream keeps the events of {event.template}")
    await _ensure(js, _config(event.stream, event.pattern))


def _config(stream: Stream, pattern: str) -> StreamConfig:
    is_log = isinstance(stream, Log)
    return StreamConfig(
        name=stream.name,
        subjects=[pattern],
        retention=RetentionPolicy.LIMITS if is_log else RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD if is_log else DiscardPolicy.NEW,
        max_age=stream.max_age_s if isinstance(stream, Log) else None,
        max_bytes=stream.max_bytes,
        num_replicas=replicas(),
    )


async def _ensure(js: JetStreamContext, config: StreamConfig) -> None:
    name = config.name or ""
    try:
        try:
            await js.stream_info(name)
        except NotFoundError:
            await js.add_stream(config)
        else:
            await js.update_stream(config)
    except (nats.errors.Error, JetStreamError, OSError) as e:
        raise refusal(f"stream {name}", e) from e


async def submit(js: JetStreamContext, command: Event[Q], message: Q, *, timeout: float) -> None:
    """Publish a command, with the trace of its sender, and wait until its queue keeps it. NATS's own errors pass.

    Raises:
        EnvelopeError: larger than NATS carries.
    """
    data, headers = encode(message)
    await js.publish(command.subject, data, timeout=timeout, headers=headers)


async def publish(js: JetStreamContext, event: Event[P], payload: P, *, id: str, timeout: float = 2.0) -> None:
    """Publish an event to its stream and wait until it is kept. The same `id` again, within two minutes, is kept once.

    Raises:
        StreamError: it is not known to be kept; try again.
    """
    try:
        await js.publish(event.subject, event.encoded(payload), timeout=timeout, headers={"Nats-Msg-Id": id})
    except (nats.errors.Error, JetStreamError, OSError) as e:
        raise StreamError(f"{event.subject}: {str(e) or type(e).__name__}") from e
