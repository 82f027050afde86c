"""Bags of embeddings on a GPU, with the auxiliary results that the CPU's operators return.

In the sum of bags, the CPU's operator may leave `offset2bag` (the bag of each index) empty, and its gradients compute
`offset2bag` from the offsets. The GPU's operator always fills `offset2bag`, and some of its gradients need it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_SUM = 0


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
    return out, bag_of, sizes, largest if largest.numel() else sizes.clone()


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
