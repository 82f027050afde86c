"""Operators that a GPU's library lacks and that are rare: the host computes them, and the GPU waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly_executor.errors import OperationError
from wooly_executor.runtime.calls import function_of
from wooly_executor.runtime.torch_private import OpOverload, schema_of

#: Operators with a kernel for CPUs and without a kernel for CUDA, by name. The name stands for all overloads.
ABSENT = frozenset(
    (
        "_add_relu",
        "_add_relu_",
        "_functional_assert_async",
        "_histogramdd_bin_edges",
        "_histogramdd_from_bin_cts",
        "_histogramdd_from_bin_tensors",
        "histogram",
    )
)
#: Maximum number of bytes of a call's arguments: bounds the memory and the time of the host that one instruction takes.
MOST = 256 << 20


def on_host(op: OpOverload) -> Callable[..., Any]:
    """Return a function that copies the arguments of `op` to the host, calls `op` there, and copies the results back."""
    do, declared = function_of(op), schema_of(op).arguments
    written = frozenset([a.name for a in declared if a.alias_info is not None and a.alias_info.is_write])
    names = [a.name for a in declared]

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        nbytes = sum([t.nbytes for t in tensors])
        if nbytes > MOST:
            raise OperationError(
                f"{op}: the GPU's library lacks this operator, and its {nbytes} bytes of arguments are too many for the host, "
                f"which takes {MOST}; call it on parts"
            )
        given = dict(zip(names, args, strict=False)) | kwargs
        copies = {name: _to(value, torch.device("cpu")) for name, value in given.items()}
        found = do(*[copies[name] for name, _ in zip(names, args, strict=False)], **{k: copies[k] for k in kwargs})
        for name in written & given.keys():
            given[name].copy_(copies[name])
        originals = {id(copies[name]): given[name] for name in written & given.keys()}
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        several = isinstance(found, (list, tuple))
        results = [originals[id(t)] if id(t) in originals else _to(t, device) for t in (found if several else [found])]
        return results if several else results[0]

    run.looks_at_values = True  # type: ignore[attr-defined]
    return run


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, torch.device):
        return device
    return [_to(v, device) for v in value] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for part in parts for t in _tensors(part)]
