"""Tensors of which several elements are one place in memory, as expanded ones: what may write them, and what may not."""

from __future__ import annotations

from torch import Tensor

from wooly.kernels.schema import Call, OpFacts
from wooly.torch_private import tree_leaves

#: Operators that may write an element twice.
FILLS = frozenset({"aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})


def overlaps(t: Tensor) -> bool:
    """Whether elements of `t` share memory in the way that expanded tensors do."""
    return 0 in t.stride() and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)) and t.numel() > 0


def once(t: Tensor) -> Tensor:
    """`t` with every element of its memory named once, where it is expanded."""
    if not overlaps(t):
        return t
    return t.as_strided([1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)], t.stride())


def refuse_overlap(t: Tensor) -> None:
    """Raise ATen's error for writing into an expanded tensor.

    Raises:
        RuntimeError: it is one.
    """
    if overlaps(t):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def refuse_overlaps(facts: OpFacts, call: Call) -> None:
    """Raise ATen's error for a call that writes into an expanded tensor.

    Raises:
        RuntimeError: it does.
    """
    if facts.mutable and facts.name not in FILLS:
        for name in facts.written:
            for t in tree_leaves(call.kwargs[name] if name in call.kwargs else call.args[facts.positions[name]]):
                if isinstance(t, Tensor):
                    refuse_overlap(t)
