"""Require that a program declares every operand that its operators write.

Copy-on-write of shared contents and the poisoning of buffers after a failure rely on the roles of operands. The session states
these roles, so they are not trusted. Without this check, an operator could write to an operand with the role `in`, and change a
buffer that other sessions share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_wis.program import Attr, Form, OperandRef, Role

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.guards.law import Arguments
from wooly_executor.runtime.torch_private import schema_of

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


def _operands(value: Attr) -> list[int]:
    if isinstance(value, OperandRef):
        return [value.index]
    return [k for v in value for k in _operands(v)] if isinstance(value, (tuple, list)) else []
