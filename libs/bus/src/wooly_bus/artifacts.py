"""Named byte strings in a bucket of JetStream's object store, shared by many readers. For artifacts, not for tensors."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import ObjectStoreConfig
from nats.js.errors import APIError, BucketNotFoundError, NotFoundError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

from wooly_bus.streams import MIN_BYTES, StreamError, refusal, replicas, reserve

log = logging.getLogger("wooly.bus")
#: The bucket in which compilers store artifacts.
ARTIFACTS = "WOOLY_ARTIFACTS"
#: JetStream's error code for a message that does not fit into its stream.
_FULL: Final = 10077


class ArtifactStore:
    """One bucket of artifacts. The first `put` creates the bucket. If the bucket is full, `put` removes the oldest artifacts.

    Args:
        js: the JetStream context.
        bucket: name of the bucket.
        max_age_s: seconds after which an artifact is removed.
        max_bytes: largest total size of the artifacts, in bytes. JetStream reserves that storage. If it has less, the bucket
            gets the half, the quarter, and so on.
        timeout: longest duration of a transfer, in seconds.
    """

    def __init__(
        self, js: JetStreamContext, bucket: str, *, max_age_s: float, max_bytes: int, timeout: float = 30.0
    ) -> None:
        self._js = js
        self._bucket = bucket
        self._config = ObjectStoreConfig(ttl=max_age_s, max_bytes=max_bytes, replicas=replicas())
        self._timeout = timeout

    async def get(self, name: str) -> bytes | None:
        """Read an artifact. Returns None if the bucket has no artifact of this name.

        Raises:
            StreamError: JetStream does not answer.
        """
        try:
            async with asyncio.timeout(self._timeout):
                store = await self._js.object_store(self._bucket)
                found = await store.get(name)
        except (ObjectNotFoundError, BucketNotFoundError, NotFoundError):
            return None
        except (nats.errors.Error, JetStreamError, OSError, TimeoutError) as e:
            raise StreamError(f"artifact {name} of {self._bucket}: {str(e) or type(e).__name__}") from e
        return bytes(found.data or b"")

    async def put(self, name: str, data: bytes) -> None:
        """Store an artifact; it replaces an artifact of the same name.

        Raises:
            StreamError: JetStream did not confirm the artifact, or the artifact is larger than the bucket.
        """
        try:
            async with asyncio.timeout(self._timeout):
                store = await self._made()
                try:
                    await store.put(name, data)
                except APIError as e:
                    if e.err_code != _FULL:
                        raise
                    await self._remove_oldest(store)
                    await store.put(name, data)
        except (nats.errors.Error, JetStreamError, OSError, TimeoutError) as e:
            raise StreamError(f"artifact {name} of {self._bucket}: {str(e) or type(e).__name__}") from e

    async def _made(self) -> ObjectStore:
        try:
            return await self._js.object_store(self._bucket)
        except (BucketNotFoundError, NotFoundError):
            return await self._create()

    async def _create(self) -> ObjectStore:
        """Create the bucket, as large as JetStream's free storage allows.

        Raises:
            StreamError: JetStream refuses even the smallest bucket.
        """
        wanted = self._config.max_bytes or 0
        try:
            return await reserve(
                self._js,
                f"OBJ_{self._bucket}",
                wanted,
                min(MIN_BYTES, wanted),
                lambda size: self._js.create_object_store(self._bucket, config=replace(self._config, max_bytes=size)),
            )
        except APIError as e:
            raise refusal(f"bucket {self._bucket}", e) from e

    async def _remove_oldest(self, store: ObjectStore) -> None:
        """Remove artifacts until half of the bytes are free, those first that were stored first."""
        found = sorted(await store.list(ignore_deletes=True), key=lambda kept: kept.mtime or "")
        left = sum([kept.size or 0 for kept in found]) // 2
        for kept in found:
            if left <= 0:
                break
            left -= kept.size or 0
            await store.delete(kept.name)
        log.info("bucket %s was full: the oldest artifacts were removed", self._bucket)
