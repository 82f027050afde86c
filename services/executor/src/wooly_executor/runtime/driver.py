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

    def chip(self) -> str:
        """What scripts' own kernels are built for: this very chip, like ``cuda:sm_90`` or ``hip:gfx942``."""
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

    def on_zeros(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`call`, with device memory that is zero wherever the library takes some. It may be made several times."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that the device copies from and to by itself, for what is small: torch has a cache of it, and rounds up."""
        ...

    def lock(self, address: int, nbytes: int) -> None:
        """Keep pages of the host's where they are, so that the device copies from and to them by itself. From any thread.

        Raises:
            OperationError: the system or the device refuses.
        """
        ...

    def unlock(self, address: int) -> None:
        """Undo `lock`, once no copy is under way. From any thread; raises nothing."""
        ...

    def load(self, image: bytes, entry: str, kinds: Sequence[Kind], shared: int = 0) -> Any:
        """A function of some code, from any thread. Its parameters must be of these kinds.

        Args:
            image: the code.
            entry: the function.
            kinds: of its parameters.
            shared: bytes of a group's memory that launches will set apart.

        Raises:
            OperationError: the driver does not take it, its parameters are others, or a group has no such memory.
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
        """Enqueue a function. `shared`: bytes of a group's memory that are set apart.

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

    def wait(self, mark: Any, seconds: float) -> bool:
        """Wait for a mark, at most so long: whether it was reached."""
        ...

    def urgent(self, target: Tensor, source: Tensor) -> None:
        """Copy to the device from pinned memory, past what is enqueued and while it runs."""
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
