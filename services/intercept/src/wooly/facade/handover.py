"""How device tensors and events are pickled for other processes.

PyTorch's own reductions share the memory of tensors, through `wooly.ipc`. Only a data loader's worker sends a copy through host
memory, because its session may be on another executor. For a data loader the result is the same: the worker does not use the
tensor afterwards.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

from wooly.devices import NAME
from wooly.facade.streams import Event
from wooly.torch_private import raw_device


def activate() -> None:
    """Register the reductions."""
    ForkingPickler.register(Event, _reduce_event)
    ForkingPickler.register(torch.Tensor, _reduce)


def deactivate() -> None:
    """Undo `activate`."""
    ForkingPickler.register(torch.Tensor, reduce_tensor)


def _reduce_event(event: Event) -> Any:
    return _rebuild_event, (event.device, event.ipc_handle())


def _rebuild_event(device: torch.device, handle: bytes) -> Any:
    return torch.cuda.Event.from_ipc_handle(device, handle)


def _reduce(tensor: torch.Tensor) -> Any:
    device = raw_device(tensor)
    if device.type != NAME or get_worker_info() is None:
        return reduce_tensor(tensor)
    return _rebuild, (tensor.detach().cpu(), device.index, tensor.requires_grad)


def _rebuild(host: torch.Tensor, index: int, requires_grad: bool) -> torch.Tensor:
    """Make the tensor on the same device of the receiving process; on its first device, if it has fewer."""
    device = torch.device("cuda", index if index < torch.cuda.device_count() else 0)
    return host.to(device).requires_grad_(requires_grad)
