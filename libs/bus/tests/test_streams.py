"""Streams on real nats-servers: the configured number of copies, or an error that names the missing servers."""

import asyncio
import contextlib

import pytest
from wooly_bus import stream_reader
from wooly_bus.app import ServiceApp
from wooly_bus.artifacts import ArtifactStore
from wooly_bus.blobs import BlobStore
from wooly_bus.contract_types import Event, Log, WorkQueue
from wooly_bus.streams import StreamError, ensure_stream
from wooly_testkit.nats import NatsCluster
from wooly_testkit.nats import nats_server as start_nats_server

pytestmark = pytest.mark.connected
LIMITS = {"max_age_s": 60.0, "max_bytes": 1 << 20}
COPIES = Event("copies.>", bytes, stream=Log("COPIES", **LIMITS))
LARGE = Event("large.>", bytes, stream=Log("LARGE", max_age_s=60.0, max_bytes=1 << 30))


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


@pytest.fixture
def three_servers(tmp_path):
    with contextlib.ExitStack() as running:
        yield NatsCluster(tmp_path, running).url


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


@pytest.fixture
def small_server(tmp_path):
    """A server with 256 MiB of storage for JetStream."""
    config = tmp_path / "nats.conf"
    config.write_text("jetstream { max_file_store: 268435456 }\n")
    with start_nats_server("-c", str(config)) as url:
        yield url


async def test_bucket_is_as_large_as_the_free_storage_allows(small_server):
    app = ServiceApp("test", small_server)
    async with app.running():
        js = app.jetstream()
        store = ArtifactStore(js, "A", max_age_s=60, max_bytes=2 << 30)
        await store.put("a", b"1")
        assert await store.get("a") == b"1"
        assert (await js.stream_info("OBJ_A")).config.max_bytes == 256 << 20


async def test_log_is_as_large_as_the_free_storage_allows(small_server, caplog):
    app = ServiceApp("test", small_server)
    async with app.running():
        js = app.jetstream()
        await js.add_stream(name="OTHER", subjects=["other"], max_bytes=100 << 20)
        for _ in range(2):
            await ensure_stream(js, LARGE)
            assert (await js.stream_info("LARGE")).config.max_bytes == 128 << 20
            await js.publish("large.x", b"1")
        told = [r.getMessage() for r in caplog.records if r.name == "wooly.bus" and "LARGE" in r.getMessage()]
        assert len(told) == 1 and f"reserves {128 << 20} bytes in place of " in told[0]
        await js.delete_stream("OTHER")
        await ensure_stream(js, LARGE)
        grown = await js.stream_info("LARGE")
        assert grown.config.max_bytes == 256 << 20 and grown.state.messages == 2


async def test_first_log_does_not_take_the_storage_that_other_streams_need(small_server):
    first, second = [
        Event(f"{name}.>", bytes, stream=Log(f"WOOLY_{name}", max_age_s=60.0, max_bytes=1 << 30)) for name in ("A", "B")
    ]
    queue = Event("queue.>", bytes, stream=WorkQueue("WOOLY_QUEUE", max_bytes=64 << 20))
    app = ServiceApp("test", small_server)
    async with app.running():
        js = app.jetstream()

        async def sizes():
            return {s.config.name: (s.config.max_bytes or 0) >> 20 for s in await js.streams_info()}

        await ensure_stream(js, first)
        assert await sizes() == {"WOOLY_A": 256}
        await js.publish("A.x", b"1")
        for event in (second, queue):
            await ensure_stream(js, event)
        await ArtifactStore(js, "C", max_age_s=60, max_bytes=1 << 30).put("c", b"1")
        assert await sizes() == {"WOOLY_A": 64, "WOOLY_B": 64, "WOOLY_QUEUE": 64, "OBJ_C": 64}
        await ensure_stream(js, first)
        assert (await js.stream_info("WOOLY_A")).state.messages == 1
        assert (await sizes())["WOOLY_A"] == 64


async def test_log_keeps_room_for_what_it_stores(small_server):
    kept = Event("A.>", bytes, stream=Log("WOOLY_A", max_age_s=60.0, max_bytes=1 << 30))
    app = ServiceApp("test", small_server)
    async with app.running():
        js = app.jetstream()
        await ensure_stream(js, kept)
        for _ in range(100):
            await js.publish("A.x", bytes(700_000))
        queue = Event("queue.>", bytes, stream=WorkQueue("WOOLY_QUEUE", max_bytes=64 << 20))
        with pytest.raises(StreamError, match="too little free storage"):
            await ensure_stream(js, queue)
        found = await js.stream_info("WOOLY_A")
        assert found.config.max_bytes == 256 << 20 and found.state.messages == 100


async def test_storage_that_is_reserved_is_an_error_with_the_cure(small_server, caplog):
    app = ServiceApp("test", small_server)
    async with app.running():
        js = app.jetstream()
        await js.add_stream(name="OTHER", subjects=["other"], max_bytes=250 << 20)
        queue = Event("queue.>", bytes, stream=WorkQueue("QUEUE", max_bytes=64 << 20))
        bucket = ArtifactStore(js, "B", max_age_s=60, max_bytes=1 << 30)
        for work in (ensure_stream(js, LARGE), ensure_stream(js, queue), bucket.put("b", b"1")):
            with pytest.raises(StreamError, match=r"too little free storage for JetStream .*max_file_store"):
                await work
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


async def test_full_bucket_loses_its_oldest_artifacts(nats_server):
    app = ServiceApp("test", nats_server)
    async with app.running():
        js = app.jetstream()
        store = ArtifactStore(js, "FULL", max_age_s=60, max_bytes=1 << 20)
        for k in range(30):
            await store.put(f"a{k}", bytes([k]) * 100_000)
        kept = [k for k in range(30) if await store.get(f"a{k}") is not None]
        assert kept == list(range(kept[0], 30)) and 4 <= len(kept) <= 10
        assert await store.get("a29") == bytes([29]) * 100_000
        with pytest.raises(StreamError, match="maximum bytes exceeded"):
            await store.put("large", bytes(2 << 20))
        await store.put("later", b"1")
        assert await store.get("later") == b"1"
