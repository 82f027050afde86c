"""Patches for several devices: backward in the calling thread, and errors for `DataParallel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wooly.devices import NAME
from wooly.facade.names import CUDA
from wooly.torch_private import accept_pinned_memory, in_calling_thread, run_backward_patches

Patch = tuple[Any, str, Any]
_BY_HAND = (
    "place parts of the model on the devices by hand instead (part.to('cuda:0'), part.to('cuda:1'), and x.to('cuda:1') between "
    "them), or use one device"
)


def patches() -> Iterator[Patch]:
    """Yield the patches (owner, name, value) for several devices."""
    for owner, name, run_backward in run_backward_patches():
        # PyTorch's backward threads support only the first device. The switch against them is per thread, so set it at each call.
        yield (owner, name, _naming_cuda(in_calling_thread(run_backward)))
    data_parallel = torch.nn.DataParallel
    yield (data_parallel, "__init__", _one_device(data_parallel.__init__))
    function = torch.nn.parallel.data_parallel
    yield (torch.nn.parallel, "data_parallel", _one_device(function))
    yield (torch.nn.parallel.scatter_gather, "Scatter", _Scatter)
    distributed = torch.nn.parallel.DistributedDataParallel
    yield (distributed, "__init__", _searching(distributed.__init__))


def _naming_cuda(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that runs a backward, so that the engine's own errors call the device "cuda"."""

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except RuntimeError as e:
            if type(e) is not RuntimeError or f"{NAME}:" not in str(e):
                raise
            raise RuntimeError(str(e).replace(f"{NAME}:", f"{CUDA}:")).with_traceback(e.__traceback__) from e.__cause__

    return run


def _one_device(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call(…, module, x, device_ids)` so that it refuses several devices."""

    @functools.wraps(call)
    def checked(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        named = [*args[2:3]] if device_ids is None else [device_ids]
        ids = named[0] if named and named[0] is not None else range(torch.cuda.device_count())
        if len(ids) > 1:
            raise NotImplementedError(
                f"nn.DataParallel over {len(ids)} devices is not supported; use DistributedDataParallel with one process per "
                f"device (torchrun), {_BY_HAND} (device_ids=[0])"
            )
        return call(*args, device_ids=device_ids, **kwargs) if device_ids is not None else call(*args, **kwargs)

    return checked


def _searching(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of `DistributedDataParallel`, whose search for unused parameters asks for pinned memory."""

    @functools.wraps(init)
    def searching(
        self: Any, module: torch.nn.Module, *args: Any, find_unused_parameters: bool = False, **kwargs: Any
    ) -> Any:
        if find_unused_parameters and any(p.is_cuda for p in module.parameters()):
            accept_pinned_memory()
        return init(self, module, *args, find_unused_parameters=find_unused_parameters, **kwargs)

    return searching


class _Scatter:
    """Replaces PyTorch's `Scatter`, whose C++ code is missing in builds without CUDA. It supports one device."""

    @staticmethod
    def apply(devices: Sequence[Any], chunk_sizes: Any, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        if len(devices) > 1:
            raise NotImplementedError(f"scattering a tensor over several devices is not supported; {_BY_HAND}")
        (device,) = devices
        return (tensor.to(f"cuda:{device}" if isinstance(device, int) else device, non_blocking=True),)
