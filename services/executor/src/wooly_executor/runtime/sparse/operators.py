"""The operators of the namespace `wooly_sparse`: a library call each. `wooly_wis.sparse` has their schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from wooly_wis.dtypes import BY_LABEL
from wooly_wis.sparse import (
    Argument,
    Dense,
    Layout,
    Named,
    Number,
    Sparse,
    SparseCall,
    SparseFacts,
    Written,
    parse_results,
)

from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.guards.law import require, require_no_overlap
from wooly_executor.runtime.sparse.laws import LAWS
from wooly_executor.runtime.sparse.library import LIBRARY
from wooly_executor.runtime.sparse.tensors import Order, in_order, made
from wooly_executor.runtime.torch_private import OpOverload, schema_of

_LAYOUTS: dict[str, torch.layout] = {layout.value: getattr(torch, layout.value) for layout in Layout} | {
    "strided": torch.strided
}
#: Operators that take batches of compressed tensors, and dense dimensions. The library composes them of dense operators, which
#: check their arguments. The library's other kernels do not all check for batches.
_OF_BATCHES = frozenset(
    (
        *("aten._to_dense.default", "aten._to_sparse.default", "aten._to_sparse.sparse_dim", "aten.mul.Tensor"),
        *(f"aten._to_sparse_{layout}.default" for layout in ("csr", "csc", "bsr", "bsc")),
    )
)
#: Operators of which this holds if their first argument is dense.
_OF_BATCHED_MASKS = frozenset(("aten.sparse_mask.default",))
#: Operators that take plain indices in any order, also repeated ones, if one argument is sparse and the result is dense. The
#: library's kernels visit the elements one by one, and use each index alone as an address.
_OF_ANY_ORDER = frozenset(
    (
        *("aten._to_dense.default", "aten.mm.default", "aten.mm.out", "aten.addmm.default", "aten.addmm_.default"),
        *("aten.addmm.out", "aten.mv.default", "aten.addmv.default", "aten.addmv.out"),
    )
)
#: Operators whose sparse result has indices of its own: sorted arguments give the same matrix. For other operators, the client or
#: a gradient may combine the result's values with an argument's indices, so the place of an element must stay.
_OF_SORTABLE = frozenset(("aten.mm.default",))
_parsed = lru_cache(4096)(SparseCall.parse)
_results = lru_cache(4096)(parse_results)


class _Given:
    """The arguments of one call, as the library takes them."""

    def __init__(
        self, text: str, tensors: Sequence[Tensor], numbers: Sequence[Any], written: Tensor | None = None
    ) -> None:
        self.call = _parsed(text)
        self._tensors, self._numbers, self._written = tensors, numbers, written
        self.args = [self._value(a) for a in self.call.args]
        self.kwargs = {k: self._value(a) for k, a in self.call.kwargs}

    def run(self) -> Any:
        """Check the law of the ATen operator, and call the operator.

        Raises:
            RuntimeError: an argument is not valid.
        """
        _, packet, overload = self.call.operator.split(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        self._require_written(op)
        law = LAWS.get(packet)
        if law is not None:
            law(*self.args, **self.kwargs)
        return op(*self.args, **self.kwargs)

    def _require_written(self, op: OpOverload) -> None:
        """Require that the call says of each argument truly whether the operator writes it."""
        given = dict(zip([a.name for a in schema_of(op).arguments], self.call.args, strict=False)) | dict(
            self.call.kwargs
        )
        written = {a.name for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write}
        said = {name for name, a in given.items() if isinstance(a, Written)}
        require(said == written, f"{op} writes {sorted(written)}, but the call says that it writes {sorted(said)}")

    @property
    def _takes_batches(self) -> bool:
        operator, first = self.call.operator, self.call.args[:1]
        return operator in _OF_BATCHES or (operator in _OF_BATCHED_MASKS and any(isinstance(a, Dense) for a in first))

    @property
    def _order(self) -> Order:
        operator = self.call.operator
        if len(self.call.sparse()) == 1:
            return Order.ANY if operator in _OF_ANY_ORDER else Order.SORTED
        return Order.SORTABLE if operator in _OF_SORTABLE else Order.SORTED

    def _value(self, a: Argument) -> Any:
        if isinstance(a, Sparse):
            return made(a, self._tensors, batches=self._takes_batches, order=self._order)
        if isinstance(a, Dense):
            require(a.at < len(self._tensors), "an argument refers to a tensor that the call does not have")
            return self._tensors[a.at]
        if isinstance(a, Number):
            require(a.at < len(self._numbers), "an argument refers to a number that the call does not have")
            return torch.scalar_tensor(self._numbers[a.at], dtype=_dtype(a.dtype)) if a.dtype else self._numbers[a.at]
        if isinstance(a, Named):
            return _dtype(a.name) if a.kind == "dtype" else _layout(a.name)
        if isinstance(a, Written):
            require(self._written is not None, "only the operator `update` writes a tensor")
            return self._written
        return [self._value(x) for x in a] if isinstance(a, tuple) else a


def _dtype(label: str) -> torch.dtype:
    require(label in BY_LABEL, f"{label[:32]!r} is not a dtype")
    return TORCH_DTYPE[BY_LABEL[label]]


def _layout(name: str) -> torch.layout:
    require(name in _LAYOUTS, f"{name[:32]!r} is not a layout")
    return _LAYOUTS[name]


def dense(call: str, results: str, tensors: list[Tensor], numbers: list[Any]) -> list[Tensor]:
    """Call an operator whose results are dense."""
    found = _Given(call, tensors, numbers).run()
    flat = list(found) if isinstance(found, (list, tuple)) else [found]
    require(all(isinstance(t, Tensor) and t.layout is torch.strided for t in flat), "a result is not a dense tensor")
    _require_announced(flat, results)
    return flat


def values(call: str, results: str, tensors: list[Tensor], numbers: list[Any]) -> list[Tensor]:
    """Call an operator whose result is sparse, and return the values of the result."""
    found = _Given(call, tensors, numbers).run()
    require(isinstance(found, Tensor) and found.layout is not torch.strided, "the result is not a sparse tensor")
    flat = [components(found)[2]]
    _require_announced(flat, results)
    return flat


def sparse(call: str, tensors: list[Tensor], numbers: list[Any]) -> tuple[Tensor | None, ...]:
    """Call an operator whose result is sparse; an operator without a result only checks its arguments."""
    found = _Given(call, tensors, numbers).run()
    if found is None:
        return None, None, None, None
    require(isinstance(found, Tensor) and found.layout is not torch.strided, "the result is not a sparse tensor")
    compressed, plain, own = components(found)
    if compressed is not None and compressed.dim() == 1:
        plain, own = in_order(compressed, plain, own)
    layout = next(k for k, v in _LAYOUTS.items() if v is found.layout)
    coalesced = layout == Layout.COO and found.is_coalesced()
    facts = SparseFacts(Layout(layout), tuple(found.shape), found.dense_dim(), coalesced)
    return compressed, plain, own, torch.empty(facts.shape(), dtype=torch.uint8, device=own.device)


def update(call: str, self: Tensor, tensors: list[Tensor], numbers: list[Any]) -> None:
    """Call an operator that writes `self`, a dense tensor.

    A kernel reads checked indices while it writes. So `self` must not have the memory of another operand.
    """
    require_no_overlap("self", self)
    mine = self.untyped_storage().data_ptr()
    require(
        not self.numel() or all(t.untyped_storage().data_ptr() != mine for t in tensors if t.dtype in _INDEX_DTYPES),
        "self must not share memory with the indices of a sparse tensor",
    )
    sizes = self.shape
    _Given(call, tensors, numbers, self).run()
    require(self.shape == sizes, f"the result has shape {list(self.shape)}, but self has {list(sizes)}")


_INDEX_DTYPES = (torch.int32, torch.int64)


def components(t: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return compressed indices (None for COO), plain indices and values of a sparse tensor."""
    if t.layout is torch.sparse_coo:
        return None, _coo_indices(t), _coo_values(t)
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return t.crow_indices(), t.col_indices(), t.values()
    return t.ccol_indices(), t.row_indices(), t.values()


_coo_indices: Callable[[Tensor], Tensor] = torch.ops.aten._indices.default
_coo_values: Callable[[Tensor], Tensor] = torch.ops.aten._values.default


def _require_announced(flat: list[Tensor], text: str) -> None:
    announced = [(r.sizes, r.dtype) for r in _results(text)]
    found = [(tuple(t.shape), t.dtype) for t in flat]
    require(
        [(sizes, _dtype(label)) for sizes, label in announced] == found,
        f"the results are {found}, but the call announced {announced}",
    )


for _kernel in (dense, values, sparse, update):
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
