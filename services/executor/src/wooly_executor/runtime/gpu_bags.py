"""Bags of embeddings on a GPU, with the auxiliary results that the CPU's operators return.

In the sum of bags, the CPU's operator may leave `offset2bag` (the bag of each index) empty, and its gradients compute
`offset2bag` from the offsets. The GPU's operator always fills `offset2bag`, and some of its gradients need it.

In the maximum of bags, an empty bag has the index 0 on the CPU and -1 on the GPU. The CPU's gradient reads the sizes of the bags
to skip an empty bag, and the GPU's gradient reads the index. The functions here write the CPU's index and read the sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_SUM, _MAX = 0, 2
_HALVES = (torch.float16, torch.bfloat16)


def forward(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do `aten._embedding_bag`."""
    return _as_on_cpu(
        aten._embedding_bag.default(weight, indices, offsets, scale_grad_by_freq, mode, *rest, **named), cut=True
    )


def forward_only(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do `aten._embedding_bag_forward_only`."""
    found = aten._embedding_bag_forward_only.default(weight, indices, offsets, scale_grad_by_freq, mode, *rest, **named)
    return _as_on_cpu(found, cut=mode != _SUM)


def _as_on_cpu(found: tuple[Tensor, Tensor, Tensor, Tensor], *, cut: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results with sizes for the bags only, and with the sizes of the bags in place of unused largest indices.

    Args:
        found: the GPU's results.
        cut: whether the CPU drops the size of the bag that the last offset would begin.
    """
    out, bag_of, sizes, largest = found
    if cut:
        sizes = sizes[: out.shape[0]]
    return out, bag_of, sizes, largest.clamp_min(0) if largest.numel() else sizes.clone()


def backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """Do `aten._embedding_bag_backward`."""
    if mode == _MAX and not sparse:
        return _backward_of_maximum(grad, bag_size, maximum_indices, num_weights)
    found: Tensor = aten._embedding_bag_backward.default(
        grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, sparse,
        per_sample_weights, padding_idx,
    )  # fmt: skip
    return found


def dense_backward(
    grad: Tensor,
    indices: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """Do `aten._embedding_bag_dense_backward`."""
    if mode == _MAX:
        return _backward_of_maximum(grad, bag_size, maximum_indices, num_weights)
    found: Tensor = aten._embedding_bag_dense_backward.default(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights,
        padding_idx,
    )  # fmt: skip
    return found


def _backward_of_maximum(grad: Tensor, sizes: Tensor, largest: Tensor, rows: int) -> Tensor:
    """Add the gradient of each bag to the rows that have the maximum. The sum of half precision is in float32."""
    wide = grad.to(torch.float32) if grad.dtype in _HALVES else grad
    wide = wide.masked_fill((sizes[: grad.shape[0]] == 0).unsqueeze(1), 0)
    found = wide.new_zeros(rows, grad.shape[1]).scatter_add_(0, largest.clamp_min(0).to(torch.int64), wide)
    return found.to(grad.dtype)


def weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    """Do `aten._embedding_bag_per_sample_weights_backward`."""
    if indices.numel() and not offset2bag.numel():
        begun = offsets.new_zeros(indices.shape[0] + 1).index_add_(0, offsets, torch.ones_like(offsets))
        offset2bag = (begun.cumsum(0) - 1)[:-1].to(indices.dtype)
    found: Tensor = aten._embedding_bag_per_sample_weights_backward.default(
        grad, weight, indices, offsets, offset2bag, mode, padding_idx
    )
    return found
