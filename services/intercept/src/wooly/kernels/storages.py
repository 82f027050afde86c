"""Kernels that change the storages of tensors, and the sizes of storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.device_copies import DeviceCopies
from wooly.kernels.factories import Factories, visible_value
from wooly.storage import contiguous_strides, span
from wooly.torch_private import raw_device, raw_storage_device, redispatch_cpu, swap_memory

_set_cpu = redispatch_cpu(torch.ops.aten.set_.source_Storage_storage_offset)


class Storages:
    """The kernels of this file, for all devices."""

    def __init__(self, factories: Factories, copies: DeviceCopies) -> None:
        self._factories = factories
        self._copies = copies

    def resize(self, t: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Resize `t` and keep its leading bytes, as `resize_` does. If its storage grows, it does so for all its tensors.

        Before torch 2.13, which cannot exchange the memory of storages, `t` gets a storage of its own.
        """
        need = span(sizes, strides) * t.element_size()
        here = int(t.storage_offset()) * t.element_size()
        held = t.untyped_storage()
        have = held.nbytes()
        if not need or here + need <= have:
            _set_cpu(t, held, t.storage_offset(), sizes, strides)
            return
        if swap_memory is not None:
            self.resize_storage(held, here + need)
        else:
            grown = self._factories.empty([here + need], dtype=torch.uint8, device=raw_device(t))
            if have:
                old = torch.empty(0, dtype=torch.uint8, device=raw_device(t))
                _set_cpu(old, held, 0, (have,), (1,))
                self._copies.record(grown[:have], old)
            held = grown.untyped_storage()
        _set_cpu(t, held, t.storage_offset(), sizes, strides)
        if self._factories.fills_memory:
            first, end = have // t.element_size(), (here + need) // t.element_size()
            rest = torch.empty(0, dtype=t.dtype, device=raw_device(t))
            _set_cpu(rest, held, first, (end - first,), (1,))
            rest.fill_(visible_value(t.dtype))

    def resize_(self, t: Tensor, size: list[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
        """`aten.resize_`."""
        sizes = tuple(size)
        strides = contiguous_strides(sizes)
        if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
            strides = torch.empty(sizes, device="meta", memory_format=memory_format).stride()
        if tuple(t.shape) != sizes or memory_format is not None:
            self.resize(t, sizes, strides)
        return t

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Change the size of a device storage in place. All its tensors see the new memory and keep their shapes.

        The leading bytes stay. Memory that is not used any more is freed with the next program.

        Raises:
            NotImplementedError: this release of PyTorch cannot exchange the memory of storages.
            torch.OutOfMemoryError: the executor has no memory for the storage.
        """
        have = storage.nbytes()
        if nbytes == have:
            return
        if nbytes < 0:  # CUDA takes it for a size without sign
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")
        if swap_memory is None:
            raise NotImplementedError(
                f"resizing a storage (as fully sharded training does) is not supported on the wooly device with torch "
                f"{torch.__version__}; install torch 2.13, resize the tensor with t.resize_(...), or make a new one"
            )
        device = raw_storage_device(storage)
        grown = self._factories.bytes_of_new(nbytes, device)
        kept = min(have, nbytes)
        if kept:
            old = torch.empty(0, dtype=torch.uint8, device=device)
            _set_cpu(old, storage, 0, (kept,), (1,))
            self._copies.record(grown[:kept], old)
        if have:
            swap_memory(storage, self._factories.bytes_of_new(0, device).untyped_storage())
        if nbytes:
            swap_memory(storage, grown.untyped_storage())

    def set_storage(self, t: Tensor, source: Any) -> Tensor:
        """`aten.set_.source_Storage`."""
        n = source.nbytes() // t.element_size()
        return _set_cpu(t, source, 0, (n,), (1,))  # type: ignore[no-any-return]

    def set_within(
        self, t: Tensor, source: Any, offset: int, size: list[int], stride: list[int] | None = None
    ) -> Tensor:
        """`aten.set_.source_Storage_storage_offset`. A storage that is too small grows, as CUDA's does."""
        sizes = tuple(size)
        strides = tuple(stride) if stride else contiguous_strides(sizes)
        elements = span(sizes, strides)
        need = (offset + elements) * t.element_size()
        if elements and need > source.nbytes() and swap_memory is not None:
            self.resize_storage(source, need)
        return _set_cpu(t, source, offset, sizes, strides)  # type: ignore[no-any-return]

    def set_tensor(self, t: Tensor, source: Tensor) -> Tensor:
        """`aten.set_.source_Tensor`."""
        return _set_cpu(  # type: ignore[no-any-return]
            t, source.untyped_storage(), source.storage_offset(), tuple(source.shape), source.stride()
        )

    def set_none(self, t: Tensor) -> Tensor:
        """`aten.set_` without arguments: set an empty storage."""
        return self.set_tensor(t, self._factories.empty([0], dtype=t.dtype, device=raw_device(t)))

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name, for registration under PrivateUse1."""
        return {
            "resize_": self.resize_,
            "set_.source_Storage": self.set_storage,
            "set_.source_Storage_storage_offset": self.set_within,
            "set_.source_Tensor": self.set_tensor,
            "set_": self.set_none,
        }
