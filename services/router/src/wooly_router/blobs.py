"""Blobs of tenants, whose credentials have no JetStream: put and read in pieces, each a request that any router answers.

What a tenant stores goes to its own bucket and comes back to its own inbox. Where an upload stands is in JetStream alone.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections import OrderedDict

from wooly_bus import subjects
from wooly_bus.app import ServiceApp
from wooly_bus.blobs import BlobStore, buckets, name_of
from wooly_bus.errors import RefusedError
from wooly_bus.streams import StreamError
from wooly_wis.messages import PIECE_BYTES, GetBlobReply, GetBlobRequest, PutBlobReply, PutBlobRequest

from wooly_router.gate import Gate

log = logging.getLogger("wooly.router")
#: Tenants whose buckets are remembered.
BUCKETS = 1000
#: Uploads that are read back at once.
AT_ONCE = 2
#: Seconds for which a bucket's size is believed.
SIZE_S = 1.0


class BlobActor:
    """Answers tenants' clients.

    Args:
        app: the connection to NATS.
        gate: who may ask.
        blob_bytes: the largest blob.
        tenant_bytes: what one tenant may keep; 0: anything.
    """

    def __init__(self, app: ServiceApp, gate: Gate, blob_bytes: int, tenant_bytes: int) -> None:
        self._app, self._gate = app, gate
        self._blob_bytes, self._tenant_bytes = blob_bytes, tenant_bytes
        self._stores: OrderedDict[str, BlobStore] = OrderedDict()
        self._sizes: dict[str, tuple[float, int]] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)
        app.serve_tenants(subjects.ROUTER_BLOB_PUT, PutBlobRequest, self.on_put_blob, queue="router")
        app.serve_tenants(subjects.ROUTER_BLOB_GET, GetBlobRequest, self.on_get_blob, queue="router")

    async def on_put_blob(self, request: PutBlobRequest, tenant: str) -> PutBlobReply:
        """Take a piece of a blob; see `PutBlobRequest`."""
        store = self._store((await self._gate.of_tenant(tenant, request.tenant)).own)
        if request.nbytes > self._blob_bytes:
            raise RefusedError("router.too_large", f"a blob has at most {self._blob_bytes} bytes")
        data = _bytes(request.data)
        whole, reached = not request.offset and len(data) == request.nbytes, request.offset + len(data)
        if len(data) > PIECE_BYTES or reached > request.nbytes:
            raise RefusedError(
                "router.bad_blob", f"a piece has at most {PIECE_BYTES} bytes, all of them {request.nbytes}"
            )
        if (not request.offset or reached == request.nbytes) and await store.has(request.digest, request.nbytes):
            return PutBlobReply(kept=True)
        await self._room_for(store, len(data) if request.offset else request.nbytes, begins=not request.offset)
        if whole:
            if name_of(data) != request.digest:
                raise RefusedError("bus.blob_corrupt", f"what was sent is not what {request.digest[:16]}… stands for")
            await store.put(data)
            return PutBlobReply(kept=True)
        if not data:
            if request.offset:
                raise RefusedError("router.bad_blob", "an empty piece cannot be appended")
            return PutBlobReply(kept=False)
        after = await store.append(request.upload, request.offset, data, request.after)
        if reached < request.nbytes:
            return PutBlobReply(kept=False, after=after)
        async with self._turn:
            await store.finish(request.digest, request.upload, request.nbytes)
        return PutBlobReply(kept=True, after=after)

    async def on_get_blob(self, request: GetBlobRequest, tenant: str) -> GetBlobReply:
        """Give a piece of a blob."""
        store = self._store((await self._gate.of_tenant(tenant, request.tenant)).own)
        size, data, after = await store.piece(request.digest, request.after)
        return GetBlobReply(nbytes=size, data=base64.b64encode(data).decode(), after=after)

    def _store(self, tenant: str) -> BlobStore:
        store = self._stores.get(tenant) or BlobStore(self._app.jetstream(), tenant)
        self._stores[tenant] = store
        self._stores.move_to_end(tenant)
        if len(self._stores) > BUCKETS:
            _, old = self._stores.popitem(last=False)
            self._sizes.pop(old.bucket, None)
        return store

    async def _room_for(self, store: BlobStore, nbytes: int, *, begins: bool) -> None:
        """Raises RefusedError where the tenant would keep too much, by what its bucket had within the last second.

        What an upload that begins will take counts from now on; its further pieces have been counted.
        """
        if not self._tenant_bytes:
            return
        now = time.monotonic()
        at, held = self._sizes.get(store.bucket, (-SIZE_S, 0))
        if now - at >= SIZE_S:
            at, held = now, await store.held()
        if held + nbytes > self._tenant_bytes:
            raise RefusedError(
                "router.blobs_full",
                f"this tenant keeps {held} bytes of blobs already, of {self._tenant_bytes} that it may",
            )
        self._sizes[store.bucket] = (at, held + nbytes if begins else held)


class AbandonedUploads:
    """Removes what was uploaded in part and given up: it counts for its tenant as long as it is there.

    Args:
        app: the connection to NATS.
        idle_s: seconds after the last piece of an upload.
    """

    def __init__(self, app: ServiceApp, idle_s: float) -> None:
        self._app, self._idle_s = app, idle_s
        #: Per bucket without any upload, its last message when it was looked at: nothing has come since.
        self._clean: dict[str, int] = {}

    async def drop(self) -> None:
        """Remove what is there now. What JetStream does not answer for is looked at the next time."""
        js = self._app.jetstream()
        try:
            for bucket, last in (await buckets(js)).items():
                if self._clean.get(bucket) == last:
                    continue
                if await BlobStore(js, "", bucket).drop_uploads(self._idle_s):
                    self._clean.pop(bucket, None)
                else:
                    self._clean[bucket] = last
        except StreamError as e:
            log.warning("uploads that were given up stay for now: %s", e)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as e:
        raise RefusedError("router.bad_blob", "data is base64") from e
