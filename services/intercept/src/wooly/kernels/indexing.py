"""Operators that accept tensors of the host and of the device together, as on CUDA: indices, and numbers that are written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wooly.kernels.schema import Kernel
from wooly.torch_private import OpOverload, raw_device

#: Operators that also accept indices on the host.
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})


def with_host_indices(record: Kernel, op: OpOverload) -> Kernel:
    """Wrap an indexing operator so that index tensors may be on the host, as in CUDA. They are copied to the device.

    A number on the device may be put into a tensor on the host.
    """

    def run(t: Tensor, indices: list[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        if t.is_cpu and all(i is None or i.is_cpu for i in indices) and args and not args[0].dim():
            return op(t, indices, args[0].cpu(), *args[1:], **kwargs)
        for i in indices:
            if i is not None and i.is_cpu:
                return record(t, _on_device_of(t, indices), *args, **kwargs)
        if t.is_cpu:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return record(t, indices, *args, **kwargs)

    return run


#: Operators that write one number into a tensor. The number may be on another device than the tensor, as in CUDA.
FILLING = frozenset({"fill_.Tensor", "index_fill_.int_Tensor", "masked_fill_.Tensor"})


def with_host_target(record: Kernel, op: OpOverload) -> Kernel:
    """Wrap an operator that writes a number into a tensor, so that the tensor may be on the host and the number on the device."""

    def run(t: Tensor, *args: Any) -> Any:
        if t.is_cpu and not args[-1].dim():
            return op(t, *args[:-1], args[-1].cpu())
        return record(t, *args)

    return run


def _on_device_of(t: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for i in indices:
        if i is None or not i.is_cpu:
            found.append(i)
        elif i.dtype in (torch.bool, torch.uint8) and i.dim() and i.shape == t.shape[len(found) : len(found) + i.dim()]:
            # The client knows the values of a mask on the host. As indices, they give a result shape that is known without
            # waiting.
            found += [n.to(raw_device(t)) for n in i.nonzero().unbind(1)]
        else:
            found.append(i.to(raw_device(t)))
    return found
