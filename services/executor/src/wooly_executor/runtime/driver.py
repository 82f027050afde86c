"""The interface of a GPU driver: loads code, launches it, measures device time, replays graphs. One driver per vendor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from wooly_executor.runtime.core_use import KernelRecord
from wooly_executor.runtime.packing import Arguments, Kind


class Graph(Protocol):
    """Captured work that can be repeated."""

    def replay(self, seeds: Sequence[int] = ()) -> None:
        """Enqueue the captured work. `seeds`: what `seed` would get for each of its random calls."""
        ...


class Driver(Protocol):
    """One GPU of one process, with a stream on which programs run.

    Methods that can fail because of earlier work raise `ContextLostError` if the context is lost and nothing can run any more.
    """

    vendor: str
    device: torch.device
    """The device as torch names it."""

    def facts(self) -> dict[str, Any]:
        """Return the facts that answer `torch.cuda.get_device_properties`."""
        ...

    def capacity(self) -> int:
        """Return the bytes that sessions may use: free memory, less the needs of libraries, code and graphs."""
        ...

    def target(self) -> str:
        """Return the target that code must be built for.

        Raises:
            MissingDriverError: no code is generated for this chip.
        """
        ...

    def chip(self) -> str:
        """Return the target of foreign kernels: this exact chip, like ``cuda:sm_90`` or ``hip:gfx942``."""
        ...

    def attach(self) -> None:
        """Send the work of the calling thread to the stream."""
        ...

    def copy_context(self) -> AbstractContextManager[Any]:
        """Return a context in which the work of the calling thread goes to another stream, after all work enqueued so far.

        The work is complete at the end of the block.
        """
        ...

    def copy_target(self, nbytes: int) -> Tensor:
        """Return uninitialised memory of the stream, inside a `copy_context`, whose stream may write it from now on."""
        ...

    def seed(self, seed: int) -> None:
        """Set the generator of random numbers. During a capture: the next random call gets its seed at each replay."""
        ...

    def on_zeros(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `call` with an allocator that zeroes the device memory that the library allocates.

        `call` may run several times.
        """
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Return pinned host memory, which the device can copy by itself.

        For small sizes: torch caches it and rounds the size up.
        """
        ...

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that the device can copy it by itself. Thread-safe.

        Raises:
            OperationError: the system or the device refuses.
        """
        ...

    def unlock(self, address: int) -> None:
        """Undo `lock`, when no copy is in progress. Thread-safe; raises nothing."""
        ...

    def load(self, image: bytes, entry: str, kinds: Sequence[Kind], shared: int = 0) -> Any:
        """Load a function from compiled code. Thread-safe.

        Args:
            image: the code.
            entry: name of the function.
            kinds: the expected kinds of its parameters.
            shared: bytes of dynamic shared memory per block that launches will use.

        Raises:
            OperationError: the driver refuses the code, the parameters differ, or a block has too little shared memory.
        """
        ...

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Arguments,
        shared: int = 0,
    ) -> None:
        """Enqueue a launch of a function. `shared`: bytes of dynamic shared memory per block.

        Raises:
            OperationError: the launch is invalid.
        """
        ...

    def blocks_per_core(self, function: Any, threads: int) -> int:
        """Return how many blocks of this many threads a core takes at once, by the driver's occupancy. Thread-safe.

        Raises:
            OperationError: the driver refuses.
        """
        ...

    def begin_profile(self) -> None:
        """Begin to record the kernels that the device runs. `end_profile` must follow in the same thread.

        Raises:
            OperationError: the profiler does not start.
        """
        ...

    def end_profile(self) -> list[KernelRecord]:
        """Return the kernels since `begin_profile`, when the device has done all enqueued work.

        Raises:
            OperationError: the profiler fails.
        """
        ...

    def sm_utilisation(self) -> float | None:
        """Return the share of the cores' time that this process has used since the last call, as the vendor's library measures
        it; None: the library offers no such figure. May be called in any thread, and waits for nothing.
        """
        ...

    def record(self) -> Any:
        """Return a new mark (event) on the stream."""
        ...

    def elapsed_ns(self, marks: Sequence[Any]) -> list[int]:
        """Wait for the last mark, and return the device time between each mark and the one before it.

        The marks may then be reused.
        """
        ...

    def wait(self, mark: Any, seconds: float) -> bool:
        """Wait for a mark, at most `seconds`. Returns whether the mark was reached."""
        ...

    def sleep(self, ns: int) -> None:
        """Enqueue a kernel that takes about `ns` nanoseconds."""
        ...

    def urgent(self, target: Tensor, source: Tensor) -> None:
        """Copy from pinned memory to the device immediately, without waiting for enqueued or running work."""
        ...

    def capture(self, body: Callable[[], None], *, apart: bool = False, draws: int = 0) -> Graph | None:
        """Capture the work that `body` enqueues as a graph, without running it. None: another thread uses the device.

        Args:
            body: enqueues the work.
            apart: no other graph uses the memory that `body` leaves in use.
            draws: number of calls of `seed` in `body`.

        Raises:
            RuntimeError: `body` does something that a graph cannot contain.
        """
        ...

    def draws_in_graphs(self) -> bool | None:
        """Compare random numbers in graphs and outside of them; None: another thread uses the device. Waits for the device."""
        ...

    def graph_bytes(self) -> int:
        """Return the device memory that the graphs of `capture` use, in bytes. Takes too long for every run."""
        ...

    def keep_no_room_for_graphs(self) -> None:
        """Add the memory that is kept for graphs to the capacity."""
        ...

    def graph_room(self) -> int:
        """Return the maximum device memory for graphs, in bytes. It is not part of `capacity`."""
        ...

    def release_cached(self) -> None:
        """Return cached memory that nothing uses to the device. Waits for all enqueued work."""
        ...

    def check(self) -> None:
        """Check that the device still computes.

        Raises:
            ContextLostError: the context is lost.
        """
        ...
