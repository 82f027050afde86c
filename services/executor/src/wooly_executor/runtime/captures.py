"""Captures work as graphs in memory pools of torch, and repairs the state that torch leaves behind after a failed capture.

After an invalidated capture, torch still counts the capture as one in progress: the next capture into the same pool fails, and
the default generator of random numbers refuses every draw. So the recording is ended here, the next capture gets a new pool, and
the generator a new state.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

PoolId = tuple[int, int]


class InvalidCaptureError(RuntimeError):
    """A call has invalidated a capture. The cause is the error of this call."""


class GraphLibrary(Protocol):
    """The parts of torch that capture graphs."""

    def new_pool(self) -> PoolId:
        """Return the id of a new memory pool."""
        ...

    def new_graph(self) -> Any:
        """Return an empty graph with the methods `capture_end` and `replay`."""
        ...

    def begin(self, graph: Any, pool: PoolId) -> None:
        """Begin the capture of a graph."""
        ...

    def end_recording(self, pool: PoolId) -> None:
        """End the recording of a capture into a pool, and the capture's use of the pool.

        Raises:
            RuntimeError: no capture into this pool is recorded.
        """
        ...

    def renew_generator(self) -> None:
        """Give the default generator of random numbers a new state."""
        ...

    def pool_bytes(self, pool: PoolId) -> int:
        """Return the device memory of a pool, in bytes."""
        ...


class Captures:
    """The graphs of a device and their memory pools. Only the device thread uses it.

    Args:
        library: the library that captures.
    """

    def __init__(self, library: GraphLibrary) -> None:
        self._library = library
        #: The pools and their graphs, and the pool for graphs that may share one.
        self._pools: list[tuple[PoolId, weakref.WeakSet[Any]]] = []
        self._shared: tuple[PoolId, weakref.WeakSet[Any]] | None = None
        #: The last known sizes of pools in bytes. They change only with captures.
        self._sizes: dict[PoolId, int] = {}
        #: Torch keeps pointers to graphs whose capture failed.
        self._failed: list[Any] = []

    def capture(self, body: Callable[[], None], *, apart: bool = False) -> Any:
        """Return the work that `body` enqueues as a graph.

        Args:
            body: enqueues the work.
            apart: the graph gets a pool of its own. In a shared pool, the memory that `body` leaves in use may be memory that
                earlier graphs use for their own values.

        Raises:
            InvalidCaptureError: `body` does something that a graph cannot contain.
            Exception: errors of `body` that do not invalidate the capture.
        """
        pool, graphs = self._new_pool() if apart else self._shared_pool()
        graph = self._library.new_graph()
        with _no_collection():
            try:
                self._library.begin(graph, pool)
                body()
            except BaseException as e:
                valid = self._end(graph, pool) is None
                if valid or not isinstance(e, Exception):
                    raise
                raise InvalidCaptureError(str(e)) from e
            late = self._end(graph, pool)
        if late is not None:
            raise InvalidCaptureError(str(late)) from late
        graphs.add(graph)
        return graph

    def nbytes(self) -> int:
        """Return the device memory of all pools that have graphs, in bytes."""
        self._pools = [known for known in self._pools if len(known[1])]
        sizes = {pool: self._sizes.get(pool) for pool, _ in self._pools}
        self._sizes = {pool: self._library.pool_bytes(pool) if n is None else n for pool, n in sizes.items()}
        return sum(self._sizes.values())

    def _new_pool(self) -> tuple[PoolId, weakref.WeakSet[Any]]:
        self._pools.append((self._library.new_pool(), weakref.WeakSet()))
        return self._pools[-1]

    def _shared_pool(self) -> tuple[PoolId, weakref.WeakSet[Any]]:
        """Return a pool for the next capture. Torch refuses a pool whose graphs have all been destroyed."""
        if self._shared is None or not len(self._shared[1]):
            self._shared = self._new_pool()
        self._sizes.pop(self._shared[0], None)
        return self._shared

    def _end(self, graph: Any, pool: PoolId) -> Exception | None:
        """End a capture. Returns the error if the capture is invalid; torch's state is then repaired."""
        try:
            graph.capture_end()
        except Exception as e:
            # if torch has ended the recording itself, it refuses to end it again
            with contextlib.suppress(RuntimeError):
                self._library.end_recording(pool)
            if self._shared is not None and self._shared[0] == pool:
                self._shared = None
            self._failed.append(graph)
            self._library.renew_generator()
            return e
        return None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no cycles of objects: destroying a graph would invalidate the capture of this thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
