"""Lets `FullyShardedDataParallel` take a device's number: `torch.device(0)` is "wooly:0", but its parameters say "cuda:0"."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from wooly.facade.imports import AfterImport

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


def deactivate() -> None:
    """Undo `activate`."""
    module = _waiting.deactivate()
    wrapper: Any = getattr(module, "FullyShardedDataParallel", None)
    if wrapper is not None:
        wrapper.__init__ = getattr(wrapper.__init__, "wooly_replaces", wrapper.__init__)


def _install(module: ModuleType) -> None:
    wrapper: Any = module.FullyShardedDataParallel
    init = wrapper.__init__
    if hasattr(init, "wooly_replaces"):
        return

    @functools.wraps(init)
    def with_cuda(self: Any, module: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        numbered = isinstance(device_id, int) and not isinstance(device_id, bool)
        init(self, module, *args, device_id=torch.device("cuda", device_id) if numbered else device_id, **kwargs)

    with_cuda.wooly_replaces = init  # type: ignore[attr-defined]
    wrapper.__init__ = with_cuda


_waiting = AfterImport(_MODULE, _install)
activate = _waiting.activate
