"""Laws of ATen operators on sparse tensors: what their kernels do not check.

Every sparse argument has been checked by itself (`tensors.made`). These laws relate arguments to each other, and limit memory and
work that only the values of the indices determine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly_executor.runtime.guards.law import require
from wooly_executor.runtime.sparse.tensors import check_compressed

#: Maximum number of products of two elements in a product of two sparse matrices. The result has at most as many elements.
MAX_PRODUCTS = 1 << 31


def _same_pattern(grad: Any, output: Any, dim: Any, own: Any) -> None:
    """The gradient of a softmax: the kernel reads the values of one tensor at the places of another."""
    for name, t in (("grad_output", grad), ("output", output), ("self", own)):
        require(isinstance(t, Tensor) and t.layout is torch.sparse_coo, f"{name} must be a COO tensor")
        require(t.shape == own.shape and t.dense_dim() == own.dense_dim(), f"{name} must have the dimensions of self")
        require(t.dtype is own.dtype, f"{name} must have the dtype of self: {own.dtype}")
        require(t.is_coalesced(), f"{name} must be coalesced")
    require(output.indices().shape == own.indices().shape, "output must have the elements of self")
    require(bool((output.indices() == own.indices()).all()), "output must have the indices of self")


def _sum_backward(grad: Any, own: Any, dim: Any) -> None:
    require(isinstance(own, Tensor) and own.layout is torch.sparse_coo and own.is_coalesced(), "self must be coalesced")
    require(
        all(-own.dim() <= d < own.dim() for d in dim), f"dim must be dimensions of a tensor of {own.dim()} dimensions"
    )
    summed = {d % own.dim() for d in dim}
    left = [n for k, n in enumerate(own.shape) if k not in summed]
    require(isinstance(grad, Tensor) and list(grad.shape) == left, f"the gradient must have the shape {left}")
    require(grad.dtype is own.dtype, f"the gradient must have the dtype of self: {own.dtype}")
    if grad.layout is torch.sparse_coo:
        inner = sum([k < own.sparse_dim() and k not in summed for k in range(own.dim())])
        require(
            grad.is_coalesced() and grad.sparse_dim() == inner,
            f"the gradient must be coalesced, with {inner} dimensions",
        )
    else:
        require(grad.layout is torch.strided, "the gradient must be a COO tensor or dense")


def _sparse_product(*args: Any, **kwargs: Any) -> None:
    """A product of two sparse matrices: its work depends on the values of the indices."""
    pair = [a for a in args if isinstance(a, Tensor) and a.layout is not torch.strided]
    if len(pair) < 2:
        return
    a, b = pair[-2:]
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or not _count(a) or not _count(b):
        return
    if any(t.layout in (torch.sparse_bsr, torch.sparse_bsc) for t in pair):
        raise RuntimeError("products of two blocked sparse matrices are not supported; convert them: to_sparse_csr()")
    row = torch.bincount(_indices(b, 0), minlength=b.shape[0])
    products = int(row[_indices(a, 1)].sum())
    require(
        products <= MAX_PRODUCTS,
        f"the product of two sparse matrices takes {products:,} multiplications, at most {MAX_PRODUCTS:,} are allowed",
    )


def _count(t: Tensor) -> int:
    """Return the number of elements of a matrix."""
    return _indices(t, 1 if t.layout is torch.sparse_csr else 0).shape[0]


def _indices(t: Tensor, dim: int) -> Tensor:
    """Return the index of each element of a matrix in a dimension."""
    if t.layout is torch.sparse_coo:
        return torch.ops.aten._indices.default(t)[dim]  # type: ignore[no-any-return]
    by_row = t.layout is torch.sparse_csr
    compressed, plain = (t.crow_indices(), t.col_indices()) if by_row else (t.ccol_indices(), t.row_indices())
    if dim == (1 if by_row else 0):
        return plain
    counts = compressed.diff()
    return torch.repeat_interleave(torch.arange(len(counts), device=t.device), counts)


def _compressed_indices(by_row: Any, compressed: Tensor, plain: Tensor, rows: Any, columns: Any, nnz: Any) -> None:
    """The library's own check. Its kernel for GPUs asserts, so the check must pass here before."""
    counted = isinstance(rows, int) and isinstance(columns, int)
    require(counted and plain.dim() > 0 and bool(nnz == plain.shape[-1]), "the counts must be numbers")
    check_compressed(compressed, plain, rows, columns)


#: Laws by the operator's name; a law takes the arguments of the operator.
LAWS: dict[str, Callable[..., None]] = {
    "_sparse_softmax_backward_data": _same_pattern,
    "_sparse_log_softmax_backward_data": _same_pattern,
    "_sparse_sum_backward": _sum_backward,
    "_sparse_sparse_matmul": _sparse_product,
    "mm": _sparse_product,
    "addmm": _sparse_product,
    "addmm_": _sparse_product,
    "_validate_compressed_sparse_indices": _compressed_indices,
}
