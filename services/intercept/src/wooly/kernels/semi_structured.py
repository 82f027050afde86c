"""Products with 2:4 sparse matrices (`torch.sparse.to_sparse_semi_structured`), for both of PyTorch's formats.

In a 2:4 sparse matrix, at most two of four neighbours in a row are not zero. CUDA's libraries multiply the kept elements only.
Here, the matrix is made dense on the device for each product: the same numbers, without the gain in memory and time.

CUTLASS's format is that of `torch.sparse._semi_structured_conversions`. cuSPARSELt's is known by its size and its beginning only:
the kept elements, and then, in this implementation, their positions within their groups of four, two bits each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.torch_private import semi_structured_to_dense

aten = torch.ops.aten

_CUSPARSELT = (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
_ACTIVATIONS = {"": lambda t: t, "none": lambda t: t, "relu": torch.relu, "silu": torch.nn.functional.silu}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two dense matrices, as CUDA's libraries accumulate it: of int8 in int32, of float8 in float32."""
    if a.dtype is torch.int8:
        exact: Tensor = aten._int_mm(a.contiguous(), b.contiguous())
        return exact
    if a.dtype is torch.float8_e4m3fn:
        return a.float() @ b.float()
    return a @ b


def _as(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a sum. Those of int8 saturate."""
    if dtype is torch.int8:
        return result.clamp(-128, 127).to(dtype)
    return result.to(dtype)


# -- CUTLASS -------------------------------------------------------------------------------------------------------------


def _check_layout(b: Tensor) -> None:
    """Refuse what CUTLASS refuses.

    Raises:
        RuntimeError: an int8 matrix with its rows in memory.
    """
    if b.dtype is torch.int8 and b.stride(-1) == 1 and b.shape[-1] > 1:
        raise RuntimeError(
            "spgemm_cutlass_dispatch_layouts: a 2:4 sparse matrix of int8 takes only a dense matrix whose columns are contiguous "
            "in memory; pass a transposed one, such as `b.t().contiguous().t()`"
        )


def mm(mat1: Tensor, mat1_meta: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`aten._sparse_semi_structured_mm`.

    Args:
        mat1, mat1_meta: the sparse matrix in CUTLASS's format.
        mat2: the dense matrix.
        out_dtype: dtype of the result; None: that of `mat2`.

    Raises:
        RuntimeError: `mat2` is int8, and its columns are not contiguous.
    """
    _check_layout(mat2)
    return _as(_product(semi_structured_to_dense(mat1, mat1_meta), mat2), out_dtype or mat2.dtype)


def addmm(
    bias: Tensor,
    mat1: Tensor,
    mat1_meta: Tensor,
    mat2: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten._sparse_semi_structured_addmm`: one number of `bias` per row is added. The arguments are those of `mm`."""
    _check_layout(mat2)
    result = _product(semi_structured_to_dense(mat1, mat1_meta), mat2)
    return _as(alpha * result + beta * bias.unsqueeze(-1), out_dtype or mat2.dtype)


def linear(
    t: Tensor,
    weight: Tensor,
    meta: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`aten._sparse_semi_structured_linear`, which PyTorch has replaced by `mm` and `addmm`.

    Raises:
        RuntimeError: the activation is not known, or not one for integers.
    """
    apply = _ACTIVATIONS.get(activation or "")
    if apply is None or (activation == "silu" and t.dtype is torch.int8):
        raise RuntimeError(f"_sparse_semi_structured_linear: activation {activation} is not supported for {t.dtype}")
    result = _product(t.reshape(-1, t.shape[-1]), semi_structured_to_dense(weight, meta).t())
    if bias is not None:
        result = result + bias
    return _as(apply(result), out_dtype or t.dtype).reshape(*t.shape[:-1], -1)


# -- cuSPARSELt ----------------------------------------------------------------------------------------------------------


def compress(t: Tensor) -> Tensor:
    """`aten._cslt_compress`: the first two elements of each group that are not zero, and their positions.

    Raises:
        RuntimeError: dtype or shape are not supported.
    """
    if t.dtype not in _CUSPARSELT:
        raise RuntimeError(f"Unsupported dtype for cuSPARSELt compressed matrix: {t.dtype}")
    if t.dim() != 2 or t.shape[1] % 8:
        raise RuntimeError(
            f"cuSPARSELt compresses matrices whose rows have a multiple of 8 elements, not {tuple(t.shape)}"
        )
    rows, columns = t.shape
    raw = t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t
    groups = raw.reshape(rows, columns // 4, 4)
    first = torch.argsort(
        (t == 0 if raw is t else t.float() == 0).reshape(groups.shape).to(torch.uint8), dim=-1, stable=True
    )
    at = first[..., :2].sort(dim=-1).values
    kept = groups.gather(-1, at).reshape(-1)
    places = at.to(torch.uint8).reshape(-1, 4)
    packed = places[:, 0] + places[:, 1] * 4 + places[:, 2] * 16 + places[:, 3] * 64
    return torch.cat([kept.view(torch.uint8), packed]).view(t.dtype)


def _decompress(packed: Tensor, columns: int) -> Tensor:
    """The dense matrix of `compress`. A group has 2 elements and 4 bits."""
    size = packed.element_size()
    raw = packed.view(torch.uint8)
    groups = raw.numel() * 2 // (4 * size + 1)
    kept, places = raw[: groups * 2 * size], raw[groups * 2 * size :]
    at = torch.stack([(places >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).reshape(groups, 2).long()
    word = {1: torch.uint8, 2: torch.int16}[size]
    dense = torch.zeros(groups, 4, dtype=word, device=packed.device).scatter(-1, at, kept.view(word).reshape(groups, 2))
    return dense.view(packed.dtype).reshape(-1, columns)


def cusparselt_mm(
    compressed_A: Tensor,  # PyTorch's name, which callers may use
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    alg_id: int = 0,
    split_k: int = 1,
    split_k_mode: int = -1,
) -> Tensor:
    """`aten._cslt_sparse_mm`.

    Args:
        compressed_A: result of `compress`.
        dense_B: the dense matrix.
        bias: one number per row of the result.
        alpha: a factor, or one per row of the result.
        out_dtype: dtype of the result; None: that of `dense_B`.
        transpose_result: return the transposed result.
        alg_id, split_k, split_k_mode: how cuSPARSELt computes; without effect.

    Raises:
        RuntimeError: dtypes or shapes are not supported.
    """
    if dense_B.dtype not in _CUSPARSELT or compressed_A.dtype is not dense_B.dtype:
        raise RuntimeError(
            f"Unsupported dtype for cuSPARSELt compressed matrix multiplication: {compressed_A.dtype} and {dense_B.dtype}"
        )
    result = _product(_decompress(compressed_A, dense_B.shape[0]), dense_B)
    if alpha is not None:
        result = result * (alpha.unsqueeze(-1) if alpha.numel() > 1 else alpha)
    if bias is not None:
        result = result + bias.unsqueeze(-1)
    result = _as(result, out_dtype or dense_B.dtype)
    return result.t().contiguous() if transpose_result else result


def cusparselt_search(
    compressed_A: Tensor,
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
) -> int:
    """`aten._cslt_sparse_mm_search`: the number of the fastest algorithm. There is one."""
    return 0


KERNELS: dict[str, Callable[..., Any]] = {
    "_cslt_compress": compress,
    "_cslt_sparse_mm": cusparselt_mm,
    "_cslt_sparse_mm_search": cusparselt_search,
    "_sparse_semi_structured_addmm": addmm,
    "_sparse_semi_structured_linear": linear,
    "_sparse_semi_structured_mm": mm,
}
