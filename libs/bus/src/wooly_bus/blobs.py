"""Blobs in JetStream's object store: immutable, named by the digest of their bytes, a bucket per tenant, kept for a while."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
from collections.abc import AsyncIterator

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, ObjectStoreConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError, ObjectNotFoundError
from nats.js.object_store import ObjectStore
from wooly_wis.module import hasher

from wooly_bus.errors import BusError
from wooly_bus.streams import StreamError

#: Seconds that a blob is kept after it was last put.
KEPT_S = 7 * 24 * 3600.0
BATCH = 64
SILENCE_S = 10.0


class BlobMissingError(BusError):
    """There is no blob of that name, or not any more."""

    code = "bus.blob_missing"


class BlobCorruptError(BusError):
    """A blob's bytes are not those that its name says."""

    code = "bus.blob_corrupt"


def bucket_of(tenant: str) -> str:
    """The bucket of a tenant's blobs. Two tenants never have the same."""
    plain = re.fullmatch(r"[A-Za-z0-9_]{1,64}", tenant)
    return f"WOOLY_BLOBS_{tenant}" if plain else f"WOOLY_BLOBS-{hashlib.sha256(tenant.encode()).hexdigest()}"


class BlobStore:
    """One tenant's blobs.

    Args:
        js: JetStream.
        tenant: whose.
    """

    def __init__(self, js: JetStreamContext, tenant: str) -> None:
        self._js = js
        self.bucket = bucket_of(tenant)
        self._store: ObjectStore | None = None

    async def _open(self) -> ObjectStore:
        if self._store is None:
            try:
                self._store = await self._js.object_store(self.bucket)
            except NotFoundError:
                self._store = await self._js.create_object_store(self.bucket, ObjectStoreConfig(ttl=KEPT_S))
        return self._store

    async def ready(self) -> None:
        """Have the bucket.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        try:
            await self._open()
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise StreamError(f"bucket {self.bucket}: {str(e) or type(e).__name__}") from e

    async def put(self, data: bytes | bytearray | memoryview) -> str:
        """Keep bytes. Returns their name, a digest in hex. What is there already is not sent again.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        h = hasher()
        h.update(data)
        name = h.hexdigest()
        try:
            store = await self._open()
            try:
                known = await store.get_info(name)
                if known.size == len(data):
                    return name
            except ObjectNotFoundError:
                pass
            await store.put(name, io.BytesIO(data))
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise StreamError(f"blob {name[:16]}: {str(e) or type(e).__name__}") from e
        return name

    async def size(self, name: str) -> int:
        """Bytes of a blob.

        Raises:
            BlobMissingError: it is not there.
            StreamError: JetStream does not answer.
        """
        return (await self._info(name))[1]

    async def _info(self, name: str) -> tuple[str, int]:
        try:
            info = await (await self._open()).get_info(name)
        except NotFoundError as e:
            raise BlobMissingError(
                f"there is no blob {name[:16]}… of this tenant; blobs are kept for {KEPT_S / 86400:.0f} days"
            ) from e
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise StreamError(f"blob {name[:16]}: {str(e) or type(e).__name__}") from e
        return str(info.nuid), int(info.size or 0)

    async def chunks(self, name: str) -> AsyncIterator[bytes]:
        """A blob in pieces, as fast as JetStream gives them; the last one comes only if all of them are what the name says.

        Raises:
            BlobMissingError: it is not there.
            BlobCorruptError: its bytes are not those of its name.
            StreamError: JetStream does not answer.
        """
        nuid, size = await self._info(name)
        h, at, last = hasher(), 0, b""
        if size:
            config = ConsumerConfig(
                deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, inactive_threshold=30.0, mem_storage=True
            )
            try:
                subscription = await self._js.pull_subscribe(
                    f"$O.{self.bucket}.C.{nuid}", stream=f"OBJ_{self.bucket}", config=config
                )
                try:
                    while at < size:
                        for message in await subscription.fetch(BATCH, timeout=SILENCE_S):
                            if last:
                                yield last
                            last = message.data
                            h.update(last)
                            at += len(last)
                finally:
                    await subscription.unsubscribe()
            except (TimeoutError, nats.errors.Error, JetStreamError, OSError) as e:
                raise StreamError(f"blob {name[:16]}: {str(e) or type(e).__name__} after {at} of {size} bytes") from e
        if h.hexdigest() != name or at != size:
            raise BlobCorruptError(f"blob {name[:16]}… has bytes that its name does not stand for")
        if last:
            yield last

    async def get(self, name: str, limit: int) -> bytes:
        """A whole blob of at most `limit` bytes; see `chunks`.

        Raises:
            BlobCorruptError: it is larger.
        """
        size = await self.size(name)
        if size > limit:
            raise BlobCorruptError(f"blob {name[:16]}… has {size} bytes, at most {limit} were expected")
        return b"".join([chunk async for chunk in self.chunks(name)])


async def put_all(store: BlobStore, blobs: list[bytes | memoryview], at_once: int = 4) -> list[str]:
    """Keep several blobs. Returns their names, in order."""
    turn = asyncio.Semaphore(at_once)

    async def one(data: bytes | memoryview) -> str:
        async with turn:
            return await store.put(data)

    return list(await asyncio.gather(*[one(b) for b in blobs]))
