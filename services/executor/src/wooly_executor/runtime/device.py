"""Where a torch runtime keeps its memory, and what depends on this: host memory or GPU memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from wooly_bus.huge_pages import WISH_FROM, wish_for_huge_pages
from wooly_wis.program import Form, Symbol

from wooly_executor.runtime.buffers import bytes_of
from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.complex_qr import complex_qr
from wooly_executor.runtime.dilated_convolution import dilated_convolution
from wooly_executor.runtime.fresh_memory import on_zeros
from wooly_executor.runtime.lu import lu_of_batch
from wooly_executor.runtime.ordered_sums import ordered_sum
from wooly_executor.runtime.products import onednn_product, split_product
from wooly_executor.runtime.unasked_gradients import unasked_gradient
from wooly_executor.runtime.unpivoted import unpivoted

#: Blocks of this many bytes and more come from the system each time, which zeroes their pages when they are used first. Smaller
#: blocks often come from the heap, which has its pages already.
MAPPED_FROM = 32 << 20
#: Number of elements from which torch fills memory on all cores. On a busy machine, it then waits for its other threads: the mean
#: time for 256 KB was 400 us, the median 4 us.
SPLIT_FROM = 32768
#: Bytes up to which the calling thread alone zeroes memory, in about 14 us. More bytes are zeroed faster on all cores.
ALONE_UP_TO = 1 << 20
#: Holds the interpreter's lock, because another thread could keep it for longer than this takes.
_memset = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)(
    ("memset", ctypes.CDLL(None))
)


class TorchDevice:
    """A device of torch.

    Args:
        device: the torch device.

    Attributes:
        device: the torch device.
        host: whether the device memory is host memory, so that Python code can read and write it directly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"

    @property
    def named(self) -> torch.device | None:
        """The device to pass to operators; None if they use it by default."""
        return None if self.host else self.device

    def zeroed(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return new memory that is zero, so that it shows no bytes of other sessions."""
        numel = -(-nbytes // dtype.itemsize)
        if self.host and numel >= SPLIT_FROM:
            if nbytes <= ALONE_UP_TO:
                made = torch.empty(numel, dtype=dtype)
                _memset(made.data_ptr(), 0, made.nbytes)
                return made
            if nbytes >= MAPPED_FROM:
                with contextlib.suppress(OSError):  # torch reports what is wrong
                    return _mapped(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.named)

    def empty(self, numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return uninitialised memory, for a caller that overwrites all of it."""
        made = torch.empty(numel, dtype=dtype, device=self.named)
        if self.host and made.nbytes >= WISH_FROM:
            wish_for_huge_pages(made.data_ptr(), made.nbytes)
        return made

    def copy_target(self, nbytes: int) -> Tensor:
        """Return uninitialised memory that a copy in a `copy_context` will fill, and that programs use afterwards."""
        return self.empty(nbytes)

    def on_zeros(self, call: Callable[[Any], Any], *, repeatable: bool = True) -> Callable[[Any], Any]:
        """Return `call` with an allocator that zeroes all memory that the library allocates (see `fresh_memory`).

        Args:
            call: a call of the library.
            repeatable: whether it may run twice, because it does not read what it writes.
        """
        return on_zeros(call)

    def seed(self, seed: int) -> None:
        """Set the generator of random numbers, before every draw."""
        torch.default_generator.manual_seed(seed)

    def library(self, call: LibraryCall, form: Form) -> LibraryCall:
        """Adapt a library call of the instruction `form` to this device.

        Raises:
            OperationError: the library has no operator for it on this device.
        """
        instead = unpivoted(call)
        if instead is None and self.host:
            instead = split_product(form, call.op)
            for rule in (lu_of_batch, ordered_sum, complex_qr, dilated_convolution, unasked_gradient):
                instead = instead or rule(call, form)
        return call if instead is None else replace(call, instead=instead)

    def result(self, t: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Convert a result to the announced shape. The default returns `t` unchanged, and the caller checks the shape."""
        return t

    # -- bytes between the host and the device -------------------------------------------------------------------------

    def read(self, memory: Tensor) -> memoryview:
        """Return the bytes of a flat tensor of bytes: its own memory, or a copy if the host cannot access it."""
        return memory.numpy().data

    def copied(self, base: Tensor, offset: int, nbytes: int) -> bytes:
        """Return a copy of a few bytes of a buffer whose tensor is `base`.

        On the host, this takes a fifth of the time of a tensor on the bytes and `read`.
        """
        if self.host:
            storage = base.untyped_storage()
            if offset + nbytes <= storage.nbytes():
                return ctypes.string_at(storage.data_ptr() + offset, nbytes)
        return bytes(self.read(bytes_of(base, offset, nbytes)))

    def upload_target(self, memory: Tensor) -> tuple[memoryview, Callable[[], None] | None]:
        """Return host memory that receives new content for a flat tensor of bytes, and a function that copies it to the tensor.

        The function is None if the memory is the tensor's own.
        """
        return memory.numpy().data, None

    def host_memory(self, nbytes: int) -> Tensor:
        """Return host memory for copies from and to the device, or for swapped-out contents."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def sleep(self, ns: int) -> int:
        """Occupy the device for `ns` nanoseconds. Returns the device time in ns that this thread's CPU time does not include."""
        begun = time.perf_counter_ns()
        time.sleep(ns / 1e9)
        return time.perf_counter_ns() - begun

    # -- threads -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Prepare the calling thread for running programs."""

    def copy_context(self) -> AbstractContextManager[Any]:
        """Return a context in which another thread can copy without disturbing programs. The copies are complete at its end."""
        return contextlib.nullcontext()


def _mapped(numel: int, dtype: torch.dtype) -> Tensor:
    """New memory of the system, which is zero.

    Raises:
        OSError: there is not so much.
    """
    memory = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made = torch.frombuffer(memory, dtype=dtype)
    wish_for_huge_pages(made.data_ptr(), made.nbytes)
    return made


class InexactHost(TorchDevice):
    """The CPU, for plans that may have other bits than the library."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def library(self, call: LibraryCall, form: Form) -> LibraryCall:
        """See `TorchDevice`."""
        found = onednn_product(form)
        return super().library(call, form) if found is None else replace(call, instead=found)


HOST = TorchDevice(torch.device("cpu"))


def symbols_replaced(value: Any, device: torch.device) -> Any:
    """Replace the symbol for the device by `device` in an attribute."""
    if isinstance(value, Symbol) and value.kind == "device":
        return device
    if isinstance(value, tuple):
        return tuple([symbols_replaced(v, device) for v in value])
    return value
