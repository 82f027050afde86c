"""Normalisation of half precision on a GPU.

The CPU's operators keep statistics in the dtype of the weights, and take weights of float32 with data of half precision. The
GPU's operators keep most statistics in float32, and take one dtype. The executor converts results to the announced dtype
(`adoption`); the functions here convert arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


def layer_norm(
    data: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `aten.native_layer_norm`."""
    wide = _common(data, weight, bias)
    out, mean, rstd = aten.native_layer_norm.default(
        data.to(wide), normalized_shape, _in(weight, wide), _in(bias, wide), eps
    )
    return out.to(data.dtype), mean, rstd


def layer_norm_backward(
    grad_out: Tensor,
    data: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Do `aten.native_layer_norm_backward`."""
    wide = _common(data, weight, bias)
    found = aten.native_layer_norm_backward.default(
        grad_out.to(wide), data.to(wide), normalized_shape, _single(mean), _single(rstd), _in(weight, wide),
        _in(bias, wide), output_mask,
    )  # fmt: skip
    return _in(found[0], data.dtype), found[1], found[2]


def group_norm(
    data: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    points: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `aten.native_group_norm`."""
    wide = _common(data, weight, bias)
    out, mean, rstd = aten.native_group_norm.default(
        data.to(wide), _in(weight, wide), _in(bias, wide), batch, channels, points, group, eps
    )
    return out.to(data.dtype), mean, rstd


def group_norm_backward(
    grad_out: Tensor,
    data: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: int,
    channels: int,
    points: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Do `aten.native_group_norm_backward`. The GPU's operator takes statistics in the dtype of the data."""
    # without a weight, the dtype of the statistics shows whether the bias had another dtype than the data
    wide = _common(data, weight, mean)
    found = aten.native_group_norm_backward.default(
        grad_out.to(wide), data.to(wide), mean.to(wide), rstd.to(wide), _in(weight, wide), batch, channels, points,
        group, output_mask,
    )  # fmt: skip
    return _in(found[0], data.dtype), found[1], found[2]


def batch_norm_backward(
    grad_out: Tensor,
    data: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Do `aten.native_batch_norm_backward`."""
    found: tuple[Tensor | None, ...] = aten.native_batch_norm_backward.default(
        grad_out.to(data.dtype), data, weight, running_mean, running_var, _single(save_mean), _single(save_invstd),
        train, eps, output_mask,
    )  # fmt: skip
    return found


def batch_norm_with_update(
    data: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do `aten._batch_norm_with_update` without cuDNN, whose backward pass needs a result that is empty on the CPU."""
    found = aten._native_batch_norm_legit.default(data, weight, bias, running_mean, running_var, True, momentum, eps)
    return *found, torch.empty(0, dtype=torch.uint8, device=data.device)


def batch_norm_backward_of_update(
    grad_out: Tensor,
    data: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Tensor,
) -> tuple[Tensor | None, ...]:
    """Do `aten.batch_norm_backward` without cuDNN; see `batch_norm_with_update`."""
    return batch_norm_backward(
        grad_out, data, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


def _common(data: Tensor, *others: Tensor | None) -> torch.dtype:
    """Return the dtype in which the GPU's operator can take all of these tensors."""
    same = all(t is None or t.dtype is data.dtype for t in others)
    return data.dtype if same else torch.float32


def _in(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


def _single(t: Tensor | None) -> Tensor | None:
    """Return statistics in the dtype in which the GPU's operator reads them."""
    return t.to(torch.float32) if t is not None and t.dtype in _HALVES else t
