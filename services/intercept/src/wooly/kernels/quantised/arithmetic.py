"""Quantisation and its inverse, as plain operators on the device. They give the bits of PyTorch's kernels for x86 CPUs.

A quantiser is a scale and a zero point: two numbers, or two tensors with an element per channel.
"""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch
from torch import Tensor

#: For each dtype of quantised tensors, the dtype of its integers.
INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


def quantise(t: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """The integers of a float32 tensor, with one scale.

    The CPU's kernel for 8 bits rounds `t / scale + zero_point` once (FMA), unless it adds the zero point last. So the sum is
    computed in float64, in which the product of two float32 numbers is exact.

    Args:
        t: the numbers.
        scale: the step between two integers.
        zero_point: the integer of 0.
        dtype: the dtype of the quantised tensor.
    """
    with np.errstate(divide="ignore", over="ignore"):
        inverse = float(np.float32(1) / np.float32(scale))
    if _zero_point_last() or dtype is torch.qint32:
        nan = -torch.inf if dtype is torch.qint32 else torch.inf
        return _rounded(_steps(t * inverse) + zero_point, dtype, nan=nan)
    return _rounded((t.double() * inverse + zero_point).float(), dtype, nan=torch.inf)


def quantise_channels(t: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """The integers of a float32 tensor, with a scale and a zero point per channel, which are the positions along `axis`."""
    steps = t * _along(scales.float().reciprocal(), t, axis)
    if not zero_points.is_floating_point():
        steps = _steps(steps)
    nan = -torch.inf if dtype is torch.qint32 else 0.0
    return _rounded(steps + _along(zero_points, t, axis).float(), dtype, nan=nan)


def dequantise(integers: Tensor, scale: float, zero_point: int) -> Tensor:
    """The float32 numbers that integers stand for, with one scale."""
    return (integers.int() - zero_point).float() * scale


def dequantise_channels(integers: Tensor, scales: Tensor, zero_points: Tensor, axis: int) -> Tensor:
    """The float32 numbers that integers stand for, with a scale and a zero point per channel."""
    above = integers.float() - _along(zero_points, integers, axis).float()
    return (above.double() * _along(scales, integers, axis).double()).float()


@functools.cache
def _zero_point_last() -> bool:
    """Whether this PyTorch's kernels round before they add the zero point, which differs at ties: those before 2.13 do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        return int(torch.quantize_per_tensor(torch.tensor([0.5]), 1.0, 1, torch.qint8).int_repr()) == 1


def _steps(t: Tensor) -> Tensor:
    """Numbers in units of the scale, as a zero point that is an integer is added to them."""
    return t.round() if _zero_point_last() else t


def _along(per_channel: Tensor, t: Tensor, axis: int) -> Tensor:
    return per_channel.reshape([-1 if d == axis else 1 for d in range(t.dim())])


def _rounded(t: Tensor, dtype: torch.dtype, *, nan: float) -> Tensor:
    """Round to the nearest integer (ties to even) that `dtype` has. NaN becomes the integer of `nan`, as on the CPU."""
    limits = torch.iinfo(INTEGERS[dtype])
    whole = t.round().nan_to_num(nan=nan, posinf=torch.inf, neginf=-torch.inf)
    if dtype is torch.qint32:
        whole = whole.double()  # float32 does not have the largest integer
    return whole.clamp(limits.min, limits.max).to(INTEGERS[dtype])
