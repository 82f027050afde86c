"""Captures work as graphs in memory pools of torch, and repairs the state that torch leaves behind after a failed capture.

After an invalidated capture, torch still counts the capture as one in progress: the next capture into the same pool fails, and
the default generator of random numbers refuses every draw. So the recording is ended here, the next capture gets a new pool, and
the generator a new state.

Torch may end the process in these cases (read in the sources and the library of torch 2.11), so they do not occur here:

- The destructor of a graph raises, for example because `capture_begin` failed after the graph got the generator's state and
  before the state got the graph. C++ ends the process then. Graphs whose capture did not end are never destroyed.
- A graph is destroyed in one thread while another thread begins or ends a capture. Torch releases Python's lock there, and both
  change the generator's set of graphs. So only the device thread destroys graphs, between two captures.
- A graph is destroyed in the thread that captures. This invalidates the capture.
- A pool's memory is counted: see `torch_private.pool_segments`.

Each random call of a graph draws from a generator state of its own, because it has a seed of its own. During the capture, the
default generator takes these states one after the other. A replay sets their seeds, and torch writes them to device memory, where
the kernels read them.

Another thread that allocates memory of the device or page-locked memory, or loads code, may invalidate a capture. `Turns` keeps
other threads away.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

    def new_draw(self, graph: Any) -> Any:
        """Return a generator with a state for one random call of a graph, whose capture has not begun, with `manual_seed`."""
        ...

    def draw_by(self, generator: Any) -> Any:
        """Let the default generator use the state of another one. Returns a generator with the state that it had."""
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


class Turns:
    """Keeps other threads from using a device while it captures.

    A capture does not wait for other threads. It is tried again at a later run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._capturer: int | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Use the device for work that is no part of a run. Waits for the end of a capture.

        Raises:
            RuntimeError: the calling thread captures.
        """
        with self._changed:
            if self._capturer == threading.get_ident():
                raise RuntimeError("a graph cannot contain work beside the run that is captured")
            while self._capturer is not None:
                self._changed.wait()
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1

    @contextlib.contextmanager
    def capture(self) -> Iterator[bool]:
        """Capture, if this yields True. If it yields False, another thread uses the device."""
        with self._changed:
            free = not self._users and self._capturer is None
            if free:
                self._capturer = threading.get_ident()
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._capturer = None
                    self._changed.notify_all()


class CapturedGraph:
    """A graph. Any thread may drop it: the device thread destroys the library's graph later.

    Args:
        graphs: has the library's graphs, the only reference to each of them, with the generators of their random calls.
        number: number of the graph there.
        pool: the memory pool of the graph.
    """

    __slots__ = ("__weakref__", "_graphs", "_number", "pool")

    def __init__(self, graphs: dict[int, tuple[Any, list[Any]]], number: int, pool: PoolId) -> None:
        self._graphs, self._number, self.pool = graphs, number, pool

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """Enqueue the captured work. `seeds`: one for each random call."""
        graph, draws = self._graphs[self._number]
        if draws:
            for draw, seed in zip(draws, seeds, strict=True):
                draw.manual_seed(seed)
        graph.replay()


class Captures:
    """The graphs of a device and their memory pools. Only the device thread uses it.

    Args:
        library: the library that captures.
    """

    def __init__(self, library: GraphLibrary) -> None:
        self._library = library
        #: Number of the library's graphs per pool, without pools that have none, and the pool for graphs that may share one.
        self._pools: dict[PoolId, int] = {}
        self._shared: PoolId | None = None
        #: The last known sizes of pools in bytes. They change only with captures.
        self._sizes: dict[PoolId, int] = {}
        #: The library's graphs by number, with the generators of their random calls, and the numbers and pools of graphs that
        #: nobody uses any more. Any thread appends to `_unused`.
        self._graphs: dict[int, tuple[Any, list[Any]]] = {}
        self._unused: deque[tuple[PoolId, int]] = deque()
        self._numbers = itertools.count()
        #: During a capture: generators for the random calls to come.
        self._draws: deque[Any] | None = None
        #: The default generator's state before the first of them.
        self._before: Any = None

    @property
    def capturing(self) -> bool:
        """Whether a capture is in progress."""
        return self._draws is not None

    def draw(self) -> None:
        """Let the next random call of the capture in progress draw from a generator state of its own.

        Raises:
            RuntimeError: the capture was begun for fewer random calls.
        """
        if not self._draws:
            raise RuntimeError("a graph cannot contain random calls that were not announced")
        before = self._library.draw_by(self._draws.popleft())
        self._before = self._before or before

    def capture(self, body: Callable[[], None], *, apart: bool = False, draws: int = 0) -> CapturedGraph:
        """Return the work that `body` enqueues as a graph.

        Args:
            body: enqueues the work.
            apart: the graph gets a pool of its own. In a shared pool, the memory that `body` leaves in use may be memory that
                earlier graphs use for their own values.
            draws: number of random calls. Before each of them, `body` calls `draw`.

        Raises:
            InvalidCaptureError: `body` does something that a graph cannot contain.
            Exception: errors of `body` that do not invalidate the capture.
        """
        self.destroy_unused()
        pool = self._library.new_pool() if apart or self._shared is None else self._shared
        graph = self._library.new_graph()
        generators: list[Any] = []
        with _no_collection():
            try:
                generators += [self._library.new_draw(graph) for _ in range(draws)]
                self._library.begin(graph, pool)
                with self._drawing(generators):
                    body()
            except BaseException as e:
                valid = self._end(graph, pool) is None
                self._abandon(pool)
                if valid:
                    self._unused.append((pool, self._add(graph, pool, generators)))
                del graph  # the trace of the error must not destroy it
                if valid or not isinstance(e, Exception):
                    raise
                raise InvalidCaptureError(str(e)) from e
            late = self._end(graph, pool)
        if late is not None:
            self._abandon(pool)
            raise InvalidCaptureError(str(late)) from late
        number = self._add(graph, pool, generators)
        if not apart:
            self._shared = pool
        captured = CapturedGraph(self._graphs, number, pool)
        weakref.finalize(captured, self._unused.append, (pool, number)).atexit = False
        return captured

    def nbytes(self) -> int:
        """Return the device memory of all pools that have graphs, in bytes."""
        self.destroy_unused()
        self._sizes = {
            pool: self._sizes[pool] if pool in self._sizes else self._library.pool_bytes(pool) for pool in self._pools
        }
        return sum(self._sizes.values())

    def destroy_unused(self) -> None:
        """Destroy the library's graphs that nobody uses any more. Their memory becomes free."""
        while self._unused:
            pool, number = self._unused.popleft()
            del self._graphs[number]
            self._pools[pool] -= 1
            if not self._pools[pool]:
                del self._pools[pool]
                if self._shared == pool:  # torch refuses a pool whose graphs have all been destroyed
                    self._shared = None

    @contextlib.contextmanager
    def _drawing(self, generators: Sequence[Any]) -> Iterator[None]:
        """Let random calls draw from these generators, one after the other. Afterwards, the default generator is as before.

        Raises:
            RuntimeError: there were fewer random calls, so replays would give them the seeds of others.
        """
        self._draws = deque(generators)
        try:
            yield
            if self._draws:
                raise RuntimeError(f"{len(self._draws)} random calls of a graph were announced and not made")
        finally:
            before, self._before, self._draws = self._before, None, None
            if before is not None:
                self._library.draw_by(before)

    def _add(self, graph: Any, pool: PoolId, generators: list[Any]) -> int:
        """Keep a graph of the library, which has memory in a pool. Returns its number."""
        self._pools[pool] = self._pools.get(pool, 0) + 1
        self._sizes.pop(pool, None)
        number = next(self._numbers)
        self._graphs[number] = graph, generators
        return number

    def _abandon(self, pool: PoolId) -> None:
        """Use the pool of a failed capture for no other capture. Traces of errors may keep tensors in its memory."""
        if self._shared == pool:
            self._shared = None

    def _end(self, graph: Any, pool: PoolId) -> Exception | None:
        """End a capture. Returns the error if the capture is invalid; torch's state is then repaired."""
        try:
            graph.capture_end()
        except Exception as e:
            # if torch has ended the recording itself, it refuses to end it again
            with contextlib.suppress(RuntimeError):
                self._library.end_recording(pool)
            # torch keeps pointers to such a graph, and its destructor may end the process, also at the process's exit
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
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
