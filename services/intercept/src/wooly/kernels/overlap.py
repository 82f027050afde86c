"""Tensors with several elements at the same address, such as expanded tensors: which operators may write to them."""

from __future__ import annotations

from torch import Tensor

from wooly.kernels.schema import Call, OpFacts
from wooly.torch_private import tree_leaves

#: Operators that may write to expanded tensors, because all elements get the same value.
FILLS = frozenset({"aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})


def overlaps(t: Tensor) -> bool:
    """Whether elements of `t` share memory, as in expanded tensors."""
    return 0 in t.stride() and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)) and t.numel() > 0


def without_overlap(t: Tensor) -> Tensor:
    """A view of `t` that contains each address only once. Only expanded tensors change."""
    if not overlaps(t):
        return t
    return t.as_strided([1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)], t.stride())


def refuse_overlap(t: Tensor) -> None:
    """Check that `t` is not expanded, before a write.

    Raises:
        RuntimeError: `t` is expanded. It is ATen's error.
    """
    if overlaps(t):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def refuse_overlaps(facts: OpFacts, call: Call) -> None:
    """Check that a call does not write to an expanded tensor.

    Raises:
        RuntimeError: the call writes to an expanded tensor. It is ATen's error.
    """
    if facts.mutable and facts.name not in FILLS:
        for name in facts.written:
            for t in tree_leaves(call.kwargs[name] if name in call.kwargs else call.args[facts.positions[name]]):
                if isinstance(t, Tensor):
                    refuse_overlap(t)
