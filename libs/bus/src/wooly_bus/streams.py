"""JetStream streams: created explicitly, with limits, by the service that publishes to them; in-order publishing."""

from __future__ import annotations

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError
from nats.js.errors import Error as JetStreamError

from wooly_bus import subjects
from wooly_bus.access import NatsSettings
from wooly_bus.errors import BusConnectError

#: Limits of the stream of usage. What metering has booked is removed; this is for when it is away.
USAGE_AGE_S = 30 * 24 * 3600.0
USAGE_BYTES = 1 << 30
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


async def ensure_stream(js: JetStreamContext, name: str, *subject: str, max_age_s: float, max_bytes: int) -> None:
    """Have a stream of these limits: on disk, in `replicas` copies, the oldest messages go first. One that is there gets them.

    Raises:
        StreamError: JetStream does not answer, or refuses.
    """
    config = StreamConfig(
        name=name,
        subjects=list(subject),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=max_age_s,
        max_bytes=max_bytes,
        num_replicas=replicas(),
    )
    await _ensure(js, config)


async def ensure_queue(js: JetStreamContext, name: str, *subjects: str, max_bytes: int) -> None:
    """Have a stream that keeps each message until it has been taken; when it is full it refuses more. See `queue_reader`.

    Raises:
        StreamError: JetStream does not answer, or refuses.
    """
    await _ensure(
        js,
        StreamConfig(
            name=name,
            subjects=list(subjects),
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=max_bytes,
            num_replicas=replicas(),
        ),
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


async def ensure_usage_stream(js: JetStreamContext) -> None:
    """Have the stream of usage, which executors fill and metering empties.

    Raises:
        StreamError: JetStream does not answer, or refuses.
    """
    await ensure_stream(
        js,
        subjects.EXECUTOR_USAGE_STREAM,
        subjects.EXECUTOR_USAGES,
        max_age_s=USAGE_AGE_S,
        max_bytes=USAGE_BYTES,
    )


async def publish(js: JetStreamContext, subject: str, data: bytes, *, id: str, timeout: float = 2.0) -> None:
    """Publish to a stream and wait until it is kept. The same `id` again, within two minutes, is kept once.

    Raises:
        StreamError: it is not known to be kept; try again.
    """
    try:
        await js.publish(subject, data, timeout=timeout, headers={"Nats-Msg-Id": id})
    except (nats.errors.Error, JetStreamError, OSError) as e:
        raise StreamError(f"{subject}: {str(e) or type(e).__name__}") from e
