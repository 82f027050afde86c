"""Turns the arguments of a call with sparse tensors into the text of a call and its dense operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.sparse import Argument, Dense, Layout, Named, Number, Sparse, SparseCall, Written

from wooly.devices import mixed_devices
from wooly.dtypes import DTYPES
from wooly.kernels.forms import number_of
from wooly.kernels.resolving import plain
from wooly.torch_private import OpOverload, coo_components, raw_device, schema_of


class Encoded(NamedTuple):
    """A call with sparse tensors.

    Attributes:
        call: the call, with positions in place of tensors and numbers.
        tensors: the dense operands.
        numbers: the numbers.
        written: the dense tensor that the operator writes, or None.
    """

    call: SparseCall
    tensors: list[Tensor]
    numbers: list[Any]
    written: Tensor | None


def is_sparse(t: Any) -> bool:
    """Whether `t` is a tensor of a sparse layout."""
    return isinstance(t, Tensor) and t.layout is not torch.strided


def components(t: Tensor) -> tuple[list[Tensor], Tensor]:
    """The index tensors of a sparse tensor (compressed indices first) and its values."""
    if t.layout is torch.sparse_coo:
        indices, values = coo_components(t)
        return [indices], values
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices()], t.values()
    return [t.ccol_indices(), t.row_indices()], t.values()


def encode(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
    """Turn the arguments of a call into text and operands.

    Raises:
        RuntimeError: a tensor is on another device.
        NotImplementedError: an argument has a type that a call cannot contain.
    """
    return _Encoder(op).encode(args, kwargs)


class _Encoder:
    def __init__(self, op: OpOverload) -> None:
        self._op = op
        self._declared = schema_of(op).arguments
        self._tensors: list[Tensor] = []
        self._numbers: list[Any] = []
        self._written: Tensor | None = None

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
        declared = {a.name: a for a in self._declared}
        own = tuple([self._argument(a, d) for a, d in zip(args, self._declared, strict=False)])
        named = tuple([(k, self._argument(v, declared[k])) for k, v in kwargs.items()])
        return Encoded(SparseCall(str(self._op), own, named), self._tensors, self._numbers, self._written)

    def _argument(self, a: Any, declared: Any) -> Argument:
        if isinstance(a, Tensor):
            return self._tensor(a, declared.alias_info is not None and declared.alias_info.is_write)
        if isinstance(a, (bool, int, float, complex)) and _takes_number(str(declared.type)):
            self._numbers.append(a)
            return Number(len(self._numbers) - 1, "")
        if isinstance(a, (list, tuple)):
            return tuple([self._argument(x, declared) for x in a])
        if a is None or isinstance(a, (bool, int, float, str)):
            return a
        if isinstance(a, torch.dtype):
            return Named("dtype", DTYPES[a].label)
        if isinstance(a, torch.layout):
            return Named("layout", str(a).removeprefix("torch."))
        raise NotImplementedError(
            f"{self._op}: an argument of type {type(a).__name__} is not supported with sparse tensors on the wooly device; "
            "compute it on the CPU: x.cpu()"
        )

    def _tensor(self, t: Tensor, written: bool) -> Argument:
        if raw_device(t).type != "wooly":
            if is_sparse(t):
                raise mixed_devices([t])
            value, dtype = number_of(t)
            self._numbers.append(value)
            return Number(len(self._numbers) - 1, "" if dtype is None else dtype.label)
        if t.layout is torch.strided:
            if written:
                self._written = t
                return Written()
            return Dense(self._operand(t))
        indices, values = components(t)
        coalesced = t.layout is torch.sparse_coo and t.is_coalesced()
        layout = Layout(str(t.layout).removeprefix("torch."))
        at = tuple([self._operand(i) for i in indices])
        return Sparse(layout, tuple(t.shape), at, self._operand(values), coalesced)

    def _operand(self, t: Tensor) -> int:
        for k, known in enumerate(self._tensors):
            if known is t:
                return k
        if t.is_conj() or t.is_neg():
            t = plain(t)
        self._tensors.append(t)
        return len(self._tensors) - 1


def _takes_number(kind: str) -> bool:
    return kind in ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]")
