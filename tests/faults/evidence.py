"""Reads the evidence for the verdict from an installation: JetStream's streams, a copy of all usage, the ledger."""

from __future__ import annotations

from pathlib import Path

from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig, StreamSource
from nats.js.errors import Error as JetStreamError
from sqlalchemy import create_engine, text
from wooly_bus import contracts
from wooly_bus.access import options
from wooly_bus.credentials import Credentials
from wooly_bus.envelope import decode
from wooly_wis.credits import UsageRecorded

MIRROR = "FAULTS_USAGE"
#: Maximum size of a NATS message in bytes, with NATS's default configuration.
MESSAGE_BYTES = 1 << 20
#: (life of an executor, batch, index in the batch) -> (session, gpu_ns, core_ns).
Records = dict[tuple[str, int, int], tuple[str, int, int]]


async def connect(nats_url: str, creds: Path) -> Client:
    """Return a connection with a service's credentials. It reconnects by itself."""
    client = Client()
    held = options(Credentials.load(creds), None)
    await client.connect(nats_url.split(","), max_reconnect_attempts=-1, **held)
    return client


async def mirror_usage(client: Client) -> None:
    """Keep a copy of all usage that executors publish, because metering removes the records that it has booked."""
    config = StreamConfig(
        name=MIRROR, mirror=StreamSource(name=contracts.EXECUTOR_USAGE_RECORDED.stream_name),
        storage=StorageType.FILE, num_replicas=3, max_bytes=256 << 20,
    )  # fmt: skip
    await client.jetstream(timeout=30.0).add_stream(config)  # servers that have just formed a cluster are slow


async def usage(client: Client) -> Records:
    """Return the published records that the copy contains. Metering may remove a record before it is copied.

    Usage that a scheduler reports for a whole session, from its journal, is not included.
    """
    js = client.jetstream()
    info = await js.stream_info(MIRROR)
    found: dict[tuple[str, int, int], tuple[str, int, int]] = {}
    for sequence in range(max(info.state.first_seq, 1), info.state.last_seq + 1):
        try:
            message = await js.get_msg(MIRROR, sequence)
        except JetStreamError:
            continue
        batch = decode(message.data or b"", UsageRecorded)
        if not batch.whole:
            for item, record in enumerate(batch.records):
                found[batch.source, batch.batch, item] = record.session_id, record.gpu_ns, record.core_ns
    return found


async def streams(client: Client) -> dict[str, tuple[int, int, int]]:
    """Return messages, bytes and maximum bytes of each stream.

    The maximum is the stream's own limit, or follows from that of its messages.
    """
    found = {}
    for info in await client.jetstream().streams_info():
        if info.config.name != MIRROR:
            limit, pieces = info.config.max_bytes or -1, info.config.max_msgs or -1
            most = limit if limit > 0 else pieces * MESSAGE_BYTES
            found[str(info.config.name)] = (info.state.messages, info.state.bytes, most)
    return found


def ledger(url: str) -> tuple[Records, frozenset[str]]:
    """Return the entries that were booked from records, and the sessions for which entries were booked from their journal."""
    engine = create_engine(url)
    columns = "s.name, e.batch, e.item, e.session_id, e.gpu_ns, e.core_ns, e.reason"
    query = f"SELECT {columns} FROM entries e JOIN sources s ON s.id = e.source_id WHERE e.corrects IS NULL"
    with engine.connect() as connection:
        rows = connection.execute(text(query)).all()
    engine.dispose()
    booked = {(r[0], int(r[1]), int(r[2])): (str(r[3]), int(r[4]), int(r[5])) for r in rows if not r[6]}
    return booked, frozenset([str(r[3]) for r in rows if r[6]])


def quarantined(url: str) -> tuple[str, ...]:
    """Return what metering put into quarantine, and why."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT source, batch, item, reason FROM quarantine ORDER BY id")).all()
    engine.dispose()
    return tuple([f"{source} {batch} {item}: {reason}" for source, batch, item, reason in rows])
