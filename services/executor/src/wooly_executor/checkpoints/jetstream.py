"""Objects in JetStream for `objects`: `nats://host:port/BUCKET/prefix`.

The paths are keys of the key-value bucket BUCKET, with `.` in place of `/`, so the server can list the keys below a path. A small
content is the value of its key. A large content is in the object store BUCKET, under the name of its key; it is stored before the
key and removed after the key. An executor that dies in between leaves an object without a key, which `sweep` removes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, ObjectStoreConfig
from nats.js.errors import NoStreamResponseError, NotFoundError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore
from wooly_bus.access import Access, Shows, options
from wooly_bus.nats_client import NOTICING, NatsClient
from wooly_bus.streams import replicas
from wooly_bus.supervision import start_thread

log = logging.getLogger("wooly.executor")
T = TypeVar("T")
#: Maximum bytes of a value in the key-value bucket. A message of NATS has at most 1 MiB by default.
SMALL = 64 << 10
#: Maximum seconds of one request, and of a new connection; and for the end of the connection and of what is under way.
TIMEOUT_S, CONNECT_S, END_S = 60.0, 10.0, 1.0
#: The bucket of a URL that names none.
BUCKET = "WOOLY_CHECKPOINTS"
_HERE, _OBJECT = b"\0", b"\1"


class JetStreamFiles:
    """Has the methods of a file system of fsspec that `objects` uses. Any thread may call it.

    Args:
        url: URL of a NATS server, with a bucket and a prefix as its path. Credentials are those of all services.

    Raises:
        ValueError: the URL has no host.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError("the URL has no host; write nats://host:4222/BUCKET")
        bucket, _, prefix = parts.path.strip("/").partition("/")
        self._bucket, self.root = bucket or BUCKET, prefix or "checkpoints"
        self._access = Access.of_service(f"{parts.scheme}://{parts.netloc}")
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: tuple[JetStreamContext, KeyValue, ObjectStore] | None = None
        self._last_error = ""

    # -- requests ----------------------------------------------------------------------------------------------------

    def pipe_file(self, path: str, data: bytes) -> None:
        """Store an object."""
        self._run(self._put(_key(path), data))

    def cat_file(self, path: str) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: it does not exist.
        """
        return self._run(self._get(_key(path)))

    def find(self, folder: str) -> list[str]:
        """The paths of all objects below a path."""
        keys = self._run(self._keys(_key(folder)))
        return [folder + "/" + key[len(folder) + 1 :].replace(".", "/") for key in keys]

    def rm(self, paths: Sequence[str]) -> None:
        """Remove objects. An object that does not exist is not an error."""
        for path in paths:
            self._run(self._remove(_key(path)))

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        self.rm([path])

    def sweep(self, before: float) -> None:
        """Remove contents without a key that were stored before a time."""
        self._run(self._sweep(before))

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            loop, self._loop, self._opened = self._loop, None, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    # -- in the event loop -------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                start_thread(self._serve, "wooly-checkpoints")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(TIMEOUT_S)
        except TimeoutError as e:
            running.cancel()
            raise TimeoutError(f"no answer within {TIMEOUT_S:g} s") from e

    def _serve(self) -> None:
        loop = self._loop
        assert loop is not None
        self._connecting = asyncio.Lock()
        self._client: Client | None = None
        loop.run_forever()
        loop.run_until_complete(self._end())
        loop.close()

    async def _end(self) -> None:
        """Close the connection, and end what is under way: a request that timed out may still wait for its connection."""
        if self._client is not None:
            with contextlib.suppress(Exception):  # the server may be gone
                await asyncio.wait_for(self._client.close(), END_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            if not task.cancelling():
                task.cancel()
        if left:
            await asyncio.wait(left, timeout=END_S)

    async def _open(self) -> tuple[JetStreamContext, KeyValue, ObjectStore]:
        async with self._connecting:
            if self._client is None or self._client.is_closed:  # for good, because its credentials expired
                self._client, self._opened = await self._connected(), None
            if self._opened is None:
                js = self._client.jetstream(timeout=20.0)
                self._opened = js, await self._values(js), await self._objects(js)
        return self._opened

    async def _connected(self) -> Client:
        more: dict[str, Any] = options(None, self._access.tls())
        if self._access.credentials is not None:
            shows, held = Shows(self._access.credentials), self._access.credentials()
            more |= {"user_jwt_cb": shows.jwt, "signature_cb": shows.signature, "inbox_prefix": held.inbox}
        client = NatsClient()
        connecting = client.connect(
            self._access.servers,
            name="wooly-checkpoints",
            connect_timeout=5,
            max_reconnect_attempts=-1,  # NATS may be away for long
            reconnect_time_wait=1,
            **NOTICING,
            error_cb=self._on_error,
            **more,
        )
        try:
            await asyncio.wait_for(connecting, CONNECT_S)
        except BaseException:
            with contextlib.suppress(Exception):  # it has no connection
                await client.close()
            raise
        return client

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._last_error:  # it repeats each second while NATS is unreachable
            log.warning("NATS of the checkpoints at %s: %s", self._access, text)
        self._last_error = text

    async def _values(self, js: JetStreamContext) -> KeyValue:
        try:
            return await js.key_value(self._bucket)
        except NotFoundError:
            return await js.create_key_value(KeyValueConfig(self._bucket, replicas=replicas()))

    async def _objects(self, js: JetStreamContext) -> ObjectStore:
        try:
            return await js.object_store(self._bucket)
        except NotFoundError:
            return await js.create_object_store(self._bucket, config=ObjectStoreConfig(replicas=replicas()))

    async def _put(self, key: str, data: bytes) -> None:
        _, values, objects = await self._open()
        try:
            if len(data) <= SMALL:
                await values.put(key, _HERE + data)
            else:
                await objects.put(key, data)
                await values.put(key, _OBJECT)
        except (NotFoundError, NoStreamResponseError):
            self._opened = None  # the server has lost its disk, and the buckets with it: make them anew
            raise

    async def _get(self, key: str) -> bytes:
        _, values, objects = await self._open()
        try:
            value = (await values.get(key)).value or b""
            if value[:1] == _HERE:
                return value[1:]
            return (await objects.get(key)).data or b""
        except NotFoundError as e:
            raise FileNotFoundError(key) from e

    async def _keys(self, folder: str) -> list[str]:
        """The keys below a key, as the stream's leader knows them now: a page at a time."""
        await self._open()
        assert self._client is not None
        stream, prefix = f"KV_{self._bucket}", f"$KV.{self._bucket}."
        found: list[str] = []
        while True:
            asked = {"subjects_filter": f"{prefix}{folder}.>", "offset": len(found)}
            reply = await self._client.request(f"$JS.API.STREAM.INFO.{stream}", json.dumps(asked).encode(), timeout=20)
            info = json.loads(reply.data)
            if "error" in info:
                raise OSError(f"the stream {stream}: {info['error'].get('description')}")
            page = [subject[len(prefix) :] for subject in info["state"].get("subjects") or {}]
            found += page
            if not page or len(found) >= info.get("total", 0):
                return found

    async def _remove(self, key: str) -> None:
        js, values, _ = await self._open()
        try:
            large = (await values.get(key)).value == _OBJECT
        except NotFoundError:
            return
        # Purged, because a deletion would leave a marker for ever.
        await js.purge_stream(f"KV_{self._bucket}", subject=f"$KV.{self._bucket}.{key}")
        if large:
            await self._remove_object(key)

    async def _remove_object(self, key: str) -> None:
        js, _, objects = await self._open()
        with contextlib.suppress(NotFoundError):
            await objects.delete(key)
        name = base64.urlsafe_b64encode(key.encode()).decode()
        await js.purge_stream(f"OBJ_{self._bucket}", subject=f"$O.{self._bucket}.M.{name}")

    async def _sweep(self, before: float) -> None:
        _, _, objects = await self._open()
        known = set(await self._keys(_key(self.root)))
        with contextlib.suppress(NotFoundError):
            for info in await objects.list(ignore_deletes=True):
                stored = datetime.datetime.fromisoformat(info.mtime or "").timestamp()
                if info.name.startswith(f"{_key(self.root)}.") and info.name not in known and stored < before:
                    await self._remove_object(info.name)


def _key(path: str) -> str:
    return path.replace("/", ".")
