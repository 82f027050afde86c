"""Named bytes that many may read: a bucket of JetStream's object store. For artifacts, not for tensors."""

from __future__ import annotations

import asyncio

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import ObjectStoreConfig
from nats.js.errors import APIError, BucketNotFoundError, NotFoundError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

from wooly_bus.streams import StreamError, refusal, replicas

#: The bucket in which compilers leave artifacts.
ARTIFACTS = "WOOLY_ARTIFACTS"


class ArtifactStore:
    """One bucket. It is made when something is first put into it.

    Args:
        js: JetStream.
        bucket: its name.
        max_age_s: how long one is kept.
        max_bytes: of all of them.
        timeout: seconds that a transfer may take.
    """

    def __init__(
        self, js: JetStreamContext, bucket: str, *, max_age_s: float, max_bytes: int, timeout: float = 30.0
    ) -> None:
        self._js = js
        self._bucket = bucket
        self._config = ObjectStoreConfig(ttl=max_age_s, max_bytes=max_bytes, replicas=replicas())
        self._timeout = timeout

    async def get(self, name: str) -> bytes | None:
        """An artifact; None if there is none of that name.

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
        """Keep one; one of that name is replaced.

        Raises:
            StreamError: it is not known to be kept.
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
