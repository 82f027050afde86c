"""A law for `pixel_unshuffle` of an empty tensor: the CPU's kernel returns a tensor of the input's shape."""

from __future__ import annotations

from torch import Tensor
from wooly_wis.program import Form, OperandRef

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require


def _is_empty(given: Arguments, form: Form) -> bool:
    """Whether `self` has no elements."""
    operand = given["self"]
    view = form.operands[operand.index].view if isinstance(operand, OperandRef) else None
    return view is not None and 0 in view.sizes


def _refuse(given: Arguments) -> None:
    require(False, "self must not be empty")


def _unshuffled(given: Arguments) -> Tensor:
    """The result, which has no elements."""
    if "out" in given:
        out: Tensor = given["out"]
        return out
    t: Tensor = given["self"]
    factor = given["downscale_factor"]
    *batch, channels, height, width = t.shape
    require(factor > 0, "downscale_factor must be positive")
    return t.new_empty((*batch, channels * factor**2, height // factor, width // factor))


LAWS: dict[str, ArgumentLaw] = {
    "pixel_unshuffle": ArgumentLaw(None, _refuse, applies=_is_empty, instead=_unshuffled),
}
