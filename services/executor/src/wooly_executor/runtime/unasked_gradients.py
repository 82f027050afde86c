"""Gradients of group norms on a CPU whose input needs none: the library's kernel for channels-last memory ends the process.

It writes the gradient of the input also if `output_mask` does not ask for it, to memory that nobody has made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from wooly_wis.program import Form

from wooly_executor.runtime.calls import LibraryCall, function_of


def unasked_gradient(call: LibraryCall, form: Form) -> Callable[..., Any] | None:
    """Return a function that takes an operator's place; None: the operator is not the gradient of a group norm."""
    if str(call.op) != "aten.native_group_norm_backward.default":
        return None
    function = function_of(call.op)

    def backward(*args: Any) -> tuple[Tensor | None, ...]:
        *others, (of_input, of_weight, of_bias) = args
        found: tuple[Tensor | None, ...] = function(*others, [True, of_weight, of_bias])
        return (found[0] if of_input else None), *found[1:]

    return backward
