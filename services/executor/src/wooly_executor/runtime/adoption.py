"""Turns results of library operators into buffers.

A result is copied only if it does not have the layout that the program announced.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import View

from wooly_executor.errors import OperationError
from wooly_executor.runtime.buffers import TORCH_DTYPE, WIS_DTYPE, Buffer, as_view
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.frame import Frame
from wooly_executor.runtime.torch_private import address_of_storage, shares_storage, uses_of


class Layout(enum.IntEnum):
    """What is known about the layout of a result."""

    #: Nothing, or that it must be copied into the announced layout.
    UNKNOWN = 0
    #: It is the announced one.
    SAME = 1
    #: Its elements are where they were announced. Only strides of dimensions of size 1 differ, which no address depends on.
    SAME_PLACES = 2


def adopted(t: Any, view: View, f: Frame, device: TorchDevice) -> tuple[Tensor, Layout]:
    """Return a tensor that can become the buffer that `view` describes, and what the layout of `t` was.

    The tensor is `t`, or another tensor on its memory, or a copy.
    """
    found = adoptable(t, view, f, device)
    if found is t:
        return found, Layout.SAME
    return found, Layout.SAME_PLACES if shares_storage(found, t) else Layout.UNKNOWN


def adoptable(t: Any, view: View, f: Frame, device: TorchDevice) -> Tensor:
    """Return `t` if it can become the buffer that `view` describes, else another tensor on its memory or a copy that can."""
    if not isinstance(t, Tensor):
        raise OperationError(f"the operator returned a {type(t).__name__} , but the program announced a tensor")
    if tuple(t.shape) != view.sizes:
        t = device.result(t, view.sizes)
    if tuple(t.shape) != view.sizes:
        raise OperationError(f"the result has shape {list(t.shape)}, but the program announced {list(view.sizes)}")
    dtype = TORCH_DTYPE[view.dtype]
    if (
        t.dtype is dtype
        and t.device == device.device
        and (t.stride() == view.strides or same_places(t, view))
        and t.storage_offset() == 0
        and not t.is_conj()
        and not t.is_neg()
        and (
            _is_alone(t, f.registers)
            or not any((isinstance(r, Tensor) and r.is_set_to(t)) or _shares(r, t) for r in f.registers)
        )
    ):
        fits: Tensor = t if t.stride() == view.strides else as_view(t, view)
        return fits
    own = as_view(device.empty(t.numel(), dtype) if view.fills(view.end) else device.zeroed(view.end, dtype), view)
    own.copy_(t)
    return own


def same_places(t: Tensor, view: View) -> bool:
    """Whether the strides of `t`, which has the shape of `view`, differ from its strides only in dimensions of size 1."""
    strides = zip(t.stride(), view.strides, view.sizes, strict=True)
    return t.numel() > 0 and all(mine == other or size == 1 for mine, other, size in strides)


def put(t: Tensor, target: Tensor, device: TorchDevice) -> None:
    """Copy a result into the memory that the program announced for it."""
    target.copy_(t if t.shape == target.shape else device.result(t, tuple(target.shape)))


def fits(t: Tensor, view: View) -> bool:
    """Whether `t` has the layout of `view`. Its layout may depend on numbers and contents that change from run to run."""
    return t.shape == view.sizes and t.stride() == view.strides and t.storage_offset() == 0


def fits_places(t: Tensor, view: View) -> bool:
    """Whether the elements of `t` are where `view` has them, though strides may differ in dimensions of size 1."""
    return t.shape == view.sizes and t.storage_offset() == 0 and same_places(t, view)


def _is_alone(t: Tensor, registers: Sequence[Any]) -> bool:
    """Whether no other tensor uses the memory of `t`, and no register has `t` itself."""
    # used by `t`, and by the storage's Python object
    return uses_of(address_of_storage(t.untyped_storage())) <= 2 and id(t) not in map(id, registers)


def _shares(r: Any, t: Tensor) -> bool:
    return isinstance(r, Tensor) and r.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() and t.numel() > 0


def adopt_dynamic(f: Frame, slot: int, t: Tensor | None, device: TorchDevice) -> dict[str, Any] | None:
    """Turn a result whose shape the program does not know into a buffer. Returns its description for the client."""
    if t is None:
        return None
    if t.is_conj() or t.is_neg() or t.storage_offset() or any(_shares(r, t) for r in f.registers):
        t = t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if t.device != device.device:
        t = t.to(device.device)
    view = View(WIS_DTYPE[t.dtype], tuple(t.shape), tuple(t.stride()), 0)
    nbytes = view.end
    f.buffers[f.bindings[slot]] = Buffer(nbytes, t, view)
    return {
        "buffer": f.bindings[slot],
        "dtype": view.dtype.label,
        "sizes": list(view.sizes),
        "strides": list(view.strides),
        "offset": 0,
        "nbytes": nbytes,
    }
