"""Conversion between row indices and compressed row indices."""

from __future__ import annotations

import torch
from torch import Tensor

from wooly.kernels.schema import unsupported

aten = torch.ops.aten


def rows_to_compressed(rows: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """`aten._convert_indices_from_coo_to_csr`: for each row and the end, the number of elements in the rows before.

    The library's kernel uses the indices as addresses without a check, so executors do not offer it.

    Args:
        rows: the sorted row indices, one dimension.
        size: the number of rows.

    Raises:
        RuntimeError: the indices have several dimensions.
    """
    if rows.dim() > 1:
        raise RuntimeError(f"Input is supposed to be a vector, but got {rows.dim()} dimensional tensor.")
    bounds = torch.arange(size + 1, dtype=rows.dtype, device=rows.device)
    found: Tensor = aten.searchsorted.Tensor(rows.contiguous(), bounds, out_int32=out_int32)
    return found


def compressed_to_coordinates(
    compressed: Tensor, plain: Tensor, *, out_int32: bool = False, transpose: bool = False
) -> Tensor:
    """`aten._convert_indices_from_csr_to_coo`: indices of rows and columns, int64 or int32 of shape (2, elements).

    Args:
        compressed: for each row, where its elements begin, and the end; one dimension.
        plain: the column of each element.
        transpose: rows and columns are exchanged in the result.
    """
    dtype = torch.int32 if out_int32 else torch.int64
    if compressed.dim() != 1:
        raise unsupported("aten._convert_indices_from_csr_to_coo.default", "the indices are a batch")
    places = torch.arange(plain.numel(), dtype=compressed.dtype, device=compressed.device)
    rows = aten.searchsorted.Tensor(compressed[1:].contiguous(), places, right=True)
    pair = [rows.to(dtype), plain.to(dtype)]
    return torch.stack(pair[::-1] if transpose else pair)
