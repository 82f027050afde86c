"""Sends device tensors from a data loader's worker process to the process of the loader.

Under CUDA, the two processes share the memory. Here each process has a session of its own, so the tensor is copied through host
memory. For a data loader the result is the same, because the worker does not use the tensor afterwards. Other processes may rely
on shared memory, so for them `UntypedStorage._share_cuda_` raises an error.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

from wooly.devices import NAME
from wooly.torch_private import raw_device


def activate() -> None:
    """Let workers of data loaders send device tensors."""
    ForkingPickler.register(torch.Tensor, _reduce)


def deactivate() -> None:
    """Undo `activate`."""
    ForkingPickler.register(torch.Tensor, reduce_tensor)


def _reduce(tensor: torch.Tensor) -> Any:
    device = raw_device(tensor)
    if device.type != NAME or get_worker_info() is None:
        return reduce_tensor(tensor)
    return _rebuild, (tensor.detach().cpu(), device.index, tensor.requires_grad)


def _rebuild(host: torch.Tensor, index: int, requires_grad: bool) -> torch.Tensor:
    """Make the tensor on the same device of the receiving process; on its first device, if it has fewer."""
    device = torch.device("cuda", index if index < torch.cuda.device_count() else 0)
    return host.to(device).requires_grad_(requires_grad)
