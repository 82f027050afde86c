"""Gradients of dilated convolutions in bfloat16 on a CPU: the library's gradient of the weight is wrong for channels-last memory.

oneDNN then returns numbers that depend on memory which the operator never wrote, often NaN, with any number of threads. The
gradients of the input and of the bias are right, and so is the gradient of the weight if no tensor is channels-last: PyTorch then
makes contiguous copies.

For convolutions of any kind, oneDNN returns the gradient of the weight with that of the bias, also if nobody asks for it. It is
left out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Form

from wooly_executor.runtime.calls import LibraryCall, function_of
from wooly_executor.runtime.torch_private import suggested_format


def dilated_convolution(call: LibraryCall, form: Form) -> Callable[..., Any] | None:
    """Return a function that takes an operator's place; None: the operator is not the gradient of a convolution."""
    if str(call.op) != "aten.convolution_backward.default":
        return None
    function = function_of(call.op)

    def backward(
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias_sizes: list[int] | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
        output_mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        how = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
        of_input, of_weight, of_bias = output_mask
        if not of_weight:
            of_input_found, _, of_bias_found = function(grad_output, input, weight, *how, output_mask)
            return of_input_found, None, of_bias_found
        right = input.dtype != torch.bfloat16 or all(d == 1 for d in dilation)
        if right or not (_is_channels_last(input) or _is_channels_last(weight)):
            found: tuple[Tensor | None, ...] = function(grad_output, input, weight, *how, output_mask)
            return found
        _, exact, _ = function(grad_output.float(), input.float(), weight.float(), *how, [False, True, False])
        others: tuple[Tensor | None, ...] = (None, None, None)
        if of_input or of_bias:
            others = function(grad_output, input, weight, *how, [of_input, False, of_bias])
        return others[0], exact.to(torch.bfloat16), others[2]

    return backward


def _is_channels_last(t: Tensor) -> bool:
    # PyTorch computes convolutions of one dimension as those of two.
    return suggested_format(t.unsqueeze(2) if t.dim() == 3 else t) is not torch.contiguous_format
