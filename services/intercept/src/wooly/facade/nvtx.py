"""`torch.cuda.nvtx` and `emit_nvtx`: ranges have the depths and numbers of NVTX. PyTorch's profiler shows them as annotations.

Without a profiler, a range does nothing, as NVTX does without NVIDIA's tools.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from wooly.torch_private import profiler_enabled, run_profiler_hooks

Patch = tuple[Any, str, Any]

_NO_RANGE = -2  # NVTX_NO_PUSH_POP_TRACKING


class Ranges:
    """Replaces the C++ module that `torch.cuda.nvtx` calls in a build with CUDA."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._ids = itertools.count(1)

    def rangePushA(self, message: str) -> int:
        """Begin a nested range. Returns its depth, from 0."""
        open_ranges = self._open()
        open_ranges.append(_annotation(message))
        return len(open_ranges) - 1

    def _open(self) -> list[Any]:
        """The annotation of each open range of this thread; None: no profiler ran when the range began."""
        if not hasattr(self._thread, "ranges"):
            self._thread.ranges = []
        found: list[Any] = self._thread.ranges
        return found

    def rangePop(self) -> int:
        """End the innermost range. Returns its depth, or `_NO_RANGE` if no range is open."""
        open_ranges = self._open()
        if not open_ranges:
            return _NO_RANGE
        annotation = open_ranges.pop()
        if annotation is not None:
            annotation.__exit__(None, None, None)
        return len(open_ranges)

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


def _annotation(message: str) -> Any:
    """An open annotation of PyTorch's profiler; None if no profiler runs."""
    if not profiler_enabled():
        return None
    annotation = torch.autograd.profiler.record_function(message)
    annotation.__enter__()
    return annotation


class emit_nvtx:
    """`torch.autograd.profiler.emit_nvtx`. It waits for the device and emits no ranges, because no tool of NVIDIA's listens.

    PyTorch's profiler shows the operators by itself.
    """

    def __init__(self, enabled: bool = True, record_shapes: bool = False) -> None:
        self.enabled = enabled
        self.entered = False
        self.record_shapes = record_shapes

    def __enter__(self) -> emit_nvtx | None:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("NVTX annotation context manager is not reentrant")
        self.entered = True
        torch.cuda.synchronize()
        run_profiler_hooks(start=True)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.enabled:
            torch.cuda.synchronize()
            run_profiler_hooks(start=False)


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for `torch.cuda.nvtx` and `emit_nvtx`."""
    yield (torch.cuda.nvtx, "_nvtx", Ranges())
    yield (torch.autograd.profiler, "emit_nvtx", emit_nvtx)
