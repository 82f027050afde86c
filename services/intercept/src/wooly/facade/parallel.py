"""Patches for several devices: backward in the calling thread, and the search of `DistributedDataParallel`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wooly.devices import NAME
from wooly.facade.names import CUDA
from wooly.torch_private import accept_pinned_memory, in_calling_thread, run_backward_patches, static_graph_patch

Patch = tuple[Any, str, Any]

#: The name that the engine's errors have for the type of a device tensor, such as ``woolyFloatType``.
_TYPE = re.compile(rf"\b{NAME}([A-Z]\w*)Type\b")


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for several devices."""
    for owner, name, run_backward in run_backward_patches():
        # PyTorch's backward threads support only the first device. The switch against them is per thread, so set it at each call.
        yield (owner, name, _naming_cuda(in_calling_thread(run_backward)))
    distributed = torch.nn.parallel.DistributedDataParallel
    yield (distributed, "__init__", _searching(distributed.__init__))
    yield static_graph_patch(distributed)


def _naming_cuda(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that runs a backward, so that the engine's own errors call the device "cuda"."""

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except RuntimeError as e:
            told = _TYPE.sub(rf"torch.{CUDA}.\1Tensor", str(e)).replace(f"{NAME}:", f"{CUDA}:")
            if type(e) is not RuntimeError or told == str(e):
                raise
            raise RuntimeError(told).with_traceback(e.__traceback__) from e.__cause__

    return run


def _searching(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of `DistributedDataParallel`, whose search for unused parameters asks for pinned memory."""

    @functools.wraps(init)
    def searching(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        init(self, module, *args, **kwargs)
        if self.find_unused_parameters and any(p.is_cuda for p in module.parameters()):
            accept_pinned_memory()

    return searching
