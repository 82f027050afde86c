"""What is read from an installation for the verdict: streams of JetStream, a copy of all usage, the ledger."""

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
#: Bytes of a message that NATS carries at most, as it is configured by default.
MESSAGE_BYTES = 1 << 20
#: (life of an executor, batch, place in it) -> (session, gpu_ns, core_ns)
Records = dict[tuple[str, int, int], tuple[str, int, int]]


async def connect(nats_url: str, creds: Path) -> Client:
    """A connection with a service's credentials; it comes back by itself."""
    client = Client()
    held = options(Credentials.load(creds), None)
    await client.connect(nats_url.split(","), max_reconnect_attempts=-1, **held)
    return client


async def mirror_usage(client: Client) -> None:
    """Keep a copy of all usage that executors publish: metering removes what it has booked."""
    config = StreamConfig(
        name=MIRROR, mirror=StreamSource(name=contracts.EXECUTOR_USAGE_RECORDED.stream_name),
        storage=StorageType.FILE, num_replicas=3, max_bytes=256 << 20,
    )  # fmt: skip
    await client.jetstream().add_stream(config)


async def usage(client: Client) -> Records:
    """The records that executors published, as far as the copy has them: metering may take one away before it is copied.

    What a scheduler tells of a session as a whole, by its journal, is not among them.
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
    """Every stream: messages, bytes, and the most bytes that it may have, by its own limit or by that of its messages."""
    found = {}
    for info in await client.jetstream().streams_info():
        if info.config.name != MIRROR:
            limit, pieces = info.config.max_bytes or -1, info.config.max_msgs or -1
            most = limit if limit > 0 else pieces * MESSAGE_BYTES
            found[str(info.config.name)] = (info.state.messages, info.state.bytes, most)
    return found


def ledger(url: str) -> tuple[Records, frozenset[str]]:
    """The entries that were booked from records, and the sessions of which something was booked by their journal."""
    engine = create_engine(url)
    columns = "s.name, e.batch, e.item, e.session_id, e.gpu_ns, e.core_ns, e.reason"
    query = f"SELECT {columns} FROM entries e JOIN sources s ON s.id = e.source_id WHERE e.corrects IS NULL"
    with engine.connect() as connection:
        rows = connection.execute(text(query)).all()
    engine.dispose()
    booked = {(r[0], int(r[1]), int(r[2])): (str(r[3]), int(r[4]), int(r[5])) for r in rows if not r[6]}
    return booked, frozenset([str(r[3]) for r in rows if r[6]])
