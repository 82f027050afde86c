"""Kernels that make constants run outside of `torch.jit.trace`.

PyTorch suspends the trace around each operator that the trace records, but not around those that it does not: the factories and
copies with which it makes constants of `x[x < 0] = 1`. In a trace, sizes are tensors, and each use of one becomes a node of the
graph. So a kernel that looks at sizes would change the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from wooly.torch_private import suspended_trace, trace

#: Operators that PyTorch also calls without recording them, to make constants of `x[i] = 1` and of `torch.tensor(...)`.
#: Only these kernels are wrapped, because a wrapper costs each call time.
_CONSTANTS = {"empty.memory_format", "empty_strided", "copy_", "_copy_from", "fill_.Scalar", "fill_.Tensor", "zero_"}
#: Dispatch keys of kernels below the key that records a trace.
_BELOW = {"PrivateUse1", "CUDA"}


class Untraced(torch.library.Library):
    """The library of the device's kernels. Those for constants run while no trace of `torch.jit.trace` is active."""

    #: Names of the operators that have a kernel of the device under the key CUDA.
    of_cuda: ClassVar[set[str]] = set()

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register a kernel, as `torch.library.Library.impl`.

        A second kernel needs `allow_override=True`: some releases of PyTorch refuse it without, others replace the first one.
        """
        if dispatch_key == "CUDA":
            self.of_cuda.add(op_name)
        wrapped = dispatch_key in _BELOW and op_name in _CONSTANTS
        options.setdefault("allow_override", False)
        super().impl(op_name, untraced(fn) if wrapped else fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that it runs outside of the trace of this thread."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if trace() is None:
            return kernel(*args, **kwargs)
        with suspended_trace():
            return kernel(*args, **kwargs)

    return run
