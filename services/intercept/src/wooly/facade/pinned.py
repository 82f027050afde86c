"""Pinned host memory. Large tensors are in memory that the executor can access, if it is on this host (`wooly.pinned_area`). All
others are in ordinary memory, because the device is not on this machine's bus.

Programs pin tensors and check `is_pinned`. So `is_pinned` must be true for the tensors that a program has pinned, and for all
views of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from wooly_bus.channel.segment import SHARED_FROM

from wooly.devices import NAME
from wooly.facade.names import to_wooly
from wooly.pinned_area import allocate
from wooly.storage import pinned, span
from wooly.torch_private import (
    asked_for_pinned,
    is_fake,
    is_function_mode_active,
    raw_data_ptr,
    raw_device,
    replace_on_host,
    with_values,
)

Patch = tuple[Any, str, Any]
aten = torch.ops.aten

#: Alignment of pinned memory, in bytes; PyTorch's CPU allocator has the same alignment.
_ALIGNMENT = 64
#: Constructors that take `pin_memory`.
_FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "logspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
#: Layouts of compressed sparse tensors.
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_pinned(t: Tensor, device: Any = None) -> bool:
    """Whether the tensor is in memory that the program has pinned."""
    if _is_overridden(t):
        overridden: bool = handle_torch_function(is_pinned, (t,), *_arguments(t, device))
        return overridden
    if t.is_nested:
        return is_pinned(t.values(), device)
    if not t.is_cpu or t.layout is not torch.strided:
        return False
    answer: bool = aten.is_pinned.default(*_arguments(t, device))
    return answer


def pin_memory(t: Tensor, device: Any = None) -> Tensor:
    """The tensor itself if it is pinned, else a pinned copy. The gradient of the copy is the gradient of the tensor.

    Raises:
        RuntimeError: the tensor is not a dense or nested host tensor.
    """
    if _is_overridden(t):
        overridden: Tensor = handle_torch_function(pin_memory, (t,), *_arguments(t, device))
        return overridden
    if t.is_nested and t.is_cpu:
        return t if is_pinned(t) else with_values(t, pin_memory(t.values()))
    if not t.is_cpu or t.layout is not torch.strided:
        raise RuntimeError(f"cannot pin '{t.type()}' only dense CPU tensors can be pinned")
    if is_pinned(t, device):
        return t
    copied: Tensor = aten._pin_memory.default(*_arguments(t, device))
    return copied


def _is_overridden(t: Tensor) -> bool:
    return is_function_mode_active() or (type(t) is not Tensor and has_torch_function_unary(t))


def _arguments(t: Tensor, device: Any) -> tuple[Any, ...]:
    return (t,) if device is None else (t, device)


@cache
def answer_operators() -> None:
    """Compute the operators `is_pinned` and `_pin_memory` of host tensors. Subclasses call them for components."""
    replace_on_host("is_pinned", _is_pinned)
    replace_on_host("_pin_memory", lambda t, device=None: _copy(t))


def _is_pinned(t: Tensor, device: Any = None) -> bool:
    return t.untyped_storage().data_ptr() in pinned or raw_data_ptr(t) in asked_for_pinned


def _copy(t: Tensor) -> Tensor:
    nbytes = span(tuple(t.shape), t.stride()) * t.element_size()
    if not nbytes:
        return t.clone()
    memory = allocate(nbytes) if nbytes >= SHARED_FROM else None
    if memory is None:
        room = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        memory = room[start : start + nbytes]
    # The storage holds this array. When the array is freed, its address must not count as pinned any more.
    address = memory.ctypes.data
    flat = torch.from_numpy(memory)
    pinned.add(address)
    weakref.finalize(memory, pinned.discard, address).atexit = False
    # As CUDA's, the copy is no view and has not been changed.
    return flat.view(t.dtype).as_strided(t.shape, t.stride()).copy_(t).data


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a constructor so that `pin_memory=True` works without CUDA.

    For a compressed sparse tensor, PyTorch makes the new one without the dispatcher, so its device must have its real type.
    """

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if not kwargs.get("pin_memory"):
            if "device" in kwargs and args and isinstance(args[0], Tensor) and args[0].layout in _COMPRESSED:
                kwargs["device"] = to_wooly(kwargs["device"])
            return make(*args, **kwargs)
        made = make(*args, **{**kwargs, "pin_memory": False})
        if raw_device(made).type == NAME:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return made if is_fake(made) else pin_memory(made)

    return call


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for functions that pin memory or check whether memory is pinned."""
    answer_operators()
    for name in _FACTORIES:
        yield (torch, name, _pinning(getattr(torch, name)))
    for name in _METHODS:
        yield (Tensor, name, _pinning(getattr(Tensor, name)))
    yield (Tensor, "pin_memory", pin_memory)
    yield (Tensor, "is_pinned", is_pinned)
