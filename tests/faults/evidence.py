"""What is read from an installation for the verdict: streams of JetStream, a copy of all usage, the ledger."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig, StreamSource
from nats.js.errors import Error as JetStreamError
from sqlalchemy import create_engine, text
from wooly_bus import subjects
from wooly_bus.access import options
from wooly_bus.credentials import Credentials
from wooly_bus.envelope import decode
from wooly_wis.credits import UsageRecorded

MIRROR = "FAULTS_USAGE"


async def connect(nats_url: str, creds: Path) -> Client:
    """A connection with a service's credentials; it comes back by itself."""
    client = Client()
    held = options(Credentials.load(creds), None)
    await client.connect(nats_url.split(","), max_reconnect_attempts=-1, **held)
    return client


async def mirror_usage(client: Client) -> None:
    """Keep a copy of all usage that executors publish: metering removes what it has booked."""
    config = StreamConfig(
        name=MIRROR, mirror=StreamSource(name=subjects.EXECUTOR_USAGE_STREAM), storage=StorageType.FILE, num_replicas=3,
        max_bytes=256 << 20,
    )  # fmt: skip
    await client.jetstream().add_stream(config)


async def usage(client: Client) -> dict[str, tuple[int, int, int, int]]:
    """Per session what executors reported: entries, runs, gpu_ns, core_ns. A batch that was published twice counts once."""
    js = client.jetstream()
    info = await js.stream_info(MIRROR)
    seen: set[tuple[str, int]] = set()
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for sequence in range(max(info.state.first_seq, 1), info.state.last_seq + 1):
        try:
            message = await js.get_msg(MIRROR, sequence)
        except JetStreamError:
            continue
        batch = decode(message.data or b"", UsageRecorded)
        if (batch.source, batch.batch) in seen:
            continue
        seen.add((batch.source, batch.batch))
        for record in batch.records:
            for i, amount in enumerate((1, record.runs, record.gpu_ns, record.core_ns)):
                sums[record.session_id][i] += amount
    return {session: (s[0], s[1], s[2], s[3]) for session, s in sums.items()}


async def streams(client: Client) -> dict[str, tuple[int, int, int]]:
    """Every stream: messages, bytes, and the most bytes that it may have."""
    found = {}
    for info in await client.jetstream().streams_info():
        if info.config.name != MIRROR:
            found[str(info.config.name)] = (info.state.messages, info.state.bytes, info.config.max_bytes or -1)
    return found


def ledger(url: str) -> dict[str, tuple[int, int, int, int]]:
    """Per session what was booked: entries, runs, gpu_ns, core_ns."""
    engine = create_engine(url)
    sums = "count(*), sum(runs), sum(gpu_ns), sum(core_ns)"
    query = f"SELECT session_id, {sums} FROM entries WHERE corrects IS NULL GROUP BY session_id"
    with engine.connect() as connection:
        return {r[0]: (int(r[1]), int(r[2]), int(r[3]), int(r[4])) for r in connection.execute(text(query))}
