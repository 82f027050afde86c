"""Quantised tensors on the device: how they are made, and their integers as an ordinary tensor on the same storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.devices import NAME, Devices
from wooly.kernels.quantised.arithmetic import INTEGERS
from wooly.storage import span
from wooly.torch_private import (
    OpOverload,
    raw_device,
    redispatch_cpu,
    redispatch_quantised_host,
    tensor_data,
    without_memory,
)

aten = torch.ops.aten
_set_integers = redispatch_cpu(aten.set_.source_Storage_storage_offset)
_set_quantised = redispatch_quantised_host(aten.set_.source_Storage_storage_offset)


def factory(op: OpOverload, devices: Devices) -> Callable[..., Tensor]:
    """The kernel of a factory of quantised tensors: PyTorch makes the tensor and its quantiser, and the device its memory.

    Args:
        op: the factory.
        devices: the process's devices.
    """
    make = redispatch_quantised_host(op)

    def run(
        size: list[int], *, device: torch.device | None = None, pin_memory: bool | None = None, **rest: Any
    ) -> Tensor:
        if device is not None and device.type not in ("cuda", NAME):  # the scales of a device tensor for a host tensor
            return op(size, device=device, **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in rest.items()})  # type: ignore[no-any-return]
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        require_dtype(rest.get("dtype"))
        there = torch.device(NAME, devices.index_of(device))
        made = without_memory(lambda: make(size, device=there, **rest), there)
        sizes, strides = tuple(made.shape), made.stride()
        memory = torch.empty(span(sizes, strides), dtype=INTEGERS[made.dtype], device=there)
        return _set_quantised(made, memory.untyped_storage(), 0, sizes, strides)  # type: ignore[no-any-return]

    return run


def require_dtype(dtype: Any) -> None:
    """Check that the device has quantised tensors of a dtype.

    Raises:
        NotImplementedError: it has none, because the dtype packs several numbers into a byte.
    """
    if dtype in (torch.quint4x2, torch.quint2x4):
        raise NotImplementedError(
            f"tensors of {dtype} are not supported on the wooly device; use torch.qint8, torch.quint8 or torch.qint32, or the CPU"
        )


def is_ours(t: Tensor) -> bool:
    """Whether a tensor is on a device of this process."""
    return raw_device(t).type == NAME


def integers(q: Tensor) -> Tensor:
    """The integers of a quantised device tensor, as an ordinary tensor that shares its storage."""
    t = torch.empty(0, dtype=INTEGERS[q.dtype], device=raw_device(q))
    return _set_integers(t, q.untyped_storage(), q.storage_offset(), tuple(q.shape), q.stride())  # type: ignore[no-any-return]


def of_integers(t: Tensor, like: Tensor) -> Tensor:
    """A quantised tensor on the storage of the integers `t`, with the quantiser of `like`."""
    dtype = next(q for q, i in INTEGERS.items() if i is t.dtype)
    if is_per_channel(like):
        return per_channel(
            t, like.q_per_channel_scales(), like.q_per_channel_zero_points(), like.q_per_channel_axis(), dtype
        )
    return per_tensor(t, like.q_scale(), like.q_zero_point(), dtype)


def per_tensor(t: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """A quantised tensor on the storage of the integers `t`, with one scale and one zero point."""
    shell = aten._empty_affine_quantized(
        [0] * t.dim(), dtype=dtype, device=raw_device(t), scale=scale, zero_point=zero_point
    )
    return _on(shell, t)


def per_channel(t: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """A quantised tensor on the storage of the integers `t`, with a scale and a zero point for each position along `axis`."""
    sizes = [n if d == axis else 0 for d, n in enumerate(t.shape)]
    options = {"dtype": dtype, "device": raw_device(t), "scales": scales, "zero_points": zero_points, "axis": axis}
    return _on(aten._empty_per_channel_affine_quantized(sizes, **options), t)


def set_quantiser(q: Tensor, like: Tensor) -> None:
    """Give a quantised device tensor the quantiser of another tensor. Its memory stays; so do the tensors that share it."""
    tensor_data.__set__(q, of_integers(integers(q), like))


def is_per_channel(q: Tensor) -> bool:
    """Whether a quantised tensor has a scale for each channel."""
    return q.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


def _on(shell: Tensor, t: Tensor) -> Tensor:
    return _set_quantised(shell, t.untyped_storage(), t.storage_offset(), tuple(t.shape), t.stride())  # type: ignore[no-any-return]
