"""LU factorisation without pivoting for CPUs, whose library has it for CUDA only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly_executor.runtime.calls import LibraryCall, function_of

#: Columns that are eliminated one by one, before one product updates all other columns.
BLOCK = 32
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_OPERATORS = ("linalg_lu", "linalg_lu_factor_ex")


def unpivoted(call: LibraryCall) -> Callable[..., Any] | None:
    """Return the function that computes a call that may ask for LU without pivoting; None: the library computes it."""
    name = call.op.overloadpacket.__name__
    if call.op.namespace != "aten" or name not in _OPERATORS or dict(call.kwargs).get("pivot", True) is True:
        return None
    library, compute = function_of(call.op), _lu if name == "linalg_lu" else _lu_factor

    def run(a: Tensor, *, pivot: bool, check_errors: bool = False, **outs: Tensor) -> Any:
        if pivot:
            checks = {} if name == "linalg_lu" else {"check_errors": check_errors}
            return library(a, pivot=pivot, **checks, **outs)
        found = compute(a)
        if check_errors:
            torch.ops.aten._linalg_check_errors(found[-1], "torch.linalg.lu_factor_ex", is_matrix=a.dim() == 2)
        for out, t in zip(outs.values(), found, strict=True) if outs else ():
            if out.shape != t.shape:
                raise RuntimeError(f"out= must have the shape {list(t.shape)}, but it has {list(out.shape)}")
            out.copy_(t)
        return tuple(outs.values()) or found

    return run


def _lu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The empty P, and L and U."""
    factors = _eliminate(a)
    k = min(factors.shape[-2:])
    lower = factors[..., :k].tril(-1)
    lower.diagonal(dim1=-2, dim2=-1).fill_(1)
    return a.new_zeros(0), lower, factors[..., :k, :].triu()


def _lu_factor(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L and U in one matrix, the rows in their order as pivots, and for each matrix the first column whose pivot is 0, or 0."""
    factors = _eliminate(a)
    k = min(factors.shape[-2:])
    pivots = torch.arange(1, k + 1, dtype=torch.int32).expand(*a.shape[:-2], k).clone()
    zero = factors.diagonal(dim1=-2, dim2=-1) == 0
    first = torch.where(zero, pivots, k + 1).amin(-1) if k else torch.ones(a.shape[:-2], dtype=torch.int32)
    return factors.mT.contiguous().mT, pivots, torch.where(first > k, 0, first).int()


def _eliminate(a: Tensor) -> Tensor:
    """Gaussian elimination of a batch of matrices, without exchanging rows.

    A column whose pivot is 0 is not divided, as in LAPACK.

    Raises:
        RuntimeError: these are no matrices of floating-point or complex numbers.
    """
    if a.dim() < 2:
        raise RuntimeError(
            f"linalg.lu_factor: Expected tensor with 2 or more dimensions. Got size: {list(a.shape)} instead"
        )
    if a.dtype not in _DTYPES:
        raise RuntimeError(f'"lu_factor" not implemented for {a.dtype}')
    lu = a.clone(memory_format=torch.contiguous_format)
    rows, columns = lu.shape[-2:]
    for start in range(0, min(rows, columns), BLOCK):
        end = min(start + BLOCK, rows, columns)
        for j in range(start, end):
            below, pivot = lu[..., j + 1 :, j : j + 1], lu[..., j : j + 1, j : j + 1]
            below /= torch.where(pivot == 0, 1, pivot)
            lu[..., j + 1 :, j + 1 : end] -= below * lu[..., j : j + 1, j + 1 : end]
        if end < columns:
            corner, right = lu[..., start:end, start:end], lu[..., start:end, end:]
            right.copy_(torch.linalg.solve_triangular(corner, right, upper=False, unitriangular=True))
            lu[..., end:, end:] -= lu[..., end:, start:end] @ right
    return lu
