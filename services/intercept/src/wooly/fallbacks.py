"""Counts what the client's CPU computes in the device's stead. There should be nothing to count: this is how one knows.

Device data reaches the CPU by one door only, `Transfer.to_host`. A *fallback* is what happens if somebody other than the program
opens it:

- a kernel of ours reads device data, though its operator is no transfer; or
- one call of the program that was given device tensors reads some of their data (PyTorch's own composite code does so, say by
  `.cpu()` or `.item()` in C++), and the CPU computes on what was read before that call is over.

What the program itself copies to the host and computes there is its own affair. Neither does it count that call signatures are
inferred on meta tensors and on zeros: these are shapes and errors, not data; `Inferences` says how many there were.

While no `Fallbacks` is entered none of this code runs.
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

#: Operators that are asked to bring data to the host, or between tensors.
_TRANSFERS = frozenset({"_to_copy", "to", "copy_", "copy", "_copy_from", "_copy_from_and_resize"})
#: Operators that tell a number to whoever asked. What is done with it happens outside of tensors.
_ANSWERS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero"})
#: Operators that make or look at tensors without computing on their elements.
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
    """A context in which fallbacks of this thread are counted.

    Args:
        device: the process's device.

    Attributes:
        found: count per operator.
        calls: operators with device tensors that were seen, so that a zero means something; those that a compiled function
            sends again as one program are among them.
    """

    def __init__(self, device: RegisteredDevice) -> None:
        self.found: Counter[str] = Counter()
        self._seen = 0
        self._replayed_before = graphs.counters.operations
        self._replayed: int | None = None
        self._reads: Callable[[], int] = lambda: device.transfer.reads
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
        """One call by the program."""
        self._frames.append(_Frame(any(_is_ours(x) for x in tree_leaves((args, kwargs)))))
        try:
            return function(*args, **kwargs)
        finally:
            self._frames.pop()

    def operate(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """One operator, whoever called it."""
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
    """One call by the program: whether it was given device tensors, and the host memory to which it brought their data."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours
        self._kept: list[Tensor] = []
        self._storages: set[int] = set()

    def brought(self, result: Any, leaves: list[Tensor]) -> None:
        """Remember host results of a transfer, or of what was computed from one."""
        for t in [x for x in tree_leaves(result) if isinstance(x, Tensor)] + leaves:
            if not _is_ours(t) and t.layout is torch.strided and t.device.type == "cpu":
                self._kept.append(t)  # so that no other tensor takes its address meanwhile
                self._storages.add(t.untyped_storage().data_ptr())

    def holds(self, leaves: list[Tensor]) -> bool:
        """Whether any of these lies in such memory."""
        return bool(self._storages) and any(
            t.layout is torch.strided and t.untyped_storage().data_ptr() in self._storages for t in leaves
        )


class _Functions(TorchFunctionMode):
    """Tells the calls by the program apart."""

    def __init__(self, owner: Fallbacks) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._owner.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    """Sees every operator that the dispatcher runs, those of PyTorch's composite code and of its backward too."""

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
