"""What an operator writes, the program must say that it writes.

Who writes a shared content gets a copy of his own first, and what a failed program should have written is lost: both go by the
roles of operands, which are the session's word. An operator that writes what it was given to read would write what others share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_wis.program import Attr, Form, OperandRef, Role

from wooly_executor.runtime.calls import LibraryCall
from wooly_executor.runtime.guards.law import Arguments
from wooly_executor.runtime.torch_private import schema_of

#: Arguments that operators write though their schemas do not say so, by the operator's name; given what its form says.
UNSAID: dict[str, Callable[[Arguments], tuple[str, ...]]] = {
    "native_batch_norm": lambda given: ("running_mean", "running_var") if given["training"] is not False else (),
    "batch_norm_update_stats": lambda given: ("running_mean", "running_var"),
    "mkldnn_rnn_layer_backward": lambda given: ("workspace",),
}


def undeclared(call: LibraryCall, form: Form) -> str:
    """What is wrong with the roles of a call's operands; empty: nothing."""
    schema = schema_of(call.op)
    name = call.op.overloadpacket.__name__
    unsaid = UNSAID.get(name)
    if unsaid is None and not schema.is_mutable:
        return ""
    given: dict[str, Any] = {a.name: None for a in schema.arguments}
    given.update(zip(given, call.args, strict=False))
    given.update(call.kwargs)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    if unsaid is not None:
        written.update(unsaid(given))
    for argument in sorted(written):
        for k in _operands(given[argument]):
            if form.operands[k].role is Role.IN:
                return f"{call.op} writes {argument}, and operand {k} is only to be read"
    return ""


def misplaced(call: LibraryCall, form: Form) -> str:
    """What is wrong with where a call's `out=` lies; empty: nothing.

    Some kernels fill as much memory as there are elements. Where elements lie on each other there is less.
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
                return f"{call.op}: {name} overlaps itself"
    return ""


def _operands(value: Attr) -> list[int]:
    if isinstance(value, OperandRef):
        return [value.index]
    return [k for v in value for k in _operands(v)] if isinstance(value, (tuple, list)) else []
