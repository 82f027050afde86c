"""Tests of the journal's publisher: every entry once and in order, also when NATS is killed; every journal can be replayed."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import nats
import nats.errors
import pytest
from nats.js.errors import NotFoundError
from wooly_bus import contracts
from wooly_bus.channel import Endpoint
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.rpc import ControlClient
from wooly_dispatch.events import (
    LaunchDoneEvent,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionOpenedEvent,
    SessionSuspendedEvent,
)
from wooly_dispatch.invariants import Auditor
from wooly_dispatch.journal import Batch, Replayer
from wooly_executor import journal
from wooly_executor.journal import JournalPublisher
from wooly_testkit.forks import Forked
from wooly_wis.dtypes import DType
from wooly_wis.messages import (
    EndEpochRequest,
    HostSessionRequest,
    SessionPolicy,
    SteerSessionRequest,
)

WAIT_S = 60


def replayed(batches):
    """All entries by journal, each journal replayed from its first entry and audited."""
    found = {}
    for batch in map(Batch.decode, batches):
        replayer, auditor, entries = found.setdefault(batch.journal, (Replayer(batch.journal), Auditor(), []))
        for event, decisions in replayer.replay(batch):
            auditor.audit(event, decisions, replayer.state.windows)
            entries.append((event, decisions))
    return {name: entries for name, (_, _, entries) in found.items()}


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- the whole process -----------------------------------------------------------------------------------------------


class Nats:
    """A nats-server that can be killed and restarted on the same port with its streams."""

    def __init__(self, directory):
        beside = Path(sysconfig.get_path("scripts")) / "nats-server"
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self._argv = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory)]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def batches(self):
        """All messages of the stream; empty while the executor has not created the stream."""

        async def fetch():
            client = await nats.connect(self.url, max_reconnect_attempts=1)
            try:
                js = client.jetstream()
                state = (await js.stream_info(contracts.EXECUTOR_DISPATCH_JOURNALED.stream_name)).state
                numbers = range(max(state.first_seq, 1), state.last_seq + 1)  # an empty stream reports 0 to 0
                return [(await js.get_msg(contracts.EXECUTOR_DISPATCH_JOURNALED.stream_name, n)).data for n in numbers]
            except NotFoundError:
                return []
            finally:
                await client.close()

        return asyncio.run(fetch())


@pytest.fixture
def server(tmp_path):
    running = Nats(tmp_path / "jetstream")
    yield running
    running.kill()


@pytest.fixture
def executor(server, tmp_path):
    """`executor(rpc, request)` sends a request to the executor "x"."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WOOLY_EXECUTOR_")} | {
        "WOOLY_EXECUTOR_NATS_URL": server.url,
        "WOOLY_EXECUTOR_ID": "x",
        "WOOLY_EXECUTOR_STATE_DIR": str(tmp_path),
    }
    process = Forked("wooly_executor", env=environment)

    def ask(rpc, message):
        assert process.poll() is None
        control = ControlClient(server.url)
        try:
            return control.request(rpc.at("x"), message)
        finally:
            control.close()

    yield ask
    process.terminate()
    assert process.wait(WAIT_S) == 0


def host(executor, name, **fields):
    request = HostSessionRequest(session_id=name, token="t", tenant="acme", priority=3, lease_s=600, **fields)

    def ask():
        with contextlib.suppress(BusError):
            return executor(contracts.EXECUTOR_SESSION_OPEN, request)

    return until(ask)


@pytest.mark.connected
def test_journal_with_nats_killed_arrives_complete(server, executor, wis):
    def steer(**fields):
        request = SteerSessionRequest(session_id="a", **fields)
        return executor(contracts.EXECUTOR_SESSION_STEER, request)

    reply = host(executor, "a", policy=SessionPolicy(priority=3, weight=5))
    client = wis.client(Endpoint.parse(reply.endpoints[0]), "a", "t")
    until(lambda: "acme" in {getattr(e, "tenant", "") for es in replayed(server.batches()).values() for e, _ in es})
    assert steer(suspended=True).suspended
    assert steer(suspended=False, priority=4).policy == SessionPolicy(priority=4, weight=5)
    assert steer(exclusive=True).exclusive and not steer(exclusive=False).exclusive
    windows = executor(contracts.EXECUTOR_EPOCH_END, EndEpochRequest(slowdown_permille=1000)).windows_ns
    assert len(windows) == 5
    with pytest.raises(RefusedError) as caught:
        executor(contracts.EXECUTOR_SESSION_STEER, SteerSessionRequest(session_id="nobody"))
    assert caught.value.code == "executor.no_session"

    v = wis.at(DType.F32, 2)
    client.make(1, 1, 1)
    program = client.define(wis.body().call("aten.add_.Tensor", ("inout", "x", v), ("in", "x", v)))

    def work(times):
        for _ in range(times):
            client.start(program, [1])
        client.sync()

    work(30)
    server.kill()
    work(30)  # clients neither notice nor wait
    assert client.floats(1, 2) == [2.0**60] * 2
    server.start()

    def arrived():
        with contextlib.suppress(nats.errors.Error, OSError):
            found = replayed(server.batches())
            (entries,) = found.values()  # still one journal
            # runs that were sent together are one program with a kernel for each of them
            runs = sum([len(e.kernels) for e, _ in entries if isinstance(e, ProgramSubmittedEvent)])
            return runs >= 61 and isinstance(entries[-1][0], LaunchDoneEvent) and entries

    events = [event for event, _ in until(arrived)]
    opened = next(event for event in events if isinstance(event, SessionOpenedEvent))
    assert (opened.session, opened.tenant, opened.policy.weight) == ("a", "acme", 5)
    assert {SessionSuspendedEvent, PolicyChangedEvent} <= {type(event) for event in events}
    client.close()


# -- when NATS is away for too long ----------------------------------------------------------------------------------


class Bin:
    """A fake JetStream with lists that can be switched off."""

    def __init__(self):
        self.on, self.kept, self.streams = True, [], []

    async def stream_info(self, name):
        self._check()
        if name not in self.streams:
            raise NotFoundError
        return SimpleNamespace(config=SimpleNamespace(max_bytes=1 << 30))

    async def add_stream(self, config):
        self.streams.append(config.name)

    async def update_stream(self, config):
        assert config.name in self.streams

    async def publish(self, subject, data, timeout, headers):
        self._check()
        self.kept.append(data)

    def _check(self):
        if not self.on:
            raise nats.errors.TimeoutError


async def settled(condition):
    for _ in range(WAIT_S * 100):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError


async def test_journal_queue_overflow_ends_it_and_starts_another(device, wis, monkeypatch):
    monkeypatch.setattr(journal, "RETRY_S", 0.01)
    monkeypatch.setattr(journal, "WAITING_BYTES", 2000)
    js = Bin()
    publisher = JournalPublisher(js, device.loop, "x", "x/1")
    running = asyncio.create_task(publisher.run())
    a = device.open("a", priority=3, weight=7)
    await settled(lambda: any(b'"SessionOpened"' in data for data in js.kept))
    first = publisher.name
    js.on = False
    for k in range(20):
        a.make(k, 1.0)
    a.sync()
    await settled(lambda: not publisher.name)
    a.make(99, 1.0)
    a.sync()
    js.on = True
    await settled(lambda: publisher.name and Batch.decode(js.kept[-1]).journal == publisher.name)
    a.make(100, 1.0)
    a.sync()
    await publisher.publish()
    running.cancel()
    found = replayed(js.kept)
    assert list(found) == [first, publisher.name]
    opened = next(event for event, _ in found[publisher.name] if isinstance(event, SessionOpenedEvent))
    assert opened.policy.weight == 7
    assert any(isinstance(event, LaunchDoneEvent) for event, _ in found[publisher.name])
    device.entries = device.call(device.loop.dispatch.begin_journal)


async def test_journal_batches_are_bounded_and_consecutive(device, monkeypatch):
    monkeypatch.setattr(journal, "BATCH_ENTRIES", 40)
    js = Bin()
    publisher = JournalPublisher(js, device.loop, "x", "x/1")
    await publisher._begin()
    a = device.open("a")
    for k in range(100):
        a.make(k, 1.0)
    a.sync()
    await publisher.publish()
    batches = [Batch.decode(data) for data in js.kept]
    assert len(batches) > 5 and all(b.last - b.first < 40 for b in batches)
    (entries,) = replayed(js.kept).values()
    assert len(entries) == batches[-1].last
    device.entries = device.call(device.loop.dispatch.begin_journal)
