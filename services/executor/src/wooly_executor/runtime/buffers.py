"""The buffers of a session: memory that torch owns, seen through the view that each instruction needs."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor
from wooly_wis.dtypes import DType
from wooly_wis.program import View

from wooly_executor.errors import OperationError
from wooly_executor.runtime.torch_private import reinterpret

#: Maximum number of views that are remembered.
VIEWS_KEPT = 1 << 16

TORCH_DTYPE: dict[DType, torch.dtype] = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.I16: torch.int16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.U16: torch.uint16,
    DType.U32: torch.uint32,
    DType.U64: torch.uint64,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.C32: torch.complex32,
    DType.C64: torch.complex64,
    DType.C128: torch.complex128,
    DType.F8E4M3FN: torch.float8_e4m3fn,
    DType.F8E5M2: torch.float8_e5m2,
    DType.F8E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.F8E5M2FNUZ: torch.float8_e5m2fnuz,
    DType.F8E8M0FNU: torch.float8_e8m0fnu,
}
WIS_DTYPE: dict[torch.dtype, DType] = {v: k for k, v in TORCH_DTYPE.items()}


#: Returns the next number of a buffer or a session (`Buffer.number`).
next_number = itertools.count().__next__


class Buffer:
    """One buffer of one session.

    Attributes:
        nbytes: size that the session is charged for.
        base: a tensor on the buffer's storage, with storage offset 0; None while the buffer is poisoned.
        view: the view of `base` if `base` is the result of an operator, so that this view needs no new tensor.
        poison: the error because of which the content is missing; empty if the buffer is valid.
        number: a number that is larger than those of all buffers and sessions before. Clients use the ids of buffers again.
    """

    __slots__ = ("base", "nbytes", "number", "poison", "view")

    def __init__(self, nbytes: int, base: Tensor | None, view: View | None = None, poison: str = "") -> None:
        self.nbytes = nbytes
        self.base = base
        self.view = view
        self.poison = poison
        self.number = next_number()


class Buffers(dict[int, Buffer]):
    """The buffers of a session by id, poisoned ones included.

    Attributes:
        owed_ns: device time of launches in flight that has turned out longer (or, if negative, shorter) than what the session was
            charged. Its next launch is charged for it.
        unchecked: number of launches in flight that may have reported a violation.
        number: see `Buffer`.
        lost_late: buffers that were poisoned since the session's last run began, because an earlier run failed when its launch
            landed, with the error. Some may not exist any more.
    """

    __slots__ = ("lost_late", "number", "owed_ns", "unchecked")

    def __init__(self) -> None:
        super().__init__()
        self.owed_ns = self.unchecked = 0
        self.number = next_number()
        self.lost_late: dict[int, str] = {}


def as_view(base: Tensor, view: View) -> Tensor:
    """Return the tensor that `view` describes, on the storage of `base` (whose storage offset must be 0)."""
    dtype = TORCH_DTYPE[view.dtype]
    if base.dtype is dtype:
        return reinterpret(base, view.sizes, view.strides, view.offset // dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=base.device).set_(
        base.untyped_storage(), view.offset // dtype.itemsize, view.sizes, view.strides
    )


def bytes_of(base: Tensor, offset: int, nbytes: int) -> Tensor:
    """Return the memory of a buffer as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=base.device).set_(base.untyped_storage(), offset, (nbytes,), (1,))


def required_view(view: View | None) -> View:
    """Return the first view that is equal to `view`. A run compares views by identity (see `bindings.gathering`).

    Raises:
        OperationError: there is no view.
    """
    if view is None:
        raise OperationError("an operand has no view, but the instruction needs its shape; give the operand a view")
    return _interned(view)


@functools.lru_cache(VIEWS_KEPT)
def _interned(view: View) -> View:
    return view
