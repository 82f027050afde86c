"""What asks a tensor for CUDA, or makes one there, before the dispatcher is reached."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext

from wooly.devices import NAME
from wooly.facade.names import CUDA, to_wooly, with_device
from wooly.storage import MAX_DEVICES
from wooly.torch_private import raw_device, raw_is_cuda

Patch = tuple[Any, str, Any]

#: Constructors whose binding asks for the device's guard before the dispatcher.
_GUARDED = (
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "range",
    "tril_indices",
    "triu_indices",
    "sparse_coo_tensor",
    "sparse_compressed_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_bsr_tensor",
    "sparse_bsc_tensor",
)


def patches() -> Iterator[Patch]:
    """(owner, name, value) of everything that is replaced on tensors and their constructors."""
    yield from _tensor_patches()
    for name in _GUARDED:
        yield (torch, name, with_device(getattr(torch, name)))
    real_init = DeviceContext.__init__

    def init(self: Any, device: Any) -> None:
        real_init(self, to_wooly(torch.device(device)))

    yield (DeviceContext, "__init__", init)


def _blocking(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `Tensor.to` without `non_blocking`, the first of its flags: PyTorch would want memory that it can pin."""
    for i, a in enumerate(args):
        if a is True or a is False:
            return (*args[:i], False, *args[i + 1 :])
    return args


def _tensor_patches() -> Iterator[Patch]:
    tensor = torch.Tensor
    shown = [torch.device(CUDA, index) for index in range(MAX_DEVICES)]

    def device(t: torch.Tensor) -> torch.device:
        """Device of the tensor; a Wooly device says cuda."""
        real = raw_device(t)
        return shown[real.index] if real.type == NAME else real

    def is_cuda(t: torch.Tensor) -> bool:
        """Whether the tensor lives on the (Wooly) CUDA device."""
        return raw_device(t).type == NAME or raw_is_cuda(t)

    yield (tensor, "device", property(device))
    yield (tensor, "is_cuda", property(is_cuda))
    real_to, real_type = tensor.to, tensor.type

    @functools.wraps(real_to)
    def to(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device, int)):
            args = (to_wooly(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = to_wooly(kwargs["device"])
        if "non_blocking" in kwargs:
            kwargs["non_blocking"] = False
        elif len(args) > 1:
            args = _blocking(args)
        return real_to(t, *args, **kwargs)

    @functools.wraps(tensor.cuda)
    def cuda(
        t: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> torch.Tensor:
        target = to_wooly(CUDA if device is None else device)
        return real_to(t, target, memory_format=memory_format)

    @functools.wraps(real_type)
    def type_(t: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        name = dtype if isinstance(dtype, str) else ""
        if dtype is None:
            said = real_type(t)
            return said.replace("torch.wooly.", "torch.cuda.") if isinstance(said, str) else said
        if name.startswith("torch.cuda."):
            plain = real_type(torch.empty(0), name.replace("torch.cuda.", "torch.")).dtype
            return real_to(t, to_wooly(CUDA), plain)
        return real_type(t, dtype, non_blocking, **kwargs)

    yield (tensor, "to", to)
    yield (tensor, "cuda", cuda)
    yield (tensor, "type", type_)
    yield (tensor, "get_device", lambda t: t.device.index if t.is_cuda else -1)
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"):
        yield (tensor, name, with_device(getattr(tensor, name)))
    real_new_tensor = with_device(tensor.new_tensor)

    @functools.wraps(tensor.new_tensor)
    def new_tensor(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:  # PyTorch would take the index from its guard, which knows one only
            kwargs["device"] = t.device
        return real_new_tensor(t, *args, **kwargs)

    yield (tensor, "new_tensor", new_tensor)
