"""The blobs of a job's tenant, for the thread that replays the job.

Neither the sources of a job nor its results are in this process as a whole: they pass through it in pieces.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from wooly_bus.blobs import BATCH, BlobStore, Upload
from wooly_wis.messages import PIECE_BYTES as MESSAGE_BYTES

T = TypeVar("T")
#: Size, in bytes, from which received pieces are passed on together.
PIECE_BYTES = 1 << 20
#: Maximum bytes of sources that a job keeps because later steps load them again. Larger sources are fetched again.
KEPT_BYTES = 16 << 20
#: Maximum bytes of a blob that JetStream's client has received and that are not passed on.
RECEIVED_BYTES = BATCH * MESSAGE_BYTES


class JobStoppedError(Exception):
    """The job was stopped while its thread read or stored a blob."""


class JobBlobs:
    """Reads and stores blobs on the event loop, while a thread waits for each piece.

    Args:
        store: the blobs of the tenant.
        loop: the event loop of the store.
        loads: names of the blobs that the job loads, once for each load.
        module_bytes: size of the job's module, which is kept as long as this.
    """

    def __init__(
        self, store: BlobStore, loop: asyncio.AbstractEventLoop, loads: Iterable[str], module_bytes: int = 0
    ) -> None:
        self._store, self._loop = store, loop
        self._module_bytes, self._passing = module_bytes, 0
        self._left = Counter(loads)
        self._kept: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._waiting: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    @property
    def held(self) -> int:
        """Host memory, in bytes, that the job needs here now, at most. Any thread may ask."""
        return self._module_bytes + self._passing + sum(map(len, tuple(self._kept.values())))

    def stop(self) -> None:
        """End the waiting of the thread, now and for ever. Any thread may call this."""
        with self._lock:
            self._stopped = True
            if self._waiting is not None:
                self._waiting.cancel()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._stopped:
                work.close()
                raise JobStoppedError
            waiting: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waiting = waiting
        try:
            return waiting.result()
        except concurrent.futures.CancelledError as e:
            raise JobStoppedError from e

    def pieces(self, name: str, nbytes: int) -> Iterator[bytes]:
        """Yield a blob of `nbytes` bytes in pieces, for one of its loads. The last piece comes only if all bytes match the name.

        Raises:
            BusError: the blob does not exist or has other bytes, or JetStream does not answer.
            JobStoppedError: the job was stopped.
        """
        self._left[name] -= 1
        again = self._left[name] > 0
        if name in self._kept:
            yield self._kept[name] if again else self._kept.pop(name)
            return
        kept: list[bytes] | None = [] if again and nbytes + sum(map(len, self._kept.values())) <= KEPT_BYTES else None
        chunks = self._store.chunks(name)
        self._passing = min(nbytes, RECEIVED_BYTES) + PIECE_BYTES

        async def some() -> bytes:
            found, size = [], 0
            async for chunk in chunks:
                found.append(chunk)
                size += len(chunk)
                if size >= PIECE_BYTES:
                    break
            return b"".join(found)

        try:
            while piece := self._wait(some()):
                if kept is not None:
                    kept.append(piece)
                yield piece
        finally:
            self._passing = 0
            with contextlib.suppress(JobStoppedError):
                self._wait(chunks.aclose())
        if kept is not None:
            self._kept[name] = b"".join(kept)

    def put(self, pieces: Iterable[bytes]) -> str:
        """Store pieces as one blob. Returns its name.

        Raises:
            BusError: JetStream does not answer, or refuses.
            JobStoppedError: the job was stopped.
        """
        upload, self._passing = Upload(self._store), 2 * PIECE_BYTES
        try:
            for piece in pieces:
                self._wait(upload.add(piece))
            return self._wait(upload.finish())
        except BaseException:
            with contextlib.suppress(JobStoppedError):
                self._wait(upload.abandon())
            raise
        finally:
            self._passing = 0
