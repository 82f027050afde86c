"""Streams on real nats-servers: the configured number of copies, or an error that names the missing servers."""

import asyncio
import contextlib
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest
from wooly_bus import stream_reader
from wooly_bus.app import ServiceApp
from wooly_bus.artifacts import ArtifactStore
from wooly_bus.blobs import BlobStore
from wooly_bus.contract_types import Event, Log, WorkQueue
from wooly_bus.streams import StreamError, ensure_stream

pytestmark = pytest.mark.connected
LIMITS = {"max_age_s": 60.0, "max_bytes": 1 << 20}
COPIES = Event("copies.>", bytes, stream=Log("COPIES", **LIMITS))


async def test_streams_too_many_replicas_are_refused_with_remedy(nats_server, monkeypatch):
    monkeypatch.setenv("WOOLY_NATS_REPLICAS", "3")
    app = ServiceApp("test", nats_server)
    async with app.running():
        js = app.jetstream()
        cure = "too few servers with JetStream and free storage for 3 copies.*lower WOOLY_NATS_REPLICAS"
        for work in (
            ensure_stream(js, COPIES),
            ensure_stream(js, Event("copiesq.>", bytes, stream=WorkQueue("COPIES_Q", max_bytes=1 << 20))),
            BlobStore(js, "copies").ready(),
            ArtifactStore(js, "COPIES_A", **LIMITS).put("a", b"1"),
        ):
            with pytest.raises(StreamError, match=cure):
                await work
        monkeypatch.setenv("WOOLY_NATS_REPLICAS", "1")
        await ensure_stream(js, COPIES)
        assert (await js.stream_info("COPIES")).config.num_replicas == 1


@pytest.mark.parametrize("lost", [range(1), range(3), range(2, 4), range(5, 6)], ids=str)
async def test_stream_is_read_whole_although_messages_are_lost_on_their_way(nats_server, monkeypatch, lost):
    """As if the connection had broken between the server and the reader. The last message is found without another one."""
    monkeypatch.setattr(stream_reader, "LOOK_S", 0.2)
    real, seen = stream_reader._fetch, []

    async def fetch(subscription, poll_s):
        messages = await real(subscription, poll_s)
        seen.extend(messages)
        begin = len(seen) - len(messages)
        return [m for k, m in enumerate(messages, begin) if k not in lost]

    monkeypatch.setattr(stream_reader, "_fetch", fetch)
    monkeypatch.setattr(stream_reader, "BATCH", 2)
    app = ServiceApp("test", nats_server)
    async with app.running():
        js = app.jetstream()
        await ensure_stream(js, COPIES)
        for k in range(6):
            await js.publish("copies.x", str(k).encode())
        found = []
        async with contextlib.aclosing(stream_reader.read_stream(js, COPIES, poll_s=0.1)) as reading:
            async with asyncio.timeout(30):
                async for kept in reading:
                    if kept is not None:
                        found.append(kept.data)
                    if len(found) == 6:
                        break
        assert found == [str(k).encode() for k in range(6)]


def free_ports(n):
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in taken]


@pytest.fixture
def three_servers(tmp_path):
    binary = str(Path(sysconfig.get_path("scripts")) / "nats-server")
    clients, routes = free_ports(3), free_ports(3)
    known = ",".join(f"nats://127.0.0.1:{p}" for p in routes)
    with contextlib.ExitStack() as running:
        for k in range(3):
            argv = [
                binary,
                "-a",
                "127.0.0.1",
                "-p",
                str(clients[k]),
                "-n",
                f"n{k}",
                "-js",
                "-sd",
                str(tmp_path / f"n{k}"),
            ]
            argv += ["--cluster_name", "test", "--cluster", f"nats://127.0.0.1:{routes[k]}", "--routes", known]
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.callback(process.wait, 10)
            running.callback(process.kill)
        yield ",".join(f"nats://127.0.0.1:{p}" for p in clients)


@pytest.mark.slow
async def test_streams_on_cluster_have_three_replicas(three_servers, monkeypatch):
    app = ServiceApp("test", three_servers)
    async with app.running():
        js = app.jetstream()
        async with asyncio.timeout(60):
            while True:  # the servers agree on a leader first
                try:
                    await ensure_stream(js, COPIES)
                    break
                except StreamError:
                    await asyncio.sleep(0.2)
            monkeypatch.setenv("WOOLY_NATS_REPLICAS", "3")
            await ensure_stream(js, COPIES)  # existing streams get the copies, too
            store = BlobStore(js, "copies")
            name = await store.put(b"kept")
            for stream in ("COPIES", f"OBJ_{store.bucket}"):
                while True:  # wait until the other servers have a copy
                    info = await js.stream_info(stream)
                    assert info.config.num_replicas == 3
                    if len(info.cluster.replicas or ()) == 2:
                        break
                    await asyncio.sleep(0.1)
        assert await store.get(name, 4) == b"kept"
