"""Expands sparse tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wooly.torch_private import coo_components, raw_device

aten = torch.ops.aten


def broadcast_to(t: Tensor, size: list[int]) -> Tensor:
    """`aten._sparse_broadcast_to`: a COO tensor of the shape `size`, with a copy of each element for each of its places.

    Raises:
        RuntimeError: the tensor cannot be expanded to this shape.
    """
    own = (1,) * (len(size) - t.dim()) + tuple(t.shape)
    if len(size) < t.dim() or any(n not in (1, wanted) for n, wanted in zip(own, size, strict=True)):
        raise RuntimeError(f"a sparse tensor of shape {list(t.shape)} cannot be expanded to {list(size)}")
    indices, values = coo_components(t)
    sparse = len(size) - t.dense_dim()
    wide = [d for d in range(sparse) if own[d] != size[d]]
    copies = math.prod([size[d] for d in wide])
    places = torch.arange(copies, device=raw_device(t))
    rows, stride = [], copies
    for d in range(sparse):
        if d in wide:
            stride //= max(size[d], 1)
            rows.append((places // max(stride, 1) % max(size[d], 1)).repeat(values.shape[0]))
        elif d < len(size) - t.dim():
            rows.append(torch.zeros_like(places).repeat(values.shape[0]))
        else:
            rows.append(
                indices[d - len(size) + t.dim()].repeat_interleave(copies, output_size=values.shape[0] * copies)
            )
    found = torch.stack(rows) if rows else indices.new_empty((0, values.shape[0] * copies))
    dense = values.expand(values.shape[0], *size[sparse:]).repeat_interleave(
        copies, 0, output_size=values.shape[0] * copies
    )
    if t.is_coalesced() and wide:
        place = torch.zeros_like(found[0])
        for d in range(sparse):
            place = place * size[d] + found[d]
        order = place.argsort()
        found, dense = found[:, order], dense[order]
    return aten._sparse_coo_tensor_with_dims_and_tensors(  # type: ignore[no-any-return]
        *(sparse, t.dense_dim(), size, found, dense),
        dtype=t.dtype,
        layout=t.layout,
        device=raw_device(t),
        is_coalesced=t.is_coalesced(),
    )
