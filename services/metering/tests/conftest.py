"""Shared parts of metering's tests: records, databases of both kinds, the service's process, a NATS server that can be killed."""

import asyncio
import os
import shutil
import socket
import subprocess
import time

import pytest
from sqlalchemy import make_url
from wooly_metering.core.booking import Delivery
from wooly_metering.ledger.database import Database, migrate
from wooly_metering.ledger.reader import Reader
from wooly_metering.ledger.writer import Writer
from wooly_testkit.forks import Forked
from wooly_wis.credits import UsageRecord, UsageRecorded

NOW = 1_800_000_000_000_000
MS, SECOND = 1_000, 1_000_000


def record(session="s1", **values):
    """One second in which 0.4 s of one core and 100 MiB were used."""
    usual = {
        "tenant": "acme",
        "model": "llama",
        "at_us": NOW,
        "span_us": SECOND,
        "runs": 10,
        "gpu_ns": 400_000_000,
        "core_ns": 400_000_000,
        "moved_bytes": 1000,
        "flops": 2000,
        "resident_mib_us": 40 * SECOND,
        "idle_mib_us": 60 * SECOND,
    }
    return UsageRecord(session_id=session, **usual | values)


def event(*records, batch=1, source="gpu-0/1", **values):
    usual = {"executor_id": "gpu-0", "device_kind": "cpu", "cores": 2, "memory": 1 << 30}
    return UsageRecorded(source=source, batch=batch, records=records, **usual | values)


def delivery(sequence, event):
    return Delivery(sequence, event if isinstance(event, bytes) else event.model_dump_json().encode())


class Ledger:
    """A database with its writer and reader."""

    def __init__(self, url):
        self.url = url
        self.database = Database(url, durable=False)
        self.writer, self.reader = Writer(self.database), Reader(self.database)
        self.sequence = 0

    def take(self, *events, now=NOW):
        """Book the next messages of the stream."""
        first = self.sequence
        self.sequence += len(events)
        found = [delivery(first + 1 + i, e) for i, e in enumerate(events)]
        return self.writer.take("S", "then", first, found, now)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The URL of a new database, for both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/credits.db"
    return request.getfixturevalue("postgres").database()


@pytest.fixture(scope="session")
def schema_file(tmp_path_factory):
    """A migrated SQLite file to copy, because a migration takes as long as most tests."""
    path = tmp_path_factory.mktemp("schema") / "credits.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def schema(postgres):
    """A migrated PostgreSQL schema to copy."""
    url = postgres.database()
    migrate(url)
    return make_url(url).database


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger(request, tmp_path):
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").database(request.getfixturevalue("schema"))
    else:
        shutil.copy(request.getfixturevalue("schema_file"), tmp_path / "credits.db")
        url = f"sqlite:///{tmp_path}/credits.db"
    found = Ledger(url)
    yield found
    found.database.close()


@pytest.fixture
def start_metering(tmp_path):
    """Starts the service as a process; stops it at the end of the test."""
    running = []

    def start(nats, url, **env):
        with (tmp_path / "metering.log").open("ab") as log:
            process = Forked(
                "wooly_metering",
                env=os.environ
                | {
                    "WOOLY_METERING_NATS_URL": nats,
                    "WOOLY_METERING_DATABASE_URL": url,
                    "WOOLY_METERING_STATE_DIR": str(tmp_path / "metering"),
                    "WOOLY_METERING_HTTP_PORT": "0",
                }
                | env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def until(condition, seconds=60):
    """Wait until `condition()` (or the awaited result) is true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.02)
