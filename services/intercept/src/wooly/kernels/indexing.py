"""Operators that accept tensors of the host and of the device together, as on CUDA: indices, and numbers that are written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.overlap import overlaps, without_overlap
from wooly.kernels.schema import Kernel
from wooly.torch_private import OpOverload, raw_device

#: Operators that also accept indices on the host.
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})


def with_host_indices(record: Kernel, op: OpOverload, known: Callable[[Tensor], Tensor | None]) -> Kernel:
    """Wrap an indexing operator so that index tensors may be on the host, as in CUDA. They are copied to the device.

    A number on the device may be put into a tensor on the host.

    Args:
        record: the kernel for indices on the device.
        op: the operator.
        known: returns a host copy of a mask on the device, if it is known or small.
    """
    shape_depends_on_masks = op.overloadpacket.__name__ in ("index", "_unsafe_index")

    def run(t: Tensor, indices: list[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        if t.is_cpu and all(i is None or i.is_cpu for i in indices) and args and not args[0].dim():
            return op(t, indices, args[0].cpu(), *args[1:], **kwargs)
        for i in indices:
            if i is not None and i.is_cpu:
                return record(t, _on_device_of(t, indices), *args, **kwargs)
        if shape_depends_on_masks:
            here = raw_device(t)  # a mask on another device is an error, also if its values are known
            hosts = [
                known(i) if i is not None and i.dtype is torch.bool and raw_device(i) == here else None for i in indices
            ]
            if any(host is not None for host in hosts):
                indices = _on_device_of(
                    t, [i if host is None else host for i, host in zip(indices, hosts, strict=True)]
                )
        if t.is_cpu:
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return record(t, indices, *args, **kwargs)

    return run


def with_small_values(
    record: Kernel, dtypes: frozenset[torch.dtype], known: Callable[[Tensor], Tensor | None]
) -> Kernel:
    """Wrap an operator whose result's shape depends on data. If its operands are small, the host computes the result.

    Args:
        record: the kernel, which computes on the host what is known there.
        dtypes: dtypes of operands for which it does.
        known: returns a host copy of a tensor on the device, if it is known or small.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if all(t.dtype in dtypes for t in operands):
            for t in operands:
                if known(t) is None:  # else the link has a host copy of it now, which the kernel finds
                    break
        return record(*args, **kwargs)

    return run


def masked_select(record: Kernel, most: int, known: Callable[[Tensor], Tensor | None]) -> Kernel:
    """Wrap `aten.masked_select`. The indices of a small mask give a result whose size is known without waiting for it.

    Args:
        record: the kernel.
        most: maximum number of elements of which some are selected by indices.
        known: returns a host copy of a mask on the device, if it is known or small.
    """

    def run(t: Tensor, mask: Tensor) -> Any:
        if mask.dtype is torch.bool and raw_device(mask) == raw_device(t):
            sizes = torch.broadcast_shapes(t.shape, mask.shape)
            host = known(mask) if 0 < math.prod(sizes) <= most else None
            if host is not None:
                return t.expand(sizes)[host.expand(sizes)]
        return record(t, mask)

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


#: Operators that ATen lets write to expanded tensors, with a warning, and the position of their values after the tensor.
ON_EXPANDED = {
    "index_fill_.int_Scalar": 2,
    "index_fill_.int_Tensor": 2,
    "index_put_": 1,
    "_index_put_impl_": 1,
    "masked_fill_.Scalar": 1,
    "masked_fill_.Tensor": 1,
}


def on_expanded(record: Kernel, op: OpOverload, values_at: int) -> Kernel:
    """Wrap an operator of `ON_EXPANDED`. An instruction cannot write an element twice, so the operator writes a copy.

    If several elements at one address are written, the last of them counts. CUDA does not say which one counts there.
    """
    name = op.overloadpacket.__name__.replace("_index_put_impl_", "index_put_")
    example = "tensor[indices] = tensor" if name == "index_put_" else "tensor[mask] = scalar"

    def run(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not overlaps(t):
            return record(t, *args, **kwargs)
        warnings.warn(
            f"Use of {name} on expanded tensors is deprecated. Please clone() the tensor before performing this operation. "
            f"This also applies to advanced indexing e.g. {example}",
            UserWarning,
            stacklevel=2,
        )
        own = without_overlap(t)
        shared = [k for k in range(t.dim()) if own.shape[k] != t.shape[k]]
        if name == "index_put_" and (kwargs.get("accumulate") or (len(args) > 2 and args[2])):
            added = op(torch.zeros_like(t, memory_format=torch.contiguous_format), *args, **kwargs)
            own.add_(added.sum(shared, keepdim=True, dtype=t.dtype))
            return t
        values = args[values_at]
        marks = torch.ones_like(values, dtype=torch.bool) if isinstance(values, Tensor) else True
        marked = (*args[:values_at], marks, *args[values_at + 1 :])
        written = op(torch.zeros(t.shape, dtype=torch.bool, device=t.device), *marked, **kwargs)
        found = op(t.clone(memory_format=torch.contiguous_format), *args, **kwargs)
        there, new = [x.movedim(shared, list(range(-len(shared), 0))).flatten(-len(shared)) for x in (written, found)]
        last = (there * torch.arange(1, there.shape[-1] + 1, device=t.device)).argmax(-1, keepdim=True)
        own.copy_(torch.where(there.any(-1).view(own.shape), new.gather(-1, last).view(own.shape), own))
        return t

    return run
