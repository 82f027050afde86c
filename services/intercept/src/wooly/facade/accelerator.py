"""`torch.accelerator`, which is "cuda": its questions and switches are those of `torch.cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from wooly.facade.names import CUDA

Patch = tuple[Any, str, Any]

_MEMORY = (
    "empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats",
)  # fmt: skip


class device_index:
    """`torch.accelerator.device_index(…)`: the device of an index is current in the block; None changes nothing."""

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
    """(owner, name, value) of everything that is replaced in `torch.accelerator`."""
    cuda = torch.cuda
    real_module = torch.get_device_module
    yield (torch, "get_device_module", lambda device=None: real_module(CUDA if device is None else device))
    yield (torch.accelerator, "device_index", device_index)
    for name, value in {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device(CUDA),
        "device_count": cuda.device_count,
        "current_device_index": cuda.current_device,
        "current_device_idx": cuda.current_device,
        "set_device_index": cuda.set_device,
        "set_device_idx": cuda.set_device,
        "current_stream": cuda.current_stream,
        "set_stream": cuda.set_stream,
        "synchronize": cuda.synchronize,
    }.items():
        yield (torch.accelerator, name, value)
    for owner in (torch.accelerator, torch.accelerator.memory):
        for name in _MEMORY:
            yield (owner, name, getattr(cuda, name))
        yield (owner, "get_memory_info", cuda.mem_get_info)
