"""Require that a program declares every operand that its operators write.

Copy-on-write of shared contents and the poisoning of buffers after a failure rely on the roles of operands. The session states
these roles, so they are not trusted. Without this check, an operator could write to an operand with the role `in`, and change a
buffer that other sessions share.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Attr, Form, OperandRef, Role

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.guards.law import Arguments
from wooly_executor.runtime.torch_private import OpOverload, schema_of, shares_storage

#: Arguments that operators write although their schemas do not say so, by operator name. A function takes the arguments as the
#: form states them and returns the names of the written ones.
UNDECLARED_WRITES: dict[str, Callable[[Arguments], tuple[str, ...]]] = {
    "native_batch_norm": lambda given: ("running_mean", "running_var") if given["training"] is not False else (),
    "batch_norm_update_stats": lambda given: ("running_mean", "running_var"),
    "mkldnn_rnn_layer_backward": lambda given: ("workspace",),
}


def undeclared_write(call: LibraryCall, form: Form) -> str:
    """Return an error message if the call writes an operand whose role is `in`, else an empty string."""
    schema = schema_of(call.op)
    undeclared = UNDECLARED_WRITES.get(call.op.overloadpacket.__name__) if call.op.namespace == "aten" else None
    if undeclared is None and not schema.is_mutable:
        return ""
    given: dict[str, Any] = {a.name: None for a in schema.arguments}
    given.update(zip(given, call.args, strict=False))
    given.update(call.kwargs)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if undeclared is not None:
        written.update(undeclared(given))
    for argument in sorted(written):
        for k in _operands(given[argument]):
            if form.operands[k].role is Role.IN:
                return (
                    f"{call.op} writes its argument {argument}, but operand {k} has the role 'in', not 'out' or 'inout'"
                )
    return ""


def overlapping_out(call: LibraryCall, form: Form) -> str:
    """Return an error message if an `out=` argument of the call overlaps itself, else an empty string.

    Some kernels write `numel` consecutive elements. A view that overlaps itself has less memory.
    """
    schema = schema_of(call.op)
    if not schema.is_mutable:
        return ""
    outs = {a.name for a in schema.arguments if a.is_out}
    for name, value in call.kwargs:
        for k in _operands(value) if name in outs else ():
            view = form.operands[k].view
            if view is None or not view.numel:
                continue
            if view.numel > 1 + sum([(n - 1) * step for n, step in zip(view.sizes, view.strides, strict=True)]):
                return f"{call.op}: {name} must not overlap itself"
    return ""


def out_arguments(call: LibraryCall) -> tuple[str, ...]:
    """Return the names of the `out=` arguments that the call has."""
    schema = schema_of(call.op)
    outs = {a.name for a in schema.arguments if a.is_out} if schema.is_mutable else ()
    return tuple(name for name, _ in call.kwargs if name in outs)


def works_in_place(op: OpOverload) -> bool:
    """Whether a result may lie exactly where an argument lies: element-wise operators, and those with an in-place form."""
    _, name, overload = str(op).split(".")
    # PyTorch leaves some `out=` overloads without the tag, for example aten.where.self_out
    plain = getattr(op.overloadpacket, overload.removesuffix("out").removesuffix("_") or "default", op)
    return any(torch.Tag.pointwise in o.tags for o in (op, plain)) or hasattr(torch.ops.aten, name + "_")


class Layout:
    """The layout of a result before a call.

    The library resizes results that have the wrong shape, and changes strides of some. The session's later instructions name the
    old layout.
    """

    __slots__ = ("_bytes", "_name", "_shape", "_strides", "_t")

    def __init__(self, name: str, t: Tensor) -> None:
        self._name, self._t, self._shape, self._strides = name, t, t.shape, t.stride()
        self._bytes = t.untyped_storage().nbytes()

    def require_kept(self, op: OpOverload) -> None:
        """Restore the layout and raise RuntimeError if it has changed."""
        t = self._t
        if t.shape == self._shape and (t.stride() == self._strides or not t.numel()):
            return
        if t.shape != self._shape:
            said = f"shape {list(t.shape)}, but {self._name}= has {list(self._shape)}"
        else:
            said = f"strides {list(t.stride())}, but {self._name}= has {list(self._strides)}"
        t.as_strided_(self._shape, self._strides)
        if t.untyped_storage().nbytes() > self._bytes:
            t.untyped_storage().resize_(self._bytes)
        raise RuntimeError(f"{op}: the result has {said}")

    @property
    def tensor(self) -> Tensor:
        return self._t

    def shares(self, others: list[Tensor]) -> bool:
        """Whether the result has memory of another tensor. For an empty result, the other tensor's storage counts.

        The library may enlarge the storage of an empty result.
        """
        if not self._t.numel():
            return any(shares_storage(self._t, t) for t in others)
        first, last = self.span()
        return any(begin < last and first < end for begin, end in map(_span, others))

    def apart(self) -> Layout:
        """A copy in memory of its own, with the same layout. An element that the operator does not write keeps its value."""
        t = torch.empty_strided(self._shape, self._strides, dtype=self._t.dtype, device=self._t.device)
        return Layout(self._name, t.copy_(self._t))

    def same_place(self, other: Tensor) -> bool:
        """Whether each element lies where `other` has the same element."""
        t = self._t
        return (t.data_ptr(), t.dtype, t.shape, t.stride()) == (
            other.data_ptr(),
            other.dtype,
            other.shape,
            other.stride(),
        )

    def span(self) -> tuple[int, int]:
        """The addresses of the first byte and behind the last byte."""
        return _span(self._t)


def _span(t: Tensor) -> tuple[int, int]:
    if not t.numel():
        return 0, 0
    last = sum([(n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)])
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def shared_results(op: OpOverload, outs: list[Layout], read: list[Tensor], exact: bool) -> dict[int, Layout]:
    """Return memory of their own for results that share memory with an argument, by the id of the result's tensor.

    Kernels read some arguments again after they have written a part of the results. Indices that were checked before would be
    overwritten by then.

    Args:
        outs: the results given as `out=`.
        read: the other tensors among the arguments.
        exact: whether a result may lie exactly where an argument lies.

    Raises:
        RuntimeError: results share memory with each other.
    """
    spans = sorted([layout.span() for layout in outs])
    if any(after[0] < before[1] for before, after in pairwise(spans)):
        raise RuntimeError(f"{op}: results given as out= must not overlap each other")
    found = {}
    for layout in outs:
        # in place, an empty argument gives the result its own shape, so the library enlarges nothing
        others = [t for t in read if not (exact and layout.same_place(t))]
        if not layout.tensor.numel():
            others += [other.tensor for other in outs if other is not layout]
        if layout.shares(others):
            found[id(layout.tensor)] = layout.apart()
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Return a tensor, or the tensors of a list."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (tuple, list)) else []


def _operands(value: Attr) -> list[int]:
    if isinstance(value, OperandRef):
        return [value.index]
    return [k for v in value for k in _operands(v)] if isinstance(value, (tuple, list)) else []
