"""Resolve conjugate views, negative views, and zero tensors without memory, before an operator that cannot read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.kernels.schema import Kernel
from wooly.storage import dense_strides
from wooly.torch_private import OpOverload, is_zero_tensor, neg_view, raw_device, schema_of


def plain(t: Tensor) -> Tensor:
    """A tensor with the same values that is not a conjugate view, not a negative view and not a zero tensor without memory."""
    if is_zero_tensor(t):
        return torch.zeros(t.shape, dtype=t.dtype, device=raw_device(t))
    laid = t
    if t.is_conj():
        t = torch.conj_physical(t.conj())
    if t.is_neg():
        t = torch.neg(neg_view(t))
    if t is not laid and t.stride() != laid.stride():
        # The CPU clones, which also keeps the strides of dimensions of size 1. Matrix products depend on these strides.
        kept = dense_strides(laid.shape, laid.stride())
        if all(n == 1 or a == b for n, a, b in zip(laid.shape, t.stride(), kept, strict=True)):
            t = t.as_strided(laid.shape, kept)
    return t


#: Operators (mostly matrix products) whose kernels read conjugate views without a copy, because BLAS can conjugate operands.
_CONJUGATING = frozenset(
    {"addmm", "addmm_", "baddbmm", "baddbmm_", "bmm", "dot", "linalg_solve_triangular", "mm", "vdot"}
)


#: Operators whose kernels also read negative views without a copy.
_NEGATING = frozenset({"linalg_solve_triangular"})


def _is_unresolved(a: Any) -> bool:
    return isinstance(a, Tensor) and (a.is_conj() or a.is_neg() or is_zero_tensor(a))


def on_plain(op: OpOverload, kernel: Callable[[tuple[Any, ...]], Kernel]) -> Kernel:
    """Wrap an operator to which PyTorch passes conjugate and negative views. Views that its kernel cannot read are resolved
    first.

    Args:
        op: the operator.
        kernel: makes its kernel from, per positional argument, whether it is a conjugate view and whether it is a negative view.
    """
    record = kernel(())
    kernels: dict[tuple[Any, ...], Kernel] = {}
    conjugates = op.overloadpacket.__name__ in _CONJUGATING
    negates = op.overloadpacket.__name__ in _NEGATING
    schema = schema_of(op).arguments
    written = frozenset(a.name for a in schema if a.alias_info is not None and a.alias_info.is_write)

    def resolve(a: Any, written: bool) -> Any:
        if isinstance(a, list):
            return [resolve(x, written) for x in a]
        if not isinstance(a, Tensor):
            return a
        if written or is_zero_tensor(a) or (a.is_conj() and not conjugates) or (a.is_neg() and not negates):
            return plain(a)
        return a

    def run_resolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = tuple([resolve(a, declared.name in written) for a, declared in zip(args, schema, strict=False)])
        named = {k: resolve(a, k in written) for k, a in kwargs.items()}
        pattern = tuple([isinstance(a, Tensor) and (a.is_conj(), a.is_neg()) for a in own])
        run = kernels.get(pattern)
        if run is None:
            run = kernels[pattern] = kernel(pattern) if any(map(_is_unresolved, own)) else record
        result = run(*own, **named)
        for name, a, b in [
            *[(declared.name, a, b) for declared, a, b in zip(schema, args, own, strict=False)],
            *[(k, a, named[k]) for k, a in kwargs.items()],
        ]:
            if name in written and isinstance(a, Tensor) and a is not b:
                if a.shape != b.shape:
                    a.resize_(b.shape)
                a.copy_(b)
                result = a if result is b else result
        return result

    def run(*args: Any, **kwargs: Any) -> Any:
        for a in args:  # `_is_unresolved`, without its call
            if isinstance(a, Tensor):
                if a.is_conj() or a.is_neg() or is_zero_tensor(a):
                    return run_resolved(args, kwargs)
            elif a.__class__ is list:
                return run_resolved(args, kwargs)
        if kwargs and any(_is_unresolved(a) for a in kwargs.values()):
            return run_resolved(args, kwargs)
        return record(*args, **kwargs)

    return run
