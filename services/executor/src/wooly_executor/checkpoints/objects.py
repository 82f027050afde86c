"""Checkpoints in an object store: through fsspec (`s3://bucket/prefix`, `gs://`, `abfs://`, `memory://` and others), or in
JetStream (`nats://`, see `jetstream`).

    <root>/[key-<id>/]<tenant>/sessions/<session>/cut-<number>           the list of a cut
    <root>/[key-<id>/]<tenant>/sessions/<session>/open-<time>            the session was open at this time
    <root>/[key-<id>/]<tenant>/chunks/<name>/data-<time>-<random>        the bytes of a chunk
    <root>/[key-<id>/]<tenant>/chunks/<name>/ref-<session>-<time>        a session has the chunk
    <root>/[key-<id>/]<tenant>/chunks/<name>/gone-<time>-<random>        an executor is removing the chunk

An object store has no hard links and no transactions. The objects `ref` and `gone` replace them, with two rules:

- An executor that keeps a chunk first stores a `ref`, then lists the chunk. If the list has `data` and no `gone`, the executor
  uses this data. Otherwise it stores the data again, under a new name.
- An executor that removes a chunk first stores a `gone`, then lists the chunk. If the list has no `ref`, the executor removes the
  data in this list. At the end it removes its `gone`.

If two executors do this at the same time, at least one of them sees the object of the other, in any order of the steps. This
needs a store whose lists show all objects that were stored before (as in S3, GCS, Azure and JetStream). `sweep` removes what dead
executors left, when it is older than the time for which checkpoints are kept. The names have times, in seconds of the executors'
clocks. So checkpoints must be kept for longer than it takes to store a cut.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import fsspec
from wooly_bus.contents import CHUNK, chunk_digest

from wooly_executor.checkpoints.encryption import Pieces
from wooly_executor.checkpoints.folder import KEYED
from wooly_executor.checkpoints.jetstream import JetStreamFiles
from wooly_executor.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("wooly.executor")
#: Requests at a time. 16 chunks of 4 MiB fill 10 Gbit/s at 50 ms per request.
PARALLEL = 16
#: Seconds before a failed request is tried again. The last failure is an error.
PAUSES_S = (0.2, 1.0, 4.0)
#: Maximum seconds to connect, and without a byte of an answer. They are for S3; other file systems have their own.
CONNECT_S, SILENT_S = 5, 20
#: Objects that one request removes.
REMOVED_AT_ONCE = 1000


class ObjectSession:
    """The objects of one session. See `SessionStore`.

    Args:
        store: the store.
        tenant: path of the tenant.
        session: name of the session's folder.
    """

    def __init__(self, store: ObjectStore, tenant: str, session: str) -> None:
        self._store, self._tenant, self._session = store, tenant, session
        self._own = f"{tenant}/sessions/{session}"
        self._touched = False

    def keep(self, name: str, nbytes: int, content: Callable[[], Pieces]) -> None:
        """See `SessionStore`."""
        store, chunk = self._store, f"{self._tenant}/chunks/{name}"
        store.put(f"{chunk}/ref-{self._session}-{_now()}", b"")
        there = store.names(chunk)
        if _has(there, "gone") or not _has(there, "data"):
            store.put(f"{chunk}/data-{_now()}-{secrets.token_hex(8)}", b"".join(content()))

    def fill(self, name: str, into: memoryview) -> int:
        """See `SessionStore`."""
        chunk = f"{self._tenant}/chunks/{name}"
        for data in sorted([each for each in self._store.names(chunk) if each.startswith("data-")], reverse=True):
            with contextlib.suppress(FileNotFoundError):  # another executor may remove an older object now
                found = self._store.get(f"{chunk}/{data}")
                if len(found) == len(into):
                    into[:] = found
                return len(found)
        raise FileNotFoundError(f"the object store does not have {chunk}")

    def drop(self, names: Iterable[str]) -> None:
        """See `SessionStore`."""
        chunks = [f"{self._tenant}/chunks/{name}" for name in names]

        def own(chunk: str) -> list[str]:
            return [f"{chunk}/{each}" for each in self._store.names(chunk) if each.startswith(f"ref-{self._session}-")]

        self._store.remove([ref for refs in self._store.each(own, chunks) for ref in refs])
        self._store.collect(chunks)

    def lists(self) -> list[int]:
        """See `SessionStore`."""
        return [int(name.removeprefix("cut-")) for name in self._store.names(self._own) if name.startswith("cut-")]

    def put_list(self, number: int, content: Pieces) -> None:
        """See `SessionStore`."""
        if not self._touched:
            self.touch()
        self._store.put(f"{self._own}/cut-{number}", b"".join(content))

    def get_list(self, number: int) -> bytes:
        """See `SessionStore`."""
        return self._store.get(f"{self._own}/cut-{number}")

    def drop_lists(self, numbers: Iterable[int]) -> None:
        """See `SessionStore`."""
        self._store.remove([f"{self._own}/cut-{number}" for number in numbers])

    def touch(self) -> None:
        """See `SessionStore`."""
        before = [name for name in self._store.names(self._own) if name.startswith("open-")]
        now = f"open-{_now()}"
        self._store.put(f"{self._own}/{now}", b"")
        self._store.remove([f"{self._own}/{name}" for name in before if name != now])
        self._touched = True

    def remove(self) -> None:
        """See `SessionStore`."""
        self._store.forget(self._tenant, {self._session})


class ObjectStore:
    """Checkpoints in an object store. See `Store`.

    Args:
        url: where everything lies.
        key: id of the key with which everything is encrypted; empty: nothing is.
        options: options of the file system of fsspec.

    Raises:
        CheckpointError: the URL cannot be used; the message says what is missing.
    """

    at_once = read_at_once = PARALLEL * CHUNK

    def __init__(self, url: str, key: str = "", **options: Any) -> None:
        self._url, self._key = url, key
        if url.startswith("s3://"):  # `_tried` repeats failed requests, so botocore must not
            limits = {"connect_timeout": CONNECT_S, "read_timeout": SILENT_S, "retries": {"max_attempts": 1}}
            options = {"config_kwargs": limits | {"max_pool_connections": 2 * PARALLEL}} | options
        self._jetstream: JetStreamFiles | None = None
        try:
            if url.startswith("nats://"):
                self._files: Any = JetStreamFiles(url)
                self._jetstream, path = self._files, self._files.root
            else:
                self._files, path = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except ImportError as e:
            raise CheckpointError(
                f"checkpoints cannot be stored at {url}: {e}; for s3:// install wooly-executor[object-store]"
            ) from e
        except ValueError as e:
            raise CheckpointError(f"checkpoints cannot be stored at {url}: {e}") from e
        if hasattr(self._files, "retries"):
            self._files.retries = 1
        self._root = path.rstrip("/")
        self._pool = concurrent.futures.ThreadPoolExecutor(PARALLEL, "wooly-objects")
        self._closing = threading.Event()

    def identity(self) -> str:
        """See `Store`. Executors name the same place by the same URL and endpoint."""
        return chunk_digest(f"{self._url} {os.environ.get('AWS_ENDPOINT_URL', '')}".encode()).hex()[:32]

    def keyed(self, key: str) -> ObjectStore:
        """See `Store`."""
        other = copy.copy(self)
        other._key = key
        return other

    def session(self, tenant: str, session: str) -> ObjectSession:
        """See `Store`."""
        keyed = f"{self._root}/{KEYED}{self._key}" if self._key else self._root
        return ObjectSession(self, f"{keyed}/{tenant}", session)

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See `Store`."""
        try:
            runs = [self._pool.submit(work, item) for item in items]
        except RuntimeError as e:
            raise CheckpointError("the executor stops, so it sends no more requests to the object store") from e
        done, _ = concurrent.futures.wait(runs, return_when=concurrent.futures.FIRST_EXCEPTION)
        if any(run.exception() is not None for run in done):
            for run in runs:
                run.cancel()
            concurrent.futures.wait(runs)
        return [run.result() for run in runs if not run.cancelled()]

    def read_each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See `Store`."""
        return self.each(work, items)

    def close(self) -> None:
        """See `Store`."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._jetstream is not None:
            self._jetstream.close()

    # -- single requests ---------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        """Store an object.

        Raises:
            CheckpointError: the store has failed.
        """
        self._tried(f"store {path}", lambda: self._files.pipe_file(path, data))

    def get(self, path: str) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: it does not exist.
            CheckpointError: the store has failed.
        """
        return bytes(self._tried(f"read {path}", lambda: self._files.cat_file(path), missing=True))

    def names(self, folder: str) -> list[str]:
        """The names below a path."""
        return [path[len(folder) + 1 :] for path in self._found(folder)]

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects. An object that does not exist is not an error."""
        for at in range(0, len(paths), REMOVED_AT_ONCE):
            some = list(paths[at : at + REMOVED_AT_ONCE])
            self._tried(f"remove {some[0]}", lambda some=some: self._removed(some))  # type: ignore[misc]

    def _removed(self, paths: list[str]) -> None:
        try:
            self._files.rm(paths)
        except FileNotFoundError:  # some file systems raise this at the first missing object, and leave the others
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(path)

    def _found(self, folder: str) -> list[str]:
        def find() -> list[str]:
            try:
                return list(self._files.find(folder))
            except FileNotFoundError:
                return []

        found: list[str] = self._tried(f"list {folder}", find)
        return found

    def _tried(self, what: str, request: Callable[[], T], *, missing: bool = False) -> T:
        """Send a request. A failed request is repeated a few times.

        Args:
            what: what the request does, for messages.
            request: the request.
            missing: the object may not exist.

        Raises:
            FileNotFoundError: the object does not exist.
            CheckpointError: the request failed each time.
        """
        for pause in (*PAUSES_S, 0.0):
            try:
                return request()
            except Exception as e:
                if missing and isinstance(e, FileNotFoundError):
                    raise
                if isinstance(e, (FileNotFoundError, PermissionError)) or not pause or self._closing.wait(pause):
                    raise CheckpointError(
                        f"the object store {self._url} cannot {what}: {type(e).__name__}: {e} "
                        "(WOOLY_EXECUTOR_CHECKPOINTS)"
                    ) from e
                log.info("the object store %s cannot %s now, trying again: %s", self._url, what, e)
        raise AssertionError

    # -- removing ----------------------------------------------------------------------------------------------------

    def collect(self, chunks: Sequence[str]) -> None:
        """Remove the chunks that belong to no session."""

        def unused(chunk: str) -> list[str]:
            gone = f"gone-{_now()}-{secrets.token_hex(8)}"
            self.put(f"{chunk}/{gone}", b"")
            there = self.names(chunk)
            data = [] if _has(there, "ref") else [f"{chunk}/{name}" for name in there if name.startswith("data-")]
            return [f"{chunk}/{gone}", *data]

        found = self.each(unused, chunks)
        self.remove([path for _, *data in found for path in data])
        self.remove([gone for gone, *_ in found])

    def forget(self, tenant: str, sessions: set[str]) -> None:
        """Remove everything of some sessions of a tenant."""
        own = {session: f"{tenant}/sessions/{session}" for session in sessions}
        lists = [f"{folder}/{name}" for folder in own.values() for name in self.names(folder)]
        self.remove([path for path in lists if "/cut-" in path])
        marks = [name for name in self.names(f"{tenant}/chunks") if _session_of(name) in sessions]
        self.remove([f"{tenant}/chunks/{name}" for name in marks])
        self.collect([f"{tenant}/chunks/{name.partition('/')[0]}" for name in marks])
        self.remove([path for path in lists if "/cut-" not in path])

    def sweep(self, before: float) -> int:
        """See `Store`. It removes sessions of all keys, and unfinished work of executors that died."""
        if self._jetstream is not None:
            self._tried("remove old contents", lambda: self._files.sweep(before))
        tenants: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"sessions": [], "chunks": []})
        for path in self._found(self._root):
            parts = path[len(self._root) + 1 :].rsplit("/", 3)
            if len(parts) == 4 and parts[1] in ("sessions", "chunks"):
                tenants[f"{self._root}/{parts[0]}"][parts[1]].append(f"{parts[2]}/{parts[3]}")
        return sum(
            [self._sweep(tenant, found["sessions"], found["chunks"], before) for tenant, found in tenants.items()]
        )

    def _sweep(self, tenant: str, sessions: list[str], chunks: list[str], before: float) -> int:
        opened: dict[str, float] = {}
        for name in sessions:
            session, _, what = name.partition("/")
            opened[session] = max(opened.get(session, 0.0), _time_of(what) if what.startswith("open-") else 0.0)
        for name in chunks:  # of a session that died before its first list
            if session := _session_of(name):
                opened[session] = max(opened.get(session, 0.0), _time_of(name))
        over = {session for session, at in opened.items() if at < before}
        if over:
            self.forget(tenant, over)
        held = {name.partition("/")[0] for name in chunks if _session_of(name)}
        left = {n.partition("/")[0] for n in chunks if "/data-" in n and _time_of(n) < before} - held
        self.collect([f"{tenant}/chunks/{name}" for name in sorted(left)])
        self.remove([f"{tenant}/chunks/{n}" for n in chunks if "/gone-" in n and _time_of(n) < before])
        return len(over)

    def others(self) -> list[str]:
        """See `Store`."""
        found = {path[len(self._root) + 1 :].partition("/")[0] for path in self._found(self._root)}
        keys = sorted({name.removeprefix(KEYED) for name in found if name.startswith(KEYED)} - {self._key})
        plain = bool(self._key) and not all(name.startswith(KEYED) for name in found)
        return [""] * plain + keys


def _now() -> str:
    return str(int(time.time()))


def _has(names: Iterable[str], kind: str) -> bool:
    return any(name.startswith(f"{kind}-") for name in names)


def _session_of(name: str) -> str:
    """The session of a `ref`; empty for another object. `name`: chunk and object."""
    mark = name.rpartition("/")[2]
    return mark.split("-")[1] if mark.startswith("ref-") else ""


def _time_of(name: str) -> float:
    """The time in the name of an object."""
    kind, *parts = name.rpartition("/")[2].split("-")
    at = parts[1] if kind == "ref" else parts[0]
    return float(at) if at.isdigit() else 0.0
