"""Counts fallbacks: operators on device tensors that the client's CPU computes. The expected count is zero.

Device data reaches the CPU only through `Transfer.to_host` and `Transfer.copy_`. A *fallback* is one of these:

- A Wooly kernel reads device data, although its operator is not a transfer.
- The program calls a function with device tensors. Inside this call, PyTorch's composite code reads their data (for example by
  `.cpu()` or `.item()` in C++), and the CPU computes on that data.

It is not a fallback if the program itself copies data to the host and computes there. Inference of shapes and errors on meta
tensors or zeros is not a fallback either, because it uses no device data; `Inferences` counts it.

This code only runs inside a `Fallbacks` context.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wooly import graphs
from wooly.device import RegisteredDevice
from wooly.devices import NAME
from wooly.torch_private import OpOverload, TorchDispatchMode, raw_device, schema_of, tree_leaves

#: Operators that copy data to the host or between tensors.
_TRANSFERS = frozenset({"_to_copy", "to", "copy_", "copy", "_copy_from", "_copy_from_and_resize"})
#: Operators that return a Python number. What the program computes with this number is not a tensor operation.
_ANSWERS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero"})
#: Operators that make, copy or view tensors and do not compute on their elements.
_NO_COMPUTATION = frozenset(
    {
        "detach",
        "clone",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "lift_fresh",
    }
)


class Fallbacks:
    """Context manager that counts the fallbacks of this thread.

    Args:
        device: the process's device.

    Attributes:
        found: number of fallbacks per operator.
        calls: number of operators on device tensors in this context, including operators of compiled functions. A zero in `found`
            means something only if this number is not zero.
    """

    def __init__(self, device: RegisteredDevice) -> None:
        self.found: Counter[str] = Counter()
        self._seen = 0
        self._replayed_before = graphs.counters.operations
        self._replayed: int | None = None
        self._reads: Callable[[], int] = lambda: device.reading.reads
        self._frames: list[_Frame] = []
        self._modes = contextlib.ExitStack()

    @property
    def calls(self) -> int:
        replayed = graphs.counters.operations if self._replayed is None else self._replayed
        return self._seen + replayed - self._replayed_before

    def __enter__(self) -> Fallbacks:
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._modes.__exit__(*exc)
        self._replayed = graphs.counters.operations

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one function call of the program."""
        self._frames.append(_Frame(any(_is_ours(x) for x in tree_leaves((args, kwargs)))))
        try:
            return function(*args, **kwargs)
        finally:
            self._frames.pop()

    def operate(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run one operator, and count it if it is a fallback."""
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = any(_is_ours(t) for t in leaves)
        before = self._reads()
        result = op(*args, **kwargs)
        name = op.overloadpacket.__name__
        frame = self._frames[-1] if self._frames else None
        if ours:
            self._seen += 1
            if self._reads() != before:
                if name in _TRANSFERS:
                    if frame is not None:
                        frame.brought(result if not _is_ours(result) else None, leaves)
                elif name not in _ANSWERS:
                    self.found[str(op)] += 1
        elif frame is not None and frame.ours and frame.holds(leaves):
            if not (name in _TRANSFERS or name in _NO_COMPUTATION or _is_view(op)):
                self.found[str(op)] += 1
            frame.brought(result, leaves)
        return result


class _Frame:
    """One function call of the program: whether it has device tensors, and the host memory that contains their data."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours
        self._kept: list[Tensor] = []
        self._storages: set[int] = set()

    def brought(self, result: Any, leaves: list[Tensor]) -> None:
        """Remember the host tensors that contain device data: results of a transfer, and results computed from them."""
        for t in [x for x in tree_leaves(result) if isinstance(x, Tensor)] + leaves:
            if not _is_ours(t) and t.layout is torch.strided and t.device.type == "cpu":
                self._kept.append(t)  # keeps the tensor alive, so that its address is not reused
                self._storages.add(t.untyped_storage().data_ptr())

    def holds(self, leaves: list[Tensor]) -> bool:
        """Whether any of these tensors is in memory that contains device data."""
        return bool(self._storages) and any(
            t.layout is torch.strided and t.untyped_storage().data_ptr() in self._storages for t in leaves
        )


class _Functions(TorchFunctionMode):
    """Intercepts the function calls of the program."""

    def __init__(self, owner: Fallbacks) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._owner.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Intercepts every operator that the dispatcher runs, including those of PyTorch's composite code and backward."""

    def __init__(self, owner: Fallbacks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._owner.operate(func, args, kwargs or {})


def _is_ours(t: Any) -> bool:
    return isinstance(t, Tensor) and raw_device(t).type == NAME


def _is_view(op: OpOverload) -> bool:
    schema = schema_of(op)
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


__all__ = ["Fallbacks"]
