"""Where a torch runtime keeps its memory, and what that changes: the host's own memory, or a GPU's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Form, Symbol

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.fresh_memory import on_zeros


class TorchDevice:
    """A device of torch's.

    Args:
        device: which.

    Attributes:
        device: which.
        host: whether its memory is the host's, so that Python's code reads and writes it in place.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"

    @property
    def named(self) -> torch.device | None:
        """The device, where operators must be told; None: they take it without being told."""
        return None if self.host else self.device

    def zeroed(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Fresh memory that holds no other session's bytes."""
        return torch.zeros(-(-nbytes // dtype.itemsize), dtype=dtype, device=self.named)

    def empty(self, numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Memory with anything in it, for who writes all of it."""
        return torch.empty(numel, dtype=dtype, device=self.named)

    def on_zeros(self, call: Callable[[Any], Any], *, repeatable: bool = True) -> Callable[[Any], Any]:
        """`call`, with memory that is zero wherever the library takes some (see `fresh_memory`).

        Args:
            call: a call of the library.
            repeatable: whether it may be made twice, because it does not read what it writes.
        """
        return on_zeros(call)

    def seed(self, seed: int) -> None:
        """Set the generator of random numbers, before every draw."""
        torch.default_generator.manual_seed(seed)

    def library(self, call: LibraryCall, form: Form) -> LibraryCall:
        """A call as this device's library takes it; `form`: the instruction that it is.

        Raises:
            OperationError: the library has nothing that does it here.
        """
        return call

    def result(self, t: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """A result as it was announced; by default as it is, to be found wrong by who knows."""
        return t

    # -- bytes between the host and the device -------------------------------------------------------------------------

    def read(self, memory: Tensor) -> memoryview:
        """The bytes of a flat tensor of bytes: in place, or a copy where the host cannot reach them."""
        return memory.numpy().data

    def landing(self, memory: Tensor) -> tuple[memoryview, Callable[[], None] | None]:
        """Where to put what is to become the bytes of a flat tensor of bytes, and what brings it there; None: it is there."""
        return memory.numpy().data, None

    def host_memory(self, nbytes: int) -> Tensor:
        """Memory of the host for bytes on their way from the device or to it, or kept for it."""
        return torch.empty(nbytes, dtype=torch.uint8)

    # -- threads -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """The calling thread will run programs."""

    def aside(self) -> AbstractContextManager[Any]:
        """Copies in the block, by another thread than that, disturb no program, and are done at its end."""
        return contextlib.nullcontext()


HOST = TorchDevice(torch.device("cpu"))


def symbols_replaced(value: Any, device: torch.device) -> Any:
    """An attribute in which the word for the device is the device."""
    if isinstance(value, Symbol) and value.kind == "device":
        return device
    if isinstance(value, tuple):
        return tuple([symbols_replaced(v, device) for v in value])
    return value
