"""Estimates the work of a form: its operator and shapes, looked up in the tables of the operator families."""

from __future__ import annotations

from typing import Any

import torch
from wooly_wis.externs import is_allowed
from wooly_wis.foreign import OPCODE as LAUNCH
from wooly_wis.optable import TABLE
from wooly_wis.program import Attr, Form, OperandRef, ParamRef, Role
from wooly_wis.sparse import NAMESPACE as SPARSE

from wooly_executor.bounds.elementwise import ELEMENTWISE, PASSES, base_of, over_all, over_lists, over_space
from wooly_executor.bounds.extensions import of_extension
from wooly_executor.bounds.indexing import INDEXING
from wooly_executor.bounds.products import PRODUCTS
from wooly_executor.bounds.sparse import of_sparse
from wooly_executor.bounds.windows import WINDOWS
from wooly_executor.bounds.work import PARAM, Given, Work
from wooly_executor.errors import OperationError
from wooly_executor.runtime.calls import LibraryCall, library_call
from wooly_executor.runtime.guards.law import arguments_of
from wooly_executor.runtime.torch_private import schema_of

#: Factor for an operator that runs forward and backward. The backward takes about twice as long as the forward, with some
#: reserve.
WITH_GRADIENTS = 4
#: Opcodes that this file does not limit: they do nothing on the device, or they have a time limit (that of foreign kernels is
#: `WOOLY_EXECUTOR_KERNEL_S`).
UNBOUNDED = frozenset(("alloc", "free", "sleep", LAUNCH))


def work_of(form: Form) -> Work:
    """Return the estimated work of one instruction of a verified form. The estimate is never much too small.

    Raises:
        OperationError: the library has no operator for the form.
        KeyError: the operator is in none of the tables.
    """
    if form.opcode in UNBOUNDED:
        return Work(0)
    if form.opcode not in TABLE and form.opcode != "extern":  # copy, fill
        return Work(max([o.view.numel for o in form.operands if o.view is not None], default=0))
    return work_of_call(library_call(form), form)


def work_of_call(call: LibraryCall, form: Form) -> Work:
    """Return the estimated work of a library call that a form describes."""
    given, name = _given(call, form), call.op.overloadpacket.__name__
    if call.op.namespace == "aten":
        work = _by_family(name, given)
    elif call.op.namespace == SPARSE:
        work = of_sparse(given)
    else:
        work = of_extension(f"{call.op.namespace}.{name}", given)
    return work.times(WITH_GRADIENTS) if form.attr("wanted") is not None and form.attr("no_grad") is None else work


def _by_family(name: str, given: Given) -> Work:
    base, lists = base_of(name)
    if lists:
        return over_lists(given, ELEMENTWISE[base])
    for table in (PRODUCTS, WINDOWS, INDEXING):
        rule = table.get(base)
        if rule is not None:
            return rule(given)
    if base in PASSES:
        return over_all(given, PASSES[base])
    return over_space(given, ELEMENTWISE[base])


def is_estimated(name: str) -> bool:
    """Whether an operator of the allow-list (``aten.add.Tensor``) is in one of the tables."""
    base, _ = base_of(name.split(".")[1])
    return is_allowed(name) and any(base in t for t in (PRODUCTS, WINDOWS, INDEXING, PASSES, ELEMENTWISE))


def _fixed(call: LibraryCall, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Check that integer arguments, which determine sizes, are constants of the form and not params.

    Raises:
        OperationError: an integer argument is a param.
    """
    declared = {a.name: a for a in schema_of(call.op).arguments}
    said = dict(zip(declared, args, strict=False)) | kwargs
    for name, value in said.items():
        given = value if isinstance(value, tuple) else (value,)
        if PARAM in given and name in declared and "int" in str(declared[name].type):
            raise OperationError(
                f"{call.op}: {name} determines the amount of work, so it must be a constant of the program, not a param"
            )


def _given(call: LibraryCall, form: Form) -> Given:
    args = [_known(a, form) for a in call.args]
    kwargs = {k: _known(v, form) for k, v in call.kwargs}
    _fixed(call, args, kwargs)
    said = arguments_of(call.op, args, kwargs)
    named = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
    outs = [o.view for o in form.operands if o.role is not Role.IN and o.view is not None]
    return Given(named, outs)


def _known(attr: Attr | torch.Tensor, form: Form) -> Any:
    if isinstance(attr, OperandRef):
        return form.operands[attr.index].view
    if isinstance(attr, ParamRef):
        return PARAM
    if isinstance(attr, torch.Tensor):
        return tuple(attr.tolist()) if attr.dim() else attr.item()
    return tuple([_known(a, form) for a in attr]) if isinstance(attr, tuple) else attr
