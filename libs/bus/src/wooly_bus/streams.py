"""JetStream streams.

The services that publish to a stream create it, as `contracts` defines it. Messages are published in order.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError
from nats.js.errors import Error as JetStreamError

from wooly_bus.access import NatsSettings
from wooly_bus.contract_types import Event, EventContract, Log, P, Q, Stream
from wooly_bus.envelope import encode
from wooly_bus.errors import BusConnectError

log = logging.getLogger("wooly.bus")
T = TypeVar("T")
#: Smallest size limit of a log or bucket, in bytes, if JetStream cannot reserve more.
MIN_BYTES: Final = 32 << 20
#: Prefix of the names of Wooly's streams. Buckets have other prefixes.
_PREFIX: Final = "WOOLY_"
#: JetStream's error codes for too many copies: the peers are missing, the peers are full, there is no cluster.
_TOO_FEW_SERVERS = (10005, 10023, 10074)
#: JetStream's error codes for a stream or bucket that reserves more storage than is free: on one server, in a cluster (twice).
NO_STORAGE = (10047, 10005, 10023)
#: The last size of which the log has told that it is less than was wanted, by stream or bucket.
_reserved: dict[str, int] = {}


class StreamError(BusConnectError):
    """JetStream does not answer, is switched off, or refuses. The message contains its answer."""

    code = "bus.stream"
    retryable = True


def replicas() -> int:
    """Number of copies of each stream and bucket that this process creates; see `NatsSettings`."""
    return NatsSettings().replicas


def refusal(name: str, error: Exception) -> StreamError:
    """The error for a stream or bucket that JetStream refused.

    It names the remedy if there are too few servers for the copies, or if the storage is full.
    """
    why = str(error) or type(error).__name__
    if isinstance(error, APIError) and error.err_code in _TOO_FEW_SERVERS:
        why = (
            f"the NATS cluster has too few servers with JetStream and free storage for {replicas()} copies "
            f"({error.description}); start more servers, or lower WOOLY_NATS_REPLICAS"
        )
    elif isinstance(error, APIError) and error.err_code in NO_STORAGE:
        why = (
            f"the NATS server has too little free storage for JetStream ({error.description}); "
            "free disk space, or raise max_file_store in the server's configuration"
        )
    return StreamError(f"{name}: {why}")


async def ensure_stream(js: JetStreamContext, event: EventContract[Any]) -> None:
    """Create the stream that stores an event, on disk, in `replicas` copies. Update the limits of a stream that exists.

    JetStream reserves the bytes of a stream. If it has less storage, logs become smaller, and a work queue does not.

    Raises:
        ValueError: no stream stores the event.
        StreamError: JetStream does not answer, or refuses.
    """
    if event.stream is None:
        raise ValueError(f"no stream stores the events of {event.template}")
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


async def reserve(
    js: JetStreamContext, name: str, wanted: int, at_least: int, make: Callable[[int], Awaitable[T]]
) -> T:
    """Create or update a stream or bucket, as large as JetStream's free storage allows.

    JetStream reserves all bytes of a stream. While they do not fit, the largest log or the new stream gets half of its size,
    whichever is larger. So the first log does not take the storage that the others need. A log keeps room for twice what it
    stores.

    Args:
        js: the JetStream context.
        name: name of the stream or bucket.
        wanted: its size, in bytes.
        at_least: its smallest size, in bytes.
        make: creates or updates it with a size.

    Raises:
        APIError: JetStream refuses it, even with `at_least` bytes.
    """
    size, why = wanted, ""
    while True:
        try:
            made = await make(size)
        except APIError as e:
            if e.err_code not in NO_STORAGE:
                raise
            if await _halve_largest_log(js, name, size):
                continue
            if size <= at_least:
                raise
            size, why = max(size // 2, at_least), str(e.description)
        else:
            if why and _reserved.get(name) != size:  # told once: who cannot publish asks again and again
                _reserved[name] = size
                log.warning("%s: JetStream reserves %d bytes in place of %d (%s)", name, size, wanted, why)
            return made


async def _halve_largest_log(js: JetStreamContext, but: str, above: int) -> bool:
    """Halve the size of the largest of Wooly's other logs that may become smaller. Return False if none has more than `above`."""
    logs = []
    for info in await js.streams_info():
        size = info.config.max_bytes or 0
        room = max(MIN_BYTES, 2 * info.state.bytes)
        is_log = info.config.retention == RetentionPolicy.LIMITS and (info.config.name or "").startswith(_PREFIX)
        if is_log and info.config.name != but and size > above and size // 2 >= room:
            logs.append((size, info.config))
    if not logs:
        return False
    size, config = max(logs, key=lambda found: found[0])
    log.warning("stream %s: it gets %s bytes in place of %s, to make room for %s", config.name, size // 2, size, but)
    await js.update_stream(replace(config, max_bytes=size // 2))
    return True


async def _ensure(js: JetStreamContext, config: StreamConfig) -> None:
    """Create or update a stream."""
    name, wanted = config.name or "", config.max_bytes or 0
    try:
        try:
            at_least = (await js.stream_info(name)).config.max_bytes or 0
            work = js.update_stream
        except NotFoundError:
            at_least = MIN_BYTES if config.retention == RetentionPolicy.LIMITS else wanted
            work = js.add_stream
        await reserve(js, name, wanted, min(at_least, wanted), lambda size: work(replace(config, max_bytes=size)))
    except (nats.errors.Error, JetStreamError, OSError) as e:
        raise refusal(f"stream {name}", e) from e


async def submit(js: JetStreamContext, command: Event[Q], message: Q, *, timeout: float) -> None:
    """Publish a command with the trace of the sender, and wait until the queue has stored it.

    Raises:
        EnvelopeError: the command is larger than a NATS message may be.
        nats.errors.Error: NATS or JetStream failed; the command may or may not be stored.
    """
    data, headers = encode(message)
    await js.publish(command.subject, data, timeout=timeout, headers=headers)


async def publish(js: JetStreamContext, event: Event[P], payload: P, *, id: str, timeout: float = 2.0) -> None:
    """Publish an event to its stream and wait until the stream has stored it.

    Args:
        js: the JetStream context.
        event: the contract.
        payload: the event.
        id: within two minutes, the stream stores only one event with the same id.
        timeout: seconds.

    Raises:
        StreamError: the stream did not confirm the event; publish it again with the same id.
    """
    try:
        await js.publish(event.subject, event.encoded(payload), timeout=timeout, headers={"Nats-Msg-Id": id})
    except (nats.errors.Error, JetStreamError, OSError) as e:
        raise StreamError(f"{event.subject}: {str(e) or type(e).__name__}") from e
