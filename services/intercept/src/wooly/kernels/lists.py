"""Operators on lists of more tensors than an instruction takes: a model with thousands of parameters, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from wooly_wis.laws import MAX_OPERANDS

from wooly.kernels.schema import Kernel, OpFacts

aten = torch.ops.aten
#: Maximum number of tensors of an instruction, with the results.
_MOST = MAX_OPERANDS
_FUSED = ("_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")


def computes_by_index(name: str) -> bool:
    """Whether an operator computes on each index of its lists alone."""
    return name.startswith("_foreach_") or (name.startswith(_FUSED) and name.endswith("_"))


def in_parts(record: Kernel, facts: OpFacts) -> Kernel:
    """Wrap an operator that computes by index. If it has too many tensors, it is called with parts of its lists.

    Args:
        record: the kernel of the overload.
        facts: the overload.
    """
    op, makes_list = facts.op, facts.list_return

    def run(*args: Any, **kwargs: Any) -> Any:
        n = len(args[0]) if isinstance(args[0], list) else len(args[1])
        lists = sum([isinstance(a, list) and len(a) == n for a in (*args, *kwargs.values())]) + makes_list
        at_once = _MOST // (lists + 1)
        if n <= at_once:
            return record(*args, **kwargs)

        def part(a: Any, at: int) -> Any:
            return a[at : at + at_once] if isinstance(a, list) and len(a) == n else a

        found: list[Tensor] = []
        for at in range(0, n, at_once):
            # through PyTorch, so that what is learned of the part is not taken for the whole
            made = op(*[part(a, at) for a in args], **{k: part(a, at) for k, a in kwargs.items()})
            found += made or ()
        return found if makes_list else None

    return run


def joined(record: Kernel) -> Kernel:
    """Wrap `aten.cat` or `aten.cat.out`. Too many tensors are joined in parts, which are joined then."""

    def run(tensors: list[Tensor], dim: int = 0, **into: Tensor) -> Any:
        most = _MOST // 2
        if len(tensors) <= most or any(t.dtype is not tensors[0].dtype for t in tensors):
            return record(tensors, dim, **into)
        parts = [aten.cat(tensors[at : at + most], dim) for at in range(0, len(tensors), most)]
        return aten.cat.out(parts, dim, **into) if into else aten.cat(parts, dim)

    return run
