"""The operators of `torch.nn.SyncBatchNorm`. ATen has kernels for them on GPUs only, so they are written with other operators."""

from __future__ import annotations

import torch
from torch import Tensor

from wooly.kernels.schema import Kernel


def _around(t: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [k for k in range(t.dim()) if k != 1]


def _along(statistic: Tensor, t: Tensor) -> Tensor:
    """A statistic per channel, in a shape that broadcasts to `t`."""
    return statistic.view(1, -1, *[1] * (t.dim() - 2))


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def stats(t: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`aten.batch_norm_stats`: mean and inverse standard deviation of each channel."""
    variance, mean = torch.var_mean(_wide(t), _around(t), correction=0)
    return mean, (variance + eps).rsqrt()


def elemt(
    t: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float, **out: Tensor
) -> Tensor:
    """`aten.batch_norm_elemt`: the normalised input."""
    scaled = (_wide(t) - _along(mean, t)) * _along(invstd if weight is None else invstd * weight, t)
    result = (scaled if bias is None else scaled + _along(bias, t)).to(t.dtype)
    return out["out"].resize_(result.shape).copy_(result) if out else result


def gather_stats(
    t: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    """`aten.batch_norm_gather_stats`: the statistics of all processes, which have `count` elements each."""
    counts = torch.full((mean.shape[0],), count, dtype=mean.dtype, device=mean.device)
    return gather_stats_with_counts(t, mean, invstd, running_mean, running_var, momentum, eps, counts)


def gather_stats_with_counts(
    t: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """`aten.batch_norm_gather_stats_with_counts`: the statistics of all processes (Chan et al. 1979).

    Args:
        t: the input of this process.
        mean, invstd: statistics of each process, of shape (processes, channels).
        running_mean, running_var: running statistics to update, or None.
        momentum: weight of the new statistics in the running ones.
        eps: what is added to variances.
        counts: number of elements per channel of each process.
    """
    weights = counts.to(mean.dtype).view(-1, 1)
    total = weights.sum()
    found = (mean * weights).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - found) ** 2) * weights).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(found, alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(squares / (total - 1), alpha=momentum)
    return found, (squares / total + eps).rsqrt()


def backward_reduce(
    grad: Tensor,
    t: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """`aten.batch_norm_backward_reduce`: sums of the gradient per channel, and the gradients of weight and bias."""
    wide = _wide(grad)
    summed = wide.sum(_around(t))
    product = (wide * (_wide(t) - _along(mean, t))).sum(_around(t))
    dtype = summed.dtype if weight is None else weight.dtype
    return (
        summed if input_g else None,
        product if input_g else None,
        (product * invstd).to(dtype) if weight_g else None,
        summed.to(dtype) if bias_g else None,
    )


def backward_elemt(
    grad: Tensor,
    t: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """`aten.batch_norm_backward_elemt`: the gradient of the input. `count` has the number of elements of each process."""
    total = count.sum()
    slope = _along(sum_dy_xmu / total * invstd**2, t)
    centred = _wide(grad) - _along(sum_dy / total, t) - (_wide(t) - _along(mean, t)) * slope
    return (centred * _along(invstd if weight is None else invstd * weight, t)).to(t.dtype)


KERNELS: dict[str, Kernel] = {
    "batch_norm_stats": stats,
    "batch_norm_elemt": elemt,
    "batch_norm_elemt.out": elemt,
    "batch_norm_gather_stats": gather_stats,
    "batch_norm_gather_stats_with_counts": gather_stats_with_counts,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}
