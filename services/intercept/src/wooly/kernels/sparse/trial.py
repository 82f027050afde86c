"""Finds what a call with sparse tensors returns, by calling the operator on host tensors without sparse elements.

The trial raises PyTorch's own errors, at the call, with PyTorch's texts. It is done once per signature. The number of sparse
elements is not part of a signature.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.sparse import DenseResult

from wooly.dtypes import DTYPES
from wooly.kernels.sparse.arguments import components, is_sparse
from wooly.torch_private import OpOverload, raw_device, tree_leaves, tree_map

aten = torch.ops.aten

#: Maximum number of elements of the dense operands of a trial, and of its dense result. It bounds a trial to some milliseconds.
LARGEST = 1 << 22


class Found(NamedTuple):
    """What a call returns.

    Attributes:
        dense: the layouts of its dense results; None: the result is sparse.
        values: the layout of the result's values for each element, as shape and dtype; None: the result is dense.
    """

    dense: list[DenseResult] | None
    dtype: torch.dtype | None


#: Operators that fail for a tensor without sparse elements.
_NOT_OF_NOTHING = frozenset(("_sparse_csr_sum", "_sparse_csr_prod"))
#: Operators on a sparse and a dense matrix whose result is dense, as functions of dense matrices. For calls that are too large.
_LARGE_DENSE = frozenset(("mm", "addmm", "mv", "addmv", "add", "_to_dense", "bmm"))


def signature(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a call's trial."""
    return (op, tuple([_described(a) for a in args]), tuple([(k, _described(v)) for k, v in kwargs.items()]))


def _described(a: Any) -> Any:
    if isinstance(a, Tensor):
        if raw_device(a).type != "wooly":
            return a.dtype, a.dim(), "host"
        if a.layout is torch.strided:
            return a.dtype, a.shape, a.stride()
        indices, values = components(a)
        coalesced = a.layout is torch.sparse_coo and a.is_coalesced()
        return a.dtype, a.shape, a.layout, indices[0].dtype, values.shape[_batch_dim(a) + 1 :], coalesced
    if isinstance(a, (list, tuple)):
        return tuple([_described(x) for x in a])
    return type(a), a if not isinstance(a, (float, complex)) else None


def _batch_dim(t: Tensor) -> int:
    """Number of batch dimensions of a sparse tensor."""
    return 0 if t.layout is torch.sparse_coo else components(t)[0][1].dim() - 1


def attempt(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Call the operator on the host.

    Raises:
        NotImplementedError: PyTorch has no kernel for such arguments.
        RuntimeError: PyTorch refuses the arguments.
    """
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    size = sum([t.numel() for t in leaves if not is_sparse(t)]) + _result_size(leaves)
    if size > LARGEST:
        if op.overloadpacket.__name__ not in _LARGE_DENSE or all(map(is_sparse, leaves)):
            return Found(None, None)
        meta = tree_map(_on_meta, (args, kwargs))
        result = op(*meta[0], **meta[1])
    else:
        own = tree_map(_with_element if op.overloadpacket.__name__ in _NOT_OF_NOTHING else _on_host, (args, kwargs))
        result = op(*own[0], **own[1])
    flat = list(result) if isinstance(result, (list, tuple)) else [result]
    if any(is_sparse(t) for t in flat):
        return Found(None, flat[0].dtype)
    return Found([DenseResult(tuple(t.shape), t.stride(), DTYPES[t.dtype].label) for t in flat if t is not None], None)


def _result_size(leaves: list[Tensor]) -> int:
    """An upper bound of the number of elements of a dense result of matrices."""
    rows = max([t.shape[0] for t in leaves if t.dim()], default=1)
    columns = max([t.shape[-1] for t in leaves if t.dim() > 1 and not is_sparse(t)], default=1)
    batches = [elements(tuple(t.shape)) for t in leaves if is_sparse(t) and _batch_dim(t)]
    return max([rows * columns, *batches])


def _on_meta(a: Any) -> Any:
    return torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a


def _on_host(a: Any) -> Any:
    if not isinstance(a, Tensor):
        return torch.device("cpu") if isinstance(a, torch.device) else a
    if raw_device(a).type != "wooly":
        return a
    if a.layout is torch.strided:
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).zero_()
    if a.layout is torch.sparse_coo:
        empty = aten._sparse_coo_tensor_with_dims.default(
            *(a.sparse_dim(), a.dense_dim(), a.shape), dtype=a.dtype, layout=a.layout, device=torch.device("cpu")
        )
        return aten._coalesced_.default(empty, a.is_coalesced())
    return _compressed(a, 0)


def _compressed(a: Tensor, count: int) -> Tensor:
    """A compressed tensor on the host like `a`: each matrix has `count` elements, all in its first row (or column), of value 1.

    The functions for scripts may check their arguments; PyTorch 2.11 warns in them that the script has not chosen whether to.
    """
    (compressed, _), values = components(a)
    of_element = values.shape[_batch_dim(a) + 1 :]
    block = list(of_element[:2]) if a.layout in (torch.sparse_bsr, torch.sparse_bsc) else []
    sizes = (count, len(of_element) - len(block), a.shape, block)
    t: Tensor = aten._sparse_compressed_tensor_with_dims.default(
        *sizes, compressed.dtype, dtype=a.dtype, layout=a.layout, device=torch.device("cpu")
    )
    (compressed, plain), values = components(t)
    compressed.fill_(count)[..., 0] = 0
    plain.zero_()
    values.fill_(1)
    return t


def _with_element(a: Any) -> Any:
    """`_on_host`, with an element in each compressed matrix that has room for one."""
    t = _on_host(a)
    if not is_sparse(t) or t.layout is torch.sparse_coo or t.dim() != 2 or not t.numel():
        return t
    return _compressed(t, 1)


def elements(size: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return math.prod(size)
