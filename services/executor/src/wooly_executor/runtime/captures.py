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
        #: The pools and their graphs. The last pool is used for the next capture if it has graphs.
        self._pools: list[tuple[PoolId, weakref.WeakSet[Any]]] = []
        self._usable = False
        #: Torch keeps pointers to graphs whose capture failed.
        self._failed: list[Any] = []

    def capture(self, body: Callable[[], None]) -> Any:
        """Return the work that `body` enqueues as a graph.

        Raises:
            InvalidCaptureError: `body` does something that a graph cannot contain.
            Exception: errors of `body` that do not invalidate the capture.
        """
        pool, graphs = self._pool()
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
        return sum([self._library.pool_bytes(pool) for pool, graphs in self._pools if len(graphs)])

    def _pool(self) -> tuple[PoolId, weakref.WeakSet[Any]]:
        """Return a pool for the next capture. Torch refuses a pool whose graphs have all been destroyed."""
        if not self._usable or not len(self._pools[-1][1]):
            self._pools = [known for known in self._pools if len(known[1])]
            self._pools.append((self._library.new_pool(), weakref.WeakSet()))
            self._usable = True
        return self._pools[-1]

    def _end(self, graph: Any, pool: PoolId) -> Exception | None:
        """End a capture. Returns the error if the capture is invalid; torch's state is then repaired."""
        try:
            graph.capture_end()
        except Exception as e:
            # if torch has ended the recording itself, it refuses to end it again
            with contextlib.suppress(RuntimeError):
                self._library.end_recording(pool)
            self._usable = False
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
