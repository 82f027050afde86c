"""Makes sparse tensors of a call from its dense operands, and checks them.

The library's sparse kernels use indices as addresses without a check. They trust that the indices are in bounds, and that those
of a coalesced tensor are sorted and distinct. So every index is checked in every call, before a kernel sees it. On a GPU, the
host waits for the answer; the library's own checks there are assertions that would end the context of all tenants.

PyTorch also makes CSR and CSC tensors whose plain indices are not sorted or not distinct, unless a script asks for checks. Some
kernels need no order, and for others the executor sorts first: see `Order`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor
from wooly_wis.sparse import Layout, Sparse

from wooly_executor.runtime.guards.law import require

_MAKE: dict[Layout, Callable[..., Tensor]] = {
    Layout.CSR: torch.sparse_csr_tensor,
    Layout.CSC: torch.sparse_csc_tensor,
    Layout.BSR: torch.sparse_bsr_tensor,
    Layout.BSC: torch.sparse_bsc_tensor,
}
_BLOCKED = (Layout.BSR, Layout.BSC)
_UNBLOCKED = (Layout.CSR, Layout.CSC)
#: Layouts whose compressed dimension is that of the rows.
_BY_ROW = (Layout.CSR, Layout.BSR)


class Order(Enum):
    """What an operator needs of the plain indices of a row, in CSR and CSC tensors."""

    #: They must be sorted and distinct. BSR and BSC tensors always need this.
    SORTED = "sorted"
    #: The executor sorts them and adds up the elements of an index, so the result must not depend on the place of an element in
    #: its row, and an element must be the sum of its parts.
    SORTABLE = "sortable"
    #: They may be in any order, and an index may occur several times.
    ANY = "any"


def made(a: Sparse, tensors: Sequence[Tensor], *, batches: bool = False, order: Order = Order.SORTED) -> Tensor:
    """Make a sparse argument.

    Args:
        a: the argument.
        tensors: the dense operands of the call.
        batches: whether a compressed tensor may be a batch of matrices, and have dense dimensions.
        order: what the operator needs of the plain indices of a row.

    Raises:
        RuntimeError: the components do not fit together, or an index is out of range.
    """
    require(
        max(*a.indices, a.values) < len(tensors), "a sparse argument refers to a tensor that the call does not have"
    )
    indices, values = [tensors[k] for k in a.indices], tensors[a.values]
    for t in (*indices, values):
        require(t.layout is torch.strided and not t.is_conj() and not t.is_neg(), "a component must be a plain tensor")
    # Some kernels take the address of the first element and assume that the others follow.
    indices, values = [i.contiguous() for i in indices], values.contiguous()
    if a.layout is Layout.COO:
        return _coo(a, indices[0], values)
    return _compressed(a, indices[0], indices[1], values, batches, order)


def _coo(a: Sparse, indices: Tensor, values: Tensor) -> Tensor:
    require(
        indices.dtype is torch.int64 and indices.dim() == 2, "the indices must be an int64 tensor of two dimensions"
    )
    sparse_dim, nnz = indices.shape
    require(
        values.dim() >= 1 and values.shape[0] == nnz, f"there are {nnz} indices, but {list(values.shape[:1])} values"
    )
    require(
        sparse_dim + values.dim() - 1 == len(a.size), "the dimensions of indices and values are not those of the size"
    )
    dense = a.size[sparse_dim:]
    require(tuple(values.shape[1:]) == dense, f"values must have the shape {[nnz, *dense]}, not {list(values.shape)}")
    if nnz:
        require(
            sparse_dim > 0 or nnz <= 1 or not a.coalesced, "a coalesced tensor without indices has one value at most"
        )
        if sparse_dim:
            low, high = indices.aminmax(dim=1)
            for k, (least, most) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
                _require_bounds(f"dimension {k}", least, most, a.size[k])
    if a.coalesced and nnz > 1:
        place = torch.zeros(nnz, dtype=torch.int64, device=indices.device)
        for k in range(sparse_dim):
            place = place * a.size[k] + indices[k]
        require(
            bool((place[1:] > place[:-1]).all()), "the indices of a coalesced tensor are not sorted or not distinct"
        )
    return torch.sparse_coo_tensor(indices, values, a.size, is_coalesced=a.coalesced, check_invariants=False)


def _compressed(a: Sparse, compressed: Tensor, plain: Tensor, values: Tensor, batches: bool, order: Order) -> Tensor:
    dtypes = {compressed.dtype, plain.dtype}
    require(
        len(dtypes) == 1 and dtypes <= {torch.int32, torch.int64}, "the indices must both be int32 or both be int64"
    )
    require(plain.dim() >= 1, "the plain indices must have a dimension")
    blocked, batch, nnz = a.layout in _BLOCKED, tuple(plain.shape[:-1]), plain.shape[-1]
    at = len(batch) + 2  # the first dense dimension
    require(len(a.size) >= at and tuple(a.size[: at - 2]) == batch, f"the size must begin with the batch {list(batch)}")
    matrix, dense = a.size[at - 2 : at], tuple(a.size[at:])
    require(
        batches or not (batch or dense),
        "the operator takes no batches of compressed sparse tensors, and none with dense dimensions",
    )
    require(
        values.dim() >= at - 1 and values.shape[at - 2] == nnz,
        f"there are {nnz} indices, but {list(values.shape)[at - 2 : at - 1]} values",
    )
    block = tuple(values.shape[at - 1 : at + 1]) if blocked else ()
    shape = (*batch, nnz, *block, *dense)
    require(
        len(block) == 2 * blocked and tuple(values.shape) == shape,
        f"values must have the shape {list(shape)}, not {list(values.shape)}",
    )
    sides = block or (1, 1)
    require(
        min(sides) > 0 and not any(n % b for n, b in zip(matrix, sides, strict=True)), "the blocks do not fit the size"
    )
    counts = [n // b for n, b in zip(matrix, sides, strict=True)]
    rows, columns = counts if a.layout in _BY_ROW else counts[::-1]
    if a.layout not in _UNBLOCKED or order is Order.SORTED:
        check_compressed(compressed, plain, rows, columns)
    else:
        row = _rows_of_elements(compressed, plain, rows, columns, plain.shape[-1])
        if order is Order.SORTABLE and not batch:
            compressed, plain, values = _distinct(compressed, plain, values)
        elif order is Order.SORTABLE:
            _require_order(row, plain, columns)
    return _MAKE[a.layout](compressed, plain, values, a.size, check_invariants=False)


def in_order(compressed: Tensor, plain: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Plain indices and values of a compressed matrix in the order of the indices.

    The library's products of two sparse matrices leave the elements of a row in any order, and its other kernels need the order.
    """
    counts = compressed.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=plain.device), counts, output_size=len(plain))
    if not len(plain):
        return plain, values
    place = rows * (plain.max() + 1) + plain
    if bool((place[1:] > place[:-1]).all()):
        return plain, values
    order = place.argsort()
    return plain[order], values[order]


def _distinct(compressed: Tensor, plain: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The components of a compressed matrix with the plain indices in order, and one element in place of those of one index."""
    plain, values = in_order(compressed, plain, values)
    counts = compressed.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=plain.device), counts, output_size=len(plain))
    repeated = (rows[1:] == rows[:-1]) & (plain[1:] == plain[:-1])
    if not bool(repeated.any()):
        return compressed, plain, values
    first = torch.cat([torch.ones_like(repeated[:1]), ~repeated])
    added = values.new_zeros(int(first.sum())).index_add(0, first.cumsum(0) - 1, values)
    left = torch.bincount(rows[first], minlength=len(counts)).cumsum(0)
    return torch.cat([compressed[:1], left.to(compressed.dtype)]), plain[first], added


def check_compressed(compressed: Tensor, plain: Tensor, rows: int, columns: int) -> None:
    """Check compressed and plain indices.

    Args:
        compressed: where each row begins, (batch, rows + 1). The batch has any number of dimensions.
        plain: the column of each element, (batch, nnz).
        rows: number of rows; for CSC and BSC, of columns.
        columns: number of columns; for CSC and BSC, of rows.

    Raises:
        RuntimeError: an index is out of range, or the columns of a row are not sorted and distinct.
    """
    _require_order(_rows_of_elements(compressed, plain, rows, columns, columns), plain, columns)


def _rows_of_elements(compressed: Tensor, plain: Tensor, rows: int, columns: int, longest: int) -> Tensor:
    """Check that all indices are in range and that no row has more than `longest` elements.

    Returns:
        The row of each element, counted over all batches: (batch * nnz).
    """
    require(
        compressed.dim() >= 1 and compressed.shape[:-1] == plain.shape[:-1],
        f"compressed indices {list(compressed.shape)} and plain indices {list(plain.shape)} must have the same batch",
    )
    nnz, batches = plain.shape[-1], math.prod(plain.shape[:-1])
    require(
        compressed.shape[-1] == rows + 1, f"there must be {rows + 1} compressed indices, not {compressed.shape[-1]}"
    )
    none = torch.empty(0, dtype=torch.int64, device=plain.device)
    if not batches:
        return none
    starts = compressed.reshape(batches, rows + 1).to(torch.int64)
    counts = starts.diff(dim=1)
    first, last = starts[:, 0].aminmax(), starts[:, -1].aminmax()
    ends = torch.stack([*first, *last, *(counts.aminmax() if rows else first)]).tolist()
    require(
        ends[:4] == [0, 0, nnz, nnz],
        f"the compressed indices must go from 0 to {nnz}, but go from {ends[0]} to {ends[3]}",
    )
    if not nnz:
        require(not rows or ends[4] == ends[5] == 0, "the compressed indices must be 0 for a tensor without elements")
        return none
    require(
        ends[4] >= 0 and ends[5] <= longest,
        f"a row must have 0 to {longest} elements, but one has {ends[4]} or {ends[5]}",
    )
    least, most = torch.stack(plain.aminmax()).tolist()
    _require_bounds("the plain indices", least, most, columns)
    return torch.repeat_interleave(
        torch.arange(batches * rows, device=plain.device), counts.reshape(-1), output_size=batches * nnz
    )


def _require_order(row: Tensor, plain: Tensor, columns: int) -> None:
    place = row * columns + plain.reshape(-1)
    require(bool((place[1:] > place[:-1]).all()), "the plain indices of a row are not sorted or not distinct")


def _require_bounds(what: str, least: int, most: int, size: int) -> None:
    require(
        least >= 0 and most < size,
        f"index out of range: {what} has size {size}, but the indices go from {least} to {most}",
    )
