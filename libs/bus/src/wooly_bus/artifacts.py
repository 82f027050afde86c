"""Named byte strings in a bucket of JetStream's object store, shared by many readers. For artifacts, not for tensors."""

from __future__ import annotations

import asyncio

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import ObjectStoreConfig
from nats.js.errors import APIError, BucketNotFoundError, NotFoundError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

from wooly_bus.streams import StreamError, refusal, replicas

#: The bucket in which compilers store artifacts.
ARTIFACTS = "WOOLY_ARTIFACTS"


class ArtifactStore:
    """One bucket of artifacts. The first `put` creates the bucket.

    Args:
        js: the JetStream context.
        bucket: name of the bucket.
        max_age_s: seconds after which an artifact is removed.
        max_bytes: largest total size of the artifacts, in bytes.
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
            StreamError: JetStream did not confirm the artifact.
        """
        try:
            async with asyncio.timeout(self._timeout):
                store = await self._made()
                await store.put(name, data)
        except (nats.errors.Error, JetStreamError, OSError, TimeoutError) as e:
            raise StreamError(f"artifact {name} of {self._bucket}: {str(e) or type(e).__name__}") from e

    async def _made(self) -> ObjectStore:
        try:
            return await self._js.object_store(self._bucket)
        except (BucketNotFoundError, NotFoundError):
            try:
                return await self._js.create_object_store(self._bucket, config=self._config)
            except APIError as e:
                raise refusal(f"bucket {self._bucket}", e) from e
