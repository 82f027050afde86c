"""`torch.accelerator`: its functions call those of `torch.cuda`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wooly.facade.names import CUDA
from wooly.torch_private import dynamo_stream_owners

Patch = tuple[Any, str, Any]

_MEMORY = (
    "empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats", "get_memory_info",
)  # fmt: skip

#: Names in `torch.accelerator` and the names of the same functions in `torch.cuda`.
_SAME = {
    "device_count": "device_count",
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}


class device_index:
    """`torch.accelerator.device_index(…)`: sets the current device in the block; None changes nothing."""

    def __init__(self, device: int | None, /) -> None:
        self.idx = device

    def __enter__(self) -> None:
        if self.idx is not None:
            self.prev_idx = torch.cuda.current_device()
            torch.cuda.set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        if self.idx is not None:
            torch.cuda.set_device(self.prev_idx)


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for `torch.accelerator`."""
    real_module = torch.get_device_module.__wrapped__  # Dynamo identifies the function by this object

    @functools.wraps(real_module)
    def get_device_module(device: Any = None) -> Any:
        return real_module(CUDA if device is None else device)

    yield (torch, "get_device_module", get_device_module)
    yield (torch.accelerator, "device_index", device_index)
    yield (torch.accelerator, "is_available", lambda: True)
    yield (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(CUDA))
    for owner in dynamo_stream_owners():
        yield (owner, "get_current_stream", _current_stream(owner.get_current_stream))
    for name, theirs in _SAME.items():
        yield (torch.accelerator, name, _as_cuda(theirs))
    for name in _MEMORY:
        same = _as_cuda("mem_get_info" if name == "get_memory_info" else name)
        yield (torch.accelerator, name, same)
        yield (torch.accelerator.memory, name, same)


def _current_stream(real: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that tells Dynamo the current stream. Modules of Dynamo may keep it after the patches are removed."""

    def get_current_stream(device: torch.device) -> Any:
        ours = torch.accelerator.current_accelerator() == torch.device(CUDA)
        return torch.accelerator.current_stream(device) if ours else real(device)

    return get_current_stream


def _as_cuda(name: str) -> Callable[..., Any]:
    """Make a function that calls `torch.cuda.<name>`. It is a new object, because Dynamo identifies functions by identity."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(torch.cuda, name)(*args, **kwargs)

    return call
