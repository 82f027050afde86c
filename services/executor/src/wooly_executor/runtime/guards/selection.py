"""A law for the median along a dimension: the CPU's kernel steps along it by one element, even where the stride is 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from wooly_wis.program import Form, OperandRef

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require


def _repeats(given: Arguments, form: Form) -> bool:
    """Whether the form reads some element of `self` more than once."""
    operand = given["self"]
    view = form.operands[operand.index].view if isinstance(operand, OperandRef) else None
    return view is not None and any(n > 1 and not step for n, step in zip(view.sizes, view.strides, strict=True))


def _refuse(given: Arguments) -> None:
    require(False, "self must not repeat elements")


def _of_copy(operator: Any) -> Callable[[Arguments], Any]:
    """Return a function that calls the operator with a copy of `self` in which every element is stored."""

    def call(given: Arguments) -> Any:
        copy = given["self"].contiguous()
        if "dim" not in given:
            return operator(copy)
        if "values" not in given:
            return operator.dim(copy, given["dim"], given["keepdim"])
        out = {name: given[name] for name in ("values", "indices")}
        return operator.dim_values(copy, given["dim"], given["keepdim"], **out)

    return call


LAWS: dict[str, ArgumentLaw] = {
    name: ArgumentLaw(None, _refuse, applies=_repeats, instead=_of_copy(getattr(torch.ops.aten, name)))
    for name in ("median", "nanmedian")
}
