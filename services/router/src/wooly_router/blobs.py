"""Blobs of tenants, whose credentials have no JetStream: put and read in pieces, each a request that any router answers.

What a tenant stores goes to its own bucket and comes back to its own inbox. Where an upload stands is in JetStream alone.
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
#: Tenants whose buckets are remembered.
BUCKETS = 1000
#: Uploads that are read back at once.
AT_ONCE = 2
#: Seconds for which a bucket's size is believed.
SIZE_S = 1.0


@dataclass(slots=True)
class _Held:
    """What a bucket had at a time, and what uploads that began and pieces that came since will add."""

    at: float
    nbytes: int
    pieces: int
    begun: int = 0
    came: int = 0


class TenantBlobs:
    """The buckets of all tenants, and what each tenant may keep in its own; over NATS and REST alike.

    Args:
        app: the connection to NATS.
        settings: limits.
    """

    def __init__(self, app: ServiceApp, settings: RouterSettings) -> None:
        self._app, self._settings = app, settings
        self._bytes, self._pieces = settings.tenant_blob_bytes, settings.tenant_blob_pieces
        #: What JetStream enforces, for all routers and whoever puts: a little more, for results of jobs that run already.
        self._most = self._pieces + self._pieces // 8 or -1
        self._stores: OrderedDict[str, BlobStore] = OrderedDict()
        self._held: dict[str, _Held] = {}
        self._transfers: Counter[str] = Counter()

    def store(self, tenant: str) -> BlobStore:
        """A tenant's bucket."""
        store = self._stores.get(tenant) or BlobStore(self._app.jetstream(), tenant, most=self._most)
        self._stores[tenant] = store
        self._stores.move_to_end(tenant)
        if len(self._stores) > BUCKETS:
            _, old = self._stores.popitem(last=False)
            self._held.pop(old.bucket, None)
        return store

    async def room_for(self, tenant: str, nbytes: int, *, begins: bool) -> None:
        """Whether a tenant may put so many bytes more, by what its bucket had within the last second and what came since.

        All that an upload will take counts when it begins, so that several at the same time do not count on the same room; its
        pieces are counted again as they come, by themselves. Several routers may together let in what comes within a second.

        Raises:
            LimitError: it may not.
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
                    f"tenant {tenant} keeps {kept} {what} already, of {limit} that it may (WOOLY_ROUTER_{setting}), and "
                    f"{more} more were to come; blobs go {KEPT_S / 86400:.0f} days after they were put"
                )
        if begins:
            held.begun += nbytes
        else:
            held.came += nbytes
            held.pieces += 1

    @contextlib.contextmanager
    def transfer(self, tenant: str) -> Iterator[None]:
        """One blob of a tenant's is put or read over REST inside the block.

        Raises:
            LimitError: so many are under way.
        """
        most = self._settings.tenant_transfers
        if self._transfers[tenant] >= most:
            raise LimitError(
                f"tenant {tenant} puts or reads {self._transfers[tenant]} blobs over REST on this router, and may {most} at a "
                "time (WOOLY_ROUTER_TENANT_TRANSFERS); wait for one of them",
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
        gate: who may ask.
        blobs: the tenants' buckets.
        blob_bytes: the largest blob.
    """

    def __init__(self, app: ServiceApp, gate: Gate, blobs: TenantBlobs, blob_bytes: int) -> None:
        self._gate, self._blobs, self._blob_bytes = gate, blobs, blob_bytes
        self._turn = asyncio.Semaphore(AT_ONCE)
        app.serve_tenants(contracts.ROUTER_BLOB_PUT, self.on_put_blob)
        app.serve_tenants(contracts.ROUTER_BLOB_GET, self.on_get_blob)

    async def on_put_blob(self, request: PutBlobRequest, tenant: str) -> PutBlobReply:
        """Take a piece of a blob; see `PutBlobRequest`."""
        own = (await self._gate.of_tenant(tenant, request.tenant)).own
        store = self._blobs.store(own)
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
        taken = len(data) if request.offset else request.nbytes
        await self._blobs.room_for(own, taken, begins=not request.offset)
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
        store = self._blobs.store((await self._gate.of_tenant(tenant, request.tenant)).own)
        size, data, after = await store.piece(request.digest, request.after)
        return GetBlobReply(nbytes=size, data=base64.b64encode(data).decode(), after=after)


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
