"""Blobs in JetStream's object store: immutable, named by their digest, in one bucket per tenant, removed after `KEPT_S`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import re
import secrets
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    Header,
    ObjectInfo,
    ObjectMetaOptions,
    ObjectStoreConfig,
)
from nats.js.errors import APIError, NotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore
from wooly_wis.messages import PIECE_BYTES, GetBlobRequest, PutBlobRequest
from wooly_wis.module import hasher

from wooly_bus import contracts
from wooly_bus.contract_types import Q, R, Rpc
from wooly_bus.errors import BusError
from wooly_bus.rpc import ControlClient
from wooly_bus.streams import StreamError, refusal, replicas

#: Seconds after the last upload of a blob until it is removed.
KEPT_S = 7 * 24 * 3600.0
#: The most messages that one fetch returns.
BATCH = 64
#: Timeout of one fetch, in seconds.
SILENCE_S = 10.0
#: Seconds after which JetStream forgets a reader that fetches nothing.
READER_IDLE_S = 30.0
#: Timeout in seconds of the request for one piece. After the last piece, the router reads the whole blob back: at least so many
#: bytes per second, and for at most so many seconds.
PIECE_S, READ_BACK_RATE, READ_BACK_S = 10.0, 32 << 20, 110.0
#: Minimum seconds for which a request for a piece is repeated: the router or NATS may be started again.
PIECE_PATIENCE_S = 60.0
#: JetStream's error code for a message that does not follow the expected last message of its subject.
_WRONG_LAST_SEQUENCE = 10071


class BlobMissingError(BusError):
    """The blob does not exist, or was removed."""

    code = "bus.blob_missing"


class BlobCorruptError(BusError):
    """The bytes of a blob do not match its digest, or it is too large."""

    code = "bus.blob_corrupt"


class UploadError(BusError):
    """A piece of an upload does not follow the previous piece."""

    code = "bus.upload"


def name_of(data: bytes | bytearray | memoryview) -> str:
    """The name of a blob: the digest of its bytes, in hexadecimal digits."""
    h = hasher()
    h.update(data)
    return h.hexdigest()


def bucket_of(tenant: str) -> str:
    """Name of the bucket of a tenant's blobs. Each tenant has a different bucket."""
    plain = re.fullmatch(r"[A-Za-z0-9_]{1,64}", tenant)
    return f"WOOLY_BLOBS_{tenant}" if plain else f"WOOLY_BLOBS-{hashlib.sha256(tenant.encode()).hexdigest()}"


async def buckets(js: JetStreamContext) -> dict[str, int]:
    """The buckets of all tenants, with the sequence number of the last message that was ever stored in each.

    Raises:
        StreamError: JetStream does not answer.
    """
    found: dict[str, int] = {}
    seen = 0
    try:
        while page := await js.streams_info(offset=seen):
            seen += len(page)
            for info in page:
                name = (info.config.name or "").removeprefix("OBJ_")
                if name.startswith("WOOLY_BLOBS"):
                    found[name] = info.state.last_seq
    except (nats.errors.Error, JetStreamError, OSError) as e:
        raise StreamError(f"cannot list the buckets of blobs: {str(e) or type(e).__name__}") from e
    return found


class BlobStore:
    """The blobs of one tenant.

    Args:
        js: the JetStream context.
        tenant: the tenant.
        bucket: bucket of the tenant, if the tenant is unknown.
        most: largest number of messages in the bucket, which JetStream enforces for all writers (-1: no limit); None: do not
            change the limit. There is no limit of bytes, because JetStream would reserve that storage for each tenant.
    """

    def __init__(self, js: JetStreamContext, tenant: str, bucket: str = "", most: int | None = None) -> None:
        self._js, self._most = js, most
        self.bucket = bucket or bucket_of(tenant)
        self._store: ObjectStore | None = None

    def _failed(self, what: str, error: Exception) -> StreamError:
        """The error of a request that failed. The bucket is looked for again: its server may have lost its disk."""
        self._store = None
        return StreamError(f"{what}: {str(error) or type(error).__name__}")

    async def _open(self) -> ObjectStore:
        if self._store is None:
            try:
                self._store = await self._js.object_store(self.bucket)
            except NotFoundError:
                self._store = await self._js.create_object_store(
                    self.bucket, ObjectStoreConfig(ttl=KEPT_S, replicas=replicas())
                )
            await self._bind()
        return self._store

    async def _bind(self) -> None:
        if self._most is None:
            return
        config = (await self._js.stream_info(f"OBJ_{self.bucket}")).config
        if config.max_msgs != self._most:
            await self._js.update_stream(config.evolve(max_msgs=self._most))

    async def ready(self) -> None:
        """Create the bucket if it does not exist.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        try:
            await self._open()
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise refusal(f"bucket {self.bucket}", e) from e

    async def put(self, data: bytes | bytearray | memoryview) -> str:
        """Store bytes as a blob. Returns its name. A blob that exists is not sent again.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        name = name_of(data)
        try:
            store = await self._open()
            if await self.has(name, len(data)):
                return name
            await store.put(name, io.BytesIO(data))
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"blob {name[:16]}", e) from e
        return name

    async def has(self, name: str, size: int) -> bool:
        """Whether a blob of this name and size exists.

        Raises:
            StreamError: JetStream does not answer.
        """
        try:
            return await self.size(name) == size
        except BlobMissingError:
            return False

    async def size(self, name: str) -> int:
        """Size of a blob, in bytes.

        Raises:
            BlobMissingError: the blob does not exist.
            StreamError: JetStream does not answer.
        """
        return (await self._info(name))[1]

    async def _info(self, name: str) -> tuple[str, int]:
        try:
            info = await (await self._open()).get_info(name)
        except NotFoundError as e:
            raise BlobMissingError(
                f"this tenant has no blob {name[:16]}…; blobs are removed {KEPT_S / 86400:.0f} days after the "
                "upload; upload it again"
            ) from e
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"blob {name[:16]}", e) from e
        return str(info.nuid), int(info.size or 0)

    async def chunks(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield a blob in pieces. The last piece is yielded only if all bytes match the digest.

        Raises:
            BlobMissingError: the blob does not exist.
            BlobCorruptError: the bytes do not match the digest.
            StreamError: JetStream does not answer.
        """
        nuid, size = await self._info(name)
        h, at, last = hasher(), 0, b""
        async with contextlib.aclosing(self._kept(name, nuid, size)) as pieces:
            async for data in pieces:
                if last:
                    yield last
                last = data
                h.update(last)
                at += len(last)
        if h.hexdigest() != name or at != size:
            raise BlobCorruptError(f"the bytes of blob {name[:16]}… do not match its digest")
        if last:
            yield last

    async def _kept(self, name: str, nuid: str, size: int) -> AsyncGenerator[bytes, None]:
        """Yield the pieces that are stored under `nuid`, without verification, until they have at least `size` bytes.

        Raises:
            StreamError: JetStream does not answer, or has fewer bytes.
        """
        at = after = 0
        resumed = False
        while at < size:
            try:
                async with contextlib.aclosing(self._messages(nuid, after)) as messages:
                    async for message in messages:
                        after, resumed = int(message.metadata.sequence.stream), False
                        at += len(message.data)
                        yield message.data
                        if at >= size:
                            break
            except (TimeoutError, nats.errors.Error, JetStreamError, OSError) as e:
                # JetStream removes the consumer of a reader that takes nothing for a while, e.g. because its device is busy
                if resumed:
                    raise StreamError(
                        f"blob {name[:16]}: {str(e) or type(e).__name__} after {at} of {size} bytes"
                    ) from e
                resumed = True

    async def _messages(self, nuid: str, after: int) -> AsyncGenerator[Msg, None]:
        """Yield the messages that are stored under `nuid`, without end, from the first one after a sequence number."""
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=READER_IDLE_S,
            mem_storage=True,
        )
        subscription = await self._js.pull_subscribe(self._pieces_of(nuid), stream=f"OBJ_{self.bucket}", config=config)
        try:
            while True:
                for message in await subscription.fetch(BATCH, timeout=SILENCE_S):
                    yield message
        finally:
            await subscription.unsubscribe()

    def _pieces_of(self, nuid: str) -> str:
        return f"$O.{self.bucket}.C.{nuid}"

    async def get(self, name: str, limit: int) -> bytes:
        """Read a whole blob of at most `limit` bytes; see `chunks`.

        Raises:
            BlobCorruptError: the blob is larger, or its bytes do not match its digest.
        """
        size = await self.size(name)
        if size > limit:
            raise BlobCorruptError(f"blob {name[:16]}… has {size} bytes; the limit is {limit}")
        return b"".join([chunk async for chunk in self.chunks(name)])

    # -- piece by piece, for clients without JetStream ------------------------------------------------------------------

    async def held(self) -> tuple[int, int]:
        """Bytes and messages of the whole bucket. A blob has two messages, and one more for each piece after the first.

        Raises:
            StreamError: JetStream does not answer.
        """
        try:
            await self._open()
            state = (await self._js.stream_info(f"OBJ_{self.bucket}")).state
            return int(state.bytes), int(state.messages)
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"bucket {self.bucket}", e) from e

    async def append(self, upload: str, offset: int, data: bytes, after: int) -> int:
        """Store the next piece of an upload. Returns its sequence number. A repeated call changes nothing.

        Args:
            upload: id of the upload.
            offset: position of the piece in the blob, in bytes.
            data: the piece.
            after: sequence number of the previous piece; 0 for the first piece.

        Raises:
            UploadError: the last piece of the upload is not `after`.
            StreamError: JetStream does not answer, or refuses.
        """
        headers = {"Nats-Msg-Id": f"{upload}:{offset}", Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(after)}
        try:
            await self._open()
            return int((await self._js.publish(self._pieces_of(upload), data, headers=headers)).seq)
        except APIError as e:
            if e.err_code == _WRONG_LAST_SEQUENCE:
                return await self._appended(upload, headers["Nats-Msg-Id"], after)
            raise self._failed(f"upload {upload}", e) from e
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"upload {upload}", e) from e

    async def _appended(self, upload: str, id: str, after: int) -> int:
        """The sequence number of the last piece if its id is `id`: then the piece was stored, and only the answer was lost."""
        try:
            last = await self._js.get_last_msg(f"OBJ_{self.bucket}", self._pieces_of(upload))
        except NotFoundError:
            last = None
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"upload {upload}", e) from e
        if last is None or (last.headers or {}).get("Nats-Msg-Id") != id:
            raise UploadError(f"piece {id} of the upload does not follow piece {after}; begin the upload again")
        return int(last.seq or 0)

    async def finish(self, name: str, upload: str, size: int) -> None:
        """Read the pieces of an upload back, and make a blob of them. If they do not match the digest, remove them.

        Raises:
            BlobCorruptError: the pieces do not match the digest.
            StreamError: JetStream does not answer, or refuses.
        """
        ours, theirs, at, count = hasher(), hashlib.sha256(), 0, 0
        async for data in self._kept(name, upload, size):
            for h in (ours, theirs):  # other clients of the object store check SHA-256
                h.update(data)
            at, count = at + len(data), count + 1
        if ours.hexdigest() != name or at != size:
            await self.drop(upload)
            raise BlobCorruptError(f"the uploaded bytes do not match the digest {name[:16]}…; upload the blob again")
        await self.seal(name, upload, at, count, theirs.digest())

    async def drop(self, upload: str) -> None:
        """Remove the pieces of an upload.

        Raises:
            StreamError: JetStream does not answer.
        """
        try:
            await self._js.purge_stream(f"OBJ_{self.bucket}", subject=self._pieces_of(upload))
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"upload {upload}", e) from e

    async def seal(self, name: str, upload: str, size: int, count: int, sha256: bytes) -> None:
        """Make a blob of an upload whose pieces are known to match the digest.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        options = ObjectMetaOptions(max_chunk_size=PIECE_BYTES)
        info = ObjectInfo(name, self.bucket, upload, size, datetime.now(UTC).isoformat(), count, options=options)
        info.digest = f"SHA-256={base64.urlsafe_b64encode(sha256).decode()}"
        try:
            about = f"$O.{self.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
            await self._js.publish(about, json.dumps(info.as_dict()).encode(), headers={Header.ROLLUP: "sub"})
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"blob {name[:16]}", e) from e

    async def drop_uploads(self, idle_s: float) -> int:
        """Remove unfinished uploads that got no piece for `idle_s` seconds. Returns the number of the other unfinished uploads.

        Raises:
            StreamError: JetStream does not answer.
        """
        stream, before, left = f"OBJ_{self.bucket}", datetime.now(UTC) - timedelta(seconds=idle_s), 0
        try:
            store = await self._open()
            # List the pieces before the blobs: an upload that becomes a blob in between is then in the second list.
            state = (await self._js.stream_info(stream, subjects_filter=self._pieces_of("*"))).state
            uploads = {subject.rpartition(".")[2] for subject in state.subjects or ()}
            with contextlib.suppress(NotFoundError):  # the bucket has no blobs
                uploads -= {str(info.nuid) for info in await store.list(ignore_deletes=True)}
            for upload in sorted(uploads):
                try:
                    last = await self._js.get_last_msg(stream, self._pieces_of(upload))
                except NotFoundError:
                    continue
                if last.time is None or last.time > before:
                    left += 1
                else:
                    await self._js.purge_stream(stream, subject=self._pieces_of(upload))
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"bucket {self.bucket}", e) from e
        return left

    async def piece(self, name: str, after: int) -> tuple[int, bytes, int]:
        """Read the part of a blob after a sequence number, without verification.

        Args:
            name: name of the blob.
            after: sequence number of the last piece that the caller has; 0: start at the beginning.

        Returns:
            The size of the blob, the bytes, and the sequence number for the next call.

        Raises:
            BlobMissingError: the blob does not exist.
            StreamError: JetStream does not answer.
        """
        nuid, size = await self._info(name)
        parts: list[bytes] = []
        length = largest = 0
        try:
            while length < size and length + largest <= PIECE_BYTES:
                try:
                    found = await self._js.get_msg(
                        f"OBJ_{self.bucket}", after + 1, subject=self._pieces_of(nuid), next=True
                    )
                except NotFoundError:
                    break
                parts.append(found.data or b"")
                after, largest = int(found.seq or 0), max(largest, len(parts[-1]))
                length += len(parts[-1])
        except (nats.errors.Error, JetStreamError, OSError) as e:
            raise self._failed(f"blob {name[:16]}", e) from e
        return size, b"".join(parts), after


class Upload:
    """An upload whose digest is known only at its end. At most one piece of it is in memory.

    Args:
        store: the store of the blob.

    Attributes:
        size: bytes stored so far.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store, self._id = store, secrets.token_hex(16)
        self._ours, self._theirs = hasher(), hashlib.sha256()
        self._buffer, self._after, self._count = bytearray(), 0, 0
        self.size = 0

    async def add(self, data: bytes) -> None:
        """Add the next bytes.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        self._buffer += data
        while len(self._buffer) >= PIECE_BYTES:
            await self._append(bytes(self._buffer[:PIECE_BYTES]))
            del self._buffer[:PIECE_BYTES]

    async def _append(self, piece: bytes) -> None:
        self._after = await self._store.append(self._id, self.size, piece, self._after)
        for h in (self._ours, self._theirs):
            h.update(piece)
        self.size, self._count = self.size + len(piece), self._count + 1

    async def finish(self) -> str:
        """Finish the upload. Returns the name of the blob.

        Raises:
            StreamError: JetStream does not answer, or refuses.
        """
        if not self._count:
            self.size = len(self._buffer)
            return await self._store.put(self._buffer)
        if self._buffer:
            await self._append(bytes(self._buffer))
        name = self._ours.hexdigest()
        if await self._store.has(name, self.size):
            await self.abandon()
        else:
            await self._store.seal(name, self._id, self.size, self._count, self._theirs.digest())
        return name

    async def abandon(self) -> None:
        """Remove the stored pieces. If JetStream does not answer, the leading router removes them later (`drop_uploads`)."""
        if self._count:
            with contextlib.suppress(StreamError):
                await self._store.drop(self._id)


async def put_all(store: BlobStore, blobs: list[bytes | memoryview], concurrency: int = 4) -> list[str]:
    """Store several blobs, `concurrency` at a time. Returns their names in order."""
    turn = asyncio.Semaphore(concurrency)

    async def one(data: bytes | memoryview) -> str:
        async with turn:
            return await store.put(data)

    return list(await asyncio.gather(*[one(b) for b in blobs]))


class AskedBlobs:
    """The blobs of a tenant, through requests to the router: for a tenant's client, which may not use JetStream.

    Args:
        control: a connection with the credentials of the tenant.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def put(self, data: bytes | bytearray | memoryview) -> str:
        """Store bytes as a blob. Returns its name. A blob that exists is not sent again.

        Raises:
            BusError: the router refuses, or no router answers.
        """
        view = memoryview(data).cast("B")
        name, size = name_of(view), len(view)
        upload, offset, after = secrets.token_hex(16), 0, 0
        piece = view if size <= PIECE_BYTES else view[:0]  # first ask with no bytes whether a large blob exists already
        while True:
            request = PutBlobRequest(
                digest=name,
                nbytes=size,
                upload=upload,
                offset=offset,
                after=after,
                data=base64.b64encode(piece).decode(),
            )
            last = offset + len(piece) == size
            timeout = PIECE_S + (min(size / READ_BACK_RATE, READ_BACK_S) if last else 0.0)
            reply = self._ask(contracts.ROUTER_BLOB_PUT, request, timeout)
            if reply.kept:
                return name
            offset, after = offset + len(piece), reply.after
            piece = view[offset : offset + PIECE_BYTES]

    def _ask(self, rpc: Rpc[Q, R], request: Q, timeout: float) -> R:
        """Ask again if an answer is lost, also if it may take long."""
        patience_s = max(PIECE_PATIENCE_S, 2 * timeout)
        return self._control.request_until_answered(rpc, request, timeout=timeout, patience_s=patience_s)

    def get(self, name: str, limit: int) -> bytearray:
        """Read a whole blob of at most `limit` bytes.

        Raises:
            BlobCorruptError: the blob is larger, or its bytes do not match its digest.
            BusError: the blob does not exist, or no router answers.
        """
        found, after = bytearray(), 0
        while True:
            request = GetBlobRequest(digest=name, after=after)
            reply = self._ask(contracts.ROUTER_BLOB_GET, request, PIECE_S)
            if reply.nbytes > limit:
                raise BlobCorruptError(f"blob {name[:16]}… has {reply.nbytes} bytes; the limit is {limit}")
            data = base64.b64decode(reply.data)
            found += data
            after = reply.after
            if len(found) >= reply.nbytes or not data:
                break
        if len(found) != reply.nbytes or name_of(found) != name:
            raise BlobCorruptError(f"the bytes of blob {name[:16]}… do not match its digest")
        return found
