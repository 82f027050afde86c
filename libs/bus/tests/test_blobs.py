"""Blobs and work queues over a real nats-server."""

import asyncio
import contextlib
import os

import pytest
from nats.js.errors import APIError
from wooly_bus.app import ServiceApp
from wooly_bus.blobs import (
    BlobCorruptError,
    BlobMissingError,
    BlobStore,
    UploadError,
    bucket_of,
    buckets,
    name_of,
    put_all,
)
from wooly_bus.contract_types import Event, WorkQueue
from wooly_bus.queue_reader import take
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.module import module_digest

pytestmark = pytest.mark.connected


@contextlib.asynccontextmanager
async def jetstream(url):
    app = ServiceApp("test", url)
    async with app.running():
        yield app.jetstream()


@pytest.mark.parametrize("size", [0, 1, 100_000, 128 << 10, 20 << 20])
async def test_blob_round_trips_under_its_digest(nats_server, size):
    data = os.urandom(size)
    async with jetstream(nats_server) as js:
        name = await BlobStore(js, f"t{size}").put(memoryview(data))
        assert name == module_digest(data).hex() == await BlobStore(js, f"t{size}").put(data)
        again = BlobStore(js, f"t{size}")
        assert await again.size(name) == size and await again.get(name, size) == data


@pytest.mark.parametrize("how", ["put", "append"])
async def test_bucket_that_was_lost_with_its_disk_is_made_again(nats_server, how):
    """A router keeps the stores of its tenants for as long as it runs."""
    async with jetstream(nats_server) as js:
        store = BlobStore(js, f"lost-{how}")
        name = await store.put(b"once")
        await js.delete_stream(f"OBJ_{store.bucket}")
        with pytest.raises(BlobMissingError):
            await store.size(name)

        async def keep():
            if how == "put":
                return await store.put(b"once")
            await store.append("u", 0, b"once", 0)
            await store.finish(name, "u", 4)
            return name

        with pytest.raises(StreamError):
            await keep()
        assert await keep() == name and await store.get(name, 10) == b"once"


async def test_get_blob_of_other_tenant_raises(nats_server):
    async with jetstream(nats_server) as js:
        a, b = await put_all(BlobStore(js, "mine"), [b"a", b"b"])
        with pytest.raises(BlobMissingError, match="no blob"):
            await BlobStore(js, "yours").get(a, 10)
        with pytest.raises(BlobCorruptError, match="the limit is 0"):
            await BlobStore(js, "mine").get(b, 0)


async def test_get_blob_with_wrong_digest_raises(nats_server):
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "liar")
        name = await store.put(b"honest")
        await store._store.put(name, b"forged")
        with pytest.raises(BlobCorruptError, match=f"the bytes of blob {name[:16]}… do not match its digest"):
            await store.get(name, 100)


async def send(stores, upload, parts):
    """Append parts, in turns by several routers' stores; the number of the last one."""
    after = offset = 0
    for i, part in enumerate(parts):
        after = await stores[i % len(stores)].append(upload, offset, part, after)
        offset += len(part)
    return after


async def test_upload_in_pieces_becomes_blob(nats_server):
    parts = [os.urandom(512 << 10), os.urandom(512 << 10), os.urandom(77)]
    whole = b"".join(parts)
    name = name_of(whole)
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "pieces")
        await send([store, BlobStore(js, "pieces")], "u" * 32, parts)
        assert not await store.has(name, len(whole))  # not before it is verified
        await store.finish(name, "u" * 32, len(whole))
        assert await store.has(name, len(whole)) and await store.get(name, len(whole)) == whole
        assert (
            await (await js.object_store(store.bucket)).get(name)
        ).data == whole  # the SHA-256 of the object store is correct, too
        assert (await store.held())[0] >= len(whole)
        for kept in (name, await store.put(whole[:300_000])):  # our pieces are larger than those of the object store
            found, after, size = b"", 0, None
            while size is None or len(found) < size:
                size, data, after = await store.piece(kept, after)
                assert data
                found += data
            assert name_of(found) == kept


async def test_append_repeated_or_out_of_order_changes_nothing(nats_server):
    parts = [b"a" * 1000, b"b" * 1000, b"c" * 10]
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "again")
        first = await store.append("u" * 32, 0, parts[0], 0)
        assert first == await store.append("u" * 32, 0, parts[0], 0)  # its answer was lost
        with pytest.raises(UploadError, match="begin the upload again"):
            await store.append("u" * 32, 2000, parts[2], first + 1)
        second = await store.append("u" * 32, 1000, parts[1], first)
        with pytest.raises(UploadError):
            await store.append("u" * 32, 1500, b"x", first)
        await store.append("u" * 32, 2000, parts[2], second)
        whole = b"".join(parts)
        await store.finish(name_of(whole), "u" * 32, len(whole))
        assert await store.get(name_of(whole), len(whole)) == whole


async def test_finish_wrong_digest_removes_pieces(nats_server):
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "forger")
        name = name_of(b"honest")
        await send([store], "u" * 32, [b"for", b"ged"])
        with pytest.raises(BlobCorruptError, match="do not match the digest"):
            await store.finish(name, "u" * 32, 6)
        assert not await store.has(name, 6) and (await store.held())[0] == 0


async def test_drop_uploads_removes_only_idle_uploads(nats_server):
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "idler")
        parts = [b"a" * 1000, b"b" * 1000]
        name = name_of(b"".join(parts))
        await send([store], "u" * 32, parts)
        await store.finish(name, "u" * 32, 2000)
        other = await store.put(b"c" * 3000)
        before = (await store.held())[0]
        assert await store.drop_uploads(0.0) == 0 and (await store.held())[0] == before  # blobs are not uploads
        after = await send([store], "v" * 32, [b"d" * 5000])
        await send([store], "w" * 32, parts)
        assert (
            await store.drop_uploads(3600.0) == 2 and (await store.held())[0] > before + 7000
        )  # these uploads may continue
        assert await store.drop_uploads(0.0) == 0 and (await store.held())[0] == before
        assert await store.get(name, 2000) == b"".join(parts) and await store.get(other, 3000) == b"c" * 3000
        with pytest.raises(UploadError, match="begin the upload again"):
            await store.append("v" * 32, 5000, b"e", after)
        assert store.bucket in await buckets(js)


async def test_drop_uploads_without_blobs_empties_bucket(nats_server):
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "only uploads")
        await send([store], "u" * 32, [b"a" * 1000])
        assert await store.drop_uploads(0.0) == 0 and (await store.held())[0] == 0


def test_bucket_of_any_tenant_name_is_unique():
    names = ["a", "a b", "a.b", "a-b", "a_b", "ü", "A" * 65, "A" * 64, "WOOLY", ""]
    assert len({bucket_of(n) for n in names}) == len(names)
    assert bucket_of("default") == "WOOLY_BLOBS_default"


async def test_work_queue_redelivers_until_done_and_refuses_when_full():
    with start_nats_server() as url:
        async with jetstream(url) as js:
            queue = Event("test.queue", bytes, stream=WorkQueue("WOOLY_CMD_TEST", max_bytes=2000))
            await ensure_stream(js, queue)
            for i in range(3):
                await publish(js, queue, b"%d" % i, id=f"m{i}")
            await publish(js, queue, b"again", id="m0")
            seen = []

            async def read():
                async for taken in take(js, queue, "reader"):
                    seen.append(taken.payload())
                    if seen.count(b"1") == 1 and taken.payload() == b"1":
                        await taken.later(0.05)
                    else:
                        await taken.done()

            readers = [asyncio.create_task(read()) for _ in range(2)]
            for _ in range(250):
                if (await js.stream_info("WOOLY_CMD_TEST")).state.messages == 0:
                    break
                await asyncio.sleep(0.02)
            assert sorted(seen) == [b"0", b"1", b"1", b"2"]
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
            with pytest.raises(APIError, match="maximum bytes"):
                for _ in range(10):
                    await js.publish("test.queue", b"x" * 500)


async def test_chunks_of_reader_that_was_forgotten_go_on(nats_server):
    """JetStream removes the consumer of a reader that takes nothing for a while, e.g. because its device is busy."""
    data = os.urandom(20 << 20)
    async with jetstream(nats_server) as js:
        store = BlobStore(js, "slow")
        name, found = await store.put(data), b""
        async for chunk in store.chunks(name):
            found += chunk
            if len(found) == len(chunk):
                stream = f"OBJ_{store.bucket}"
                for info in await js.consumers_info(stream):
                    assert await js.delete_consumer(stream, info.name)
        assert found == data
