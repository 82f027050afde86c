"""What a GPU's driver does for a runtime: loads code, launches it, tells device time, replays graphs. One per vendor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from wooly_executor.runtime.packing import Arguments, Kind


class Graph(Protocol):
    """Work that was captured, to be done again and again."""

    def replay(self) -> None:
        """Enqueue it."""
        ...


class Driver(Protocol):
    """One GPU of one process, with a stream on which programs run.

    What can fail because of what ran before raises `ContextLostError` where nothing can run any more.
    """

    vendor: str
    device: torch.device
    """As torch knows it."""

    def facts(self) -> dict[str, Any]:
        """What `torch.cuda.get_device_properties` is answered from."""
        ...

    def capacity(self) -> int:
        """Bytes that sessions may have: what is free, less what libraries and code take."""
        ...

    def target(self) -> str:
        """What code must be built for.

        Raises:
            MissingDriverError: no code is generated for such a chip.
        """
        ...

    def attach(self) -> None:
        """The calling thread's work goes to the stream."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """The calling thread's work goes to another stream, behind what was enqueued, and is done at the end of the block."""
        ...

    def seed(self, seed: int) -> None:
        """Set the generator of random numbers."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that the device copies from and to by itself."""
        ...

    def load(self, image: bytes, entry: str, kinds: Sequence[Kind]) -> Any:
        """A function of some code, from any thread. Its parameters must be of these kinds.

        Raises:
            OperationError: the driver does not take it, or its parameters are others.
        """
        ...

    def launch(
        self, function: Any, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Arguments
    ) -> None:
        """Enqueue a function.

        Raises:
            OperationError: it cannot be launched so.
        """
        ...

    def reserved(self) -> int:
        """Bytes that torch has taken from the device."""
        ...

    def record(self) -> Any:
        """A mark on the stream."""
        ...

    def elapsed_ns(self, marks: Sequence[Any]) -> list[int]:
        """Wait for the last mark; device time between each and the one before. The marks may be used again."""
        ...

    def capture(self, body: Callable[[], None]) -> Graph:
        """What `body` enqueues, as a graph: nothing of it is done now.

        Raises:
            RuntimeError: it does what no graph can hold.
        """
        ...

    def check(self) -> None:
        """Make sure that the device still computes.

        Raises:
            ContextLostError: it does not.
        """
        ...
