"""`torch.cuda.nvtx`: ranges nest and are numbered as NVTX does it. No profiler of NVIDIA's looks at this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

Patch = tuple[Any, str, Any]

_NO_RANGE = -2  # NVTX_NO_PUSH_POP_TRACKING


class Ranges:
    """What `torch.cuda.nvtx` calls in a build with CUDA."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._ids = itertools.count(1)

    def rangePushA(self, message: str) -> int:
        """Begin a nested range; its depth, from 0."""
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        return depth

    def rangePop(self) -> int:
        """End the innermost range; its depth."""
        depth = getattr(self._thread, "depth", 0)
        if not depth:
            return _NO_RANGE
        self._thread.depth = depth - 1
        return int(depth - 1)

    def rangeStartA(self, message: str) -> int:
        """Begin a range that may end anywhere; its number."""
        return next(self._ids)

    def rangeEnd(self, range_id: int) -> None:
        """End such a range."""

    def deviceRangeStart(self, message: str, stream: int) -> object:
        """Begin a range in a stream's work."""
        return next(self._ids)

    def deviceRangeEnd(self, range_handle: object, stream: int) -> None:
        """End such a range."""

    def markA(self, message: str) -> None:
        """A point in time."""


def patches() -> Iterator[Patch]:
    """(owner, name, value)."""
    yield (torch.cuda.nvtx, "_nvtx", Ranges())
