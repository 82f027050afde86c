"""`torch.cuda.nvtx`: ranges have the depths and numbers of NVTX, but no profiler records them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

Patch = tuple[Any, str, Any]

_NO_RANGE = -2  # NVTX_NO_PUSH_POP_TRACKING


class Ranges:
    """Replaces the C++ module that `torch.cuda.nvtx` calls in a build with CUDA."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._ids = itertools.count(1)

    def rangePushA(self, message: str) -> int:
        """Begin a nested range. Returns its depth, from 0."""
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        return depth

    def rangePop(self) -> int:
        """End the innermost range. Returns its depth, or `_NO_RANGE` if no range is open."""
        depth = getattr(self._thread, "depth", 0)
        if not depth:
            return _NO_RANGE
        self._thread.depth = depth - 1
        return int(depth - 1)

    def rangeStartA(self, message: str) -> int:
        """Begin a range that is not nested. Returns its number."""
        return next(self._ids)

    def rangeEnd(self, range_id: int) -> None:
        """End a range that `rangeStartA` began."""

    def deviceRangeStart(self, message: str, stream: int) -> object:
        """Begin a range in the work of a stream. Returns its number."""
        return next(self._ids)

    def deviceRangeEnd(self, range_handle: object, stream: int) -> None:
        """End a range that `deviceRangeStart` began."""

    def markA(self, message: str) -> None:
        """Mark a point in time: do nothing."""


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for `torch.cuda.nvtx`."""
    yield (torch.cuda.nvtx, "_nvtx", Ranges())
