"""`torch.cuda.comm`, on which `nn.DataParallel` is built. PyTorch's functions are C++ code that builds without CUDA lack.

Tensors go from device to device as in `x.to("cuda:1")`. Complex tensors are handled as PyTorch does: as pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.cuda.comm
from torch import Tensor
from torch.nn.parallel import comm

Patch = tuple[Any, str, Any]
Device = int | str | torch.device


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for copies among the devices of a session."""
    for module in (comm, torch.cuda.comm):
        for function in (broadcast, broadcast_coalesced, scatter, gather):
            yield (module, function.__name__, function)
    yield (torch.cuda.nccl, "is_available", lambda tensors: False)
    yield (torch.nn.parallel.scatter_gather, "Scatter", _Scatter)


class _Scatter:
    """Replaces PyTorch's `Scatter`: the gradient of copies and slices is autograd's."""

    @staticmethod
    def apply(
        devices: Sequence[Device], chunk_sizes: Sequence[int] | None, dim: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        return _scattered(tensor, devices, chunk_sizes, dim)


def _named(device: Device | None) -> str:
    """A device as "cuda:1", or "cpu"."""
    if isinstance(device, int):
        return "cpu" if device == -1 else f"cuda:{device}"
    known = torch.device("cuda" if device is None else device)
    return (
        "cpu" if known.type == "cpu" else f"cuda:{torch.cuda.current_device() if known.index is None else known.index}"
    )


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _one_of(devices: Any, out: Any) -> None:
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )


def _scattered(
    tensor: Tensor, devices: Sequence[Device], chunk_sizes: Sequence[int] | None, dim: int
) -> tuple[Tensor, ...]:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is not None and len(chunk_sizes) != len(devices):
        raise RuntimeError(
            f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(devices)} and "
            f"len(chunk_sizes) = {len(chunk_sizes)}"
        )
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return tuple([part.to(_named(device), non_blocking=True) for part, device in zip(parts, devices, strict=False)])


def broadcast(
    tensor: Tensor, devices: Sequence[Device] | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """`torch.cuda.comm.broadcast`: copy a tensor to each device, or into each tensor of `out`."""
    _one_of(devices, out)
    tensor = _real(tensor)
    if devices is not None:
        return tuple([tensor.to(_named(device), non_blocking=True) for device in devices])
    assert out is not None
    for i, target in enumerate(out):
        if target.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {tuple(tensor.shape)}, but output "
                f"tensor at index {i} has shape {tuple(target.shape)}"
            )
        target.copy_(tensor, non_blocking=True)
    return tuple(out)


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[Device], buffer_size: int = 10485760
) -> list[list[Tensor]]:
    """`torch.cuda.comm.broadcast_coalesced`: copy tensors to each device. The first device has them."""
    names, tensors = [_named(device) for device in devices], [_real(t) for t in tensors]
    for t in tensors:
        if str(t.device) != names[0]:
            raise RuntimeError(f"Expected all tensors to be on devices[0] = {names[0]}, but found one on {t.device}")
    return [[*tensors], *[[t.to(name, non_blocking=True) for t in tensors] for name in names[1:]]]


def scatter(
    tensor: Tensor,
    devices: Sequence[Device] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """`torch.cuda.comm.scatter`: split a tensor, and copy a part to each device, or into each tensor of `out`."""
    _one_of(devices, out)
    tensor = _real(tensor)
    if devices is not None:
        return _scattered(tensor, devices, chunk_sizes, dim)
    assert out is not None
    if chunk_sizes is not None:
        raise RuntimeError(f"'chunk_sizes' must not be specified when 'out' is specified, but got {chunk_sizes}")
    for part, target in zip(tensor.split([t.size(dim) for t in out], dim), out, strict=True):
        target.copy_(part, non_blocking=True)
    return tuple(out)


def gather(
    tensors: Sequence[Tensor], dim: int = 0, destination: Device | None = None, *, out: Tensor | None = None
) -> Tensor:
    """`torch.cuda.comm.gather`: concatenate tensors of several devices on one device, or in `out`."""
    tensors = [_real(t) for t in tensors]
    if out is None:
        return torch.cat([t.to(_named(destination), non_blocking=True) for t in tensors], dim)
    if destination is not None:
        raise RuntimeError(f"'destination' must not be specified when 'out' is specified, but got {destination}")
    for part, source in zip(out.split([t.size(dim) for t in tensors], dim), tensors, strict=True):
        part.copy_(source, non_blocking=True)
    return out
