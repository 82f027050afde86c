"""Blobs of tenants without JetStream: clients put and read them in pieces, and any router answers the request for a piece.

A tenant's data goes to its own bucket and returns to its own inbox. Only JetStream stores how far an upload is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.blobs import KEPT_S, BlobStore, buckets, name_of
from wooly_bus.errors import RefusedError
from wooly_bus.streams import StreamError
from wooly_wis.messages import PIECE_BYTES, GetBlobReply, GetBlobRequest, PutBlobReply, PutBlobRequest

from wooly_router.gate import Gate
from wooly_router.limits import LimitError
from wooly_router.settings import RouterSettings

log = logging.getLogger("wooly.router")
#: Maximum number of tenants whose buckets are remembered.
MAX_BUCKETS = 1000
#: Maximum number of finished uploads that are read back for verification at the same time.
MAX_CHECKS = 2
#: Seconds for which a measured bucket size is used.
SIZE_S = 1.0


@dataclass(slots=True)
class _Held:
    """The measured size of a bucket, and what started uploads and received pieces have added since."""

    at: float
    nbytes: int
    pieces: int
    begun: int = 0
    came: int = 0


class TenantBlobs:
    """The buckets of all tenants, and their quotas; for NATS and REST.

    Args:
        app: the connection to NATS.
        settings: limits.
    """

    def __init__(self, app: ServiceApp, settings: RouterSettings) -> None:
        self._app, self._settings = app, settings
        self._bytes, self._pieces = settings.tenant_blob_bytes, settings.tenant_blob_pieces
        #: The limit that JetStream enforces over all routers. It is an eighth higher, to leave room for results of running
        #: jobs.
        self._most = self._pieces + self._pieces // 8 or -1
        self._stores: OrderedDict[str, BlobStore] = OrderedDict()
        self._held: dict[str, _Held] = {}
        self._transfers: Counter[str] = Counter()

    def store(self, tenant: str) -> BlobStore:
        """Return a tenant's bucket."""
        store = self._stores.get(tenant) or BlobStore(self._app.jetstream(), tenant, most=self._most)
        self._stores[tenant] = store
        self._stores.move_to_end(tenant)
        if len(self._stores) > MAX_BUCKETS:
            _, old = self._stores.popitem(last=False)
            self._held.pop(old.bucket, None)
        return store

    async def room_for(self, tenant: str, nbytes: int, *, begins: bool) -> None:
        """Check that a tenant may put `nbytes` more, based on the bucket's size within the last second and on later additions.

        An upload counts with its full size when it begins, so that simultaneous uploads do not use the same room. Its pieces
        are counted again, separately, as they arrive. Several routers together may exceed the quota by what arrives within a
        second.

        Raises:
            LimitError: the quota would be exceeded.
        """
        if not self._bytes and not self._pieces:
            return
        store, now = self.store(tenant), time.monotonic()
        held = self._held.get(store.bucket)
        if held is None or now - held.at >= SIZE_S:
            held = self._held[store.bucket] = _Held(now, *await store.held())
        since = held.begun if begins else held.came
        for kept, more, limit, what, setting in (
            (held.nbytes + since, nbytes, self._bytes, "bytes of blobs", "TENANT_BLOB_BYTES"),
            (held.pieces, 1, self._pieces, "pieces of blobs", "TENANT_BLOB_PIECES"),
        ):
            if limit and kept + more > limit:
                raise LimitError(
                    f"tenant {tenant} keeps {kept} of {limit} {what} (WOOLY_ROUTER_{setting}), and {more} more would exceed "
                    f"the quota; blobs are removed {KEPT_S / 86400:.0f} days after they were put"
                )
        if begins:
            held.begun += nbytes
        else:
            held.came += nbytes
            held.pieces += 1

    @contextlib.contextmanager
    def transfer(self, tenant: str) -> Iterator[None]:
        """Count one blob transfer of a tenant over REST inside the block.

        Raises:
            LimitError: the tenant has reached its limit of transfers.
        """
        most = self._settings.tenant_transfers
        if self._transfers[tenant] >= most:
            raise LimitError(
                f"tenant {tenant} puts or reads {self._transfers[tenant]} blobs over REST on this router, and the limit is "
                f"{most} at a time (WOOLY_ROUTER_TENANT_TRANSFERS); wait for one of them",
                retry_s=1.0,
            )
        self._transfers[tenant] += 1
        try:
            yield
        finally:
            self._transfers[tenant] -= 1
            if not self._transfers[tenant]:
                del self._transfers[tenant]


class BlobActor:
    """Answers tenants' clients over NATS.

    Args:
        app: the connection to NATS.
        gate: authorizes callers.
        blobs: the tenants' buckets.
        blob_bytes: the largest blob, in bytes.
    """

    def __init__(self, app: ServiceApp, gate: Gate, blobs: TenantBlobs, blob_bytes: int) -> None:
        self._gate, self._blobs, self._blob_bytes = gate, blobs, blob_bytes
        self._turn = asyncio.Semaphore(MAX_CHECKS)
        app.serve_tenants(contracts.ROUTER_BLOB_PUT, self.on_put_blob)
        app.serve_tenants(contracts.ROUTER_BLOB_GET, self.on_get_blob)

    async def on_put_blob(self, request: PutBlobRequest, tenant: str) -> PutBlobReply:
        """Store a piece of a blob; see `PutBlobRequest`."""
        own = (await self._gate.of_tenant(tenant, request.tenant)).own
        store = self._blobs.store(own)
        if request.nbytes > self._blob_bytes:
            raise RefusedError(
                "router.too_large",
                f"the blob has {request.nbytes} bytes, and the limit is {self._blob_bytes} (WOOLY_ROUTER_BLOB_BYTES)",
            )
        data = _bytes(request.data)
        whole, reached = not request.offset and len(data) == request.nbytes, request.offset + len(data)
        if len(data) > PIECE_BYTES or reached > request.nbytes:
            raise RefusedError(
                "router.bad_blob",
                f"the piece of {len(data)} bytes at offset {request.offset} is too large: a piece has at most {PIECE_BYTES} "
                f"bytes, and the blob has {request.nbytes}",
            )
        if (not request.offset or reached == request.nbytes) and await store.has(request.digest, request.nbytes):
            return PutBlobReply(kept=True)
        taken = len(data) if request.offset else request.nbytes
        await self._blobs.room_for(own, taken, begins=not request.offset)
        if whole:
            if name_of(data) != request.digest:
                raise RefusedError("bus.blob_corrupt", f"the data does not match its digest {request.digest[:16]}…")
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
        """Return a piece of a blob."""
        store = self._blobs.store((await self._gate.of_tenant(tenant, request.tenant)).own)
        size, data, after = await store.piece(request.digest, request.after)
        return GetBlobReply(nbytes=size, data=base64.b64encode(data).decode(), after=after)


class AbandonedUploads:
    """Removes abandoned uploads, because they count against their tenant's quota.

    Args:
        app: the connection to NATS.
        idle_s: seconds without a new piece after which an upload is abandoned.
    """

    def __init__(self, app: ServiceApp, idle_s: float) -> None:
        self._app, self._idle_s = app, idle_s
        #: By bucket without unfinished uploads, its last message at the last check. If it is unchanged, the bucket is skipped.
        self._clean: dict[str, int] = {}

    async def drop(self) -> None:
        """Remove abandoned uploads. If JetStream does not answer, the next call tries again."""
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
            log.warning("abandoned uploads could not be removed: %s; trying again later", e)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as e:
        raise RefusedError("router.bad_blob", "the field data is not valid base64") from e
