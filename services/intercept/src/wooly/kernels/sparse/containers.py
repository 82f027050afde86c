"""Operators whose kernels for sparse host tensors read no memory: they only handle the container, or call other operators.

A sparse tensor is an object with dense tensors for its indices and values. These kernels make such objects, take them apart, or
call dense operators on their parts. They do it by the dispatcher, so they work on device tensors, too. The list is closed: any
other kernel would read through an address that does not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Operators on the container itself.
_CONTAINER = frozenset(
    (
        *("_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "empty", "empty_like", "zero_"),
        *("_indices", "_values", "indices", "values", "_nnz", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim"),
        *("_dimI", "_dimV", "crow_indices", "col_indices", "ccol_indices", "row_indices", "is_pinned"),
        *("clone", "copy_", "copy_sparse_to_sparse_", "sparse_resize_", "sparse_resize_and_clear_"),
        *("resize_", "resize_as_sparse_", "select", "select_copy"),
    )
)
#: Functions of the values. Those of COO tensors coalesce first.
_OF_VALUES = frozenset(
    (
        *(
            "abs",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "ceil",
            "deg2rad",
            "erf",
            "erfinv",
            "expm1",
            "floor",
            "frac",
            "log1p",
        ),
        *(
            "nan_to_num",
            "neg",
            "rad2deg",
            "relu",
            "round",
            "sgn",
            "sign",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "trunc",
        ),
        *("isinf", "isnan", "isneginf", "isposinf", "signbit", "angle", "conj_physical", "_conj_physical"),
        *("sum", "native_norm", "norm", "any", "threshold_backward", "view_as_real", "view_as_complex"),
    )
)
#: Operators that make new indices of old ones with dense operators.
_OF_INDICES = frozenset(("cat", "permute", "unsqueeze"))
_REDISPATCHED = _CONTAINER | _OF_INDICES | _OF_VALUES | {name + "_" for name in _OF_VALUES}


def is_container_operator(packet: str) -> bool:
    """Whether the kernel for sparse host tensors of the operator `packet` (all overloads) reads no memory."""
    return packet in _REDISPATCHED


def names() -> Iterator[str]:
    """Yield the operators whose kernels for host tensors are used here."""
    yield from sorted(_REDISPATCHED)
