"""Mixed precision for "cuda". PyTorch keeps the autocast state per device type, and Wooly's device type is not CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from wooly.devices import NAME
from wooly.facade.names import CUDA

Patch = tuple[Any, str, Any]


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value): functions that set CUDA's autocast state also set the state of the Wooly device.

    Functions that read the state need no patch, because they read CUDA's state.
    """
    set_enabled, set_dtype, clear = torch.set_autocast_enabled, torch.set_autocast_dtype, torch.clear_autocast_cache
    set_gpu_dtype = torch.set_autocast_gpu_dtype

    def follow() -> None:
        """Copy this thread's autocast state from CUDA to the Wooly device."""
        set_dtype(NAME, torch.get_autocast_dtype(CUDA))
        set_enabled(NAME, torch.is_autocast_enabled(CUDA))

    def following(real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            follow()

        return call

    @functools.wraps(clear)
    def clear_autocast_cache() -> None:
        clear()
        torch.wooly.clear_autocast_cache()  # type: ignore[attr-defined]

    yield (torch, "set_autocast_enabled", following(set_enabled))
    yield (torch, "set_autocast_dtype", following(set_dtype))
    yield (torch, "set_autocast_gpu_dtype", following(set_gpu_dtype))
    yield (torch, "clear_autocast_cache", clear_autocast_cache)
