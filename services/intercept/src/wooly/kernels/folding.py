"""Layers whose product depends on whether their weights require gradients, also where gradients are disabled.

`aten.matmul` of a tensor with three or more dimensions and a matrix folds the tensor into a matrix if the matrix requires a
gradient, or if the tensor's strides permit a view. Else it multiplies many matrices, and the sums have other last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wooly.kernels.schema import Kernel

aten = torch.ops.aten

#: Recurrent layers. They multiply the whole sequence with the weights of the first layer.
RECURRENT = frozenset(
    {aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input},
)
_PARAMS, _BATCH_FIRST = 2, 8


def folds(x: Tensor) -> bool:
    """Whether the strides permit a view as a matrix with the last dimension as columns. `aten.matmul` checks the same."""
    sizes, strides = x.shape, x.stride()
    return all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(len(sizes) - 2))


def linear(record: Kernel) -> Kernel:
    """`aten.linear` below autograd: one instruction, which does not know whether the weight requires gradients.

    If the choice of the product depends on it, PyTorch's decomposition runs.
    """
    decompose = aten.linear.default.decompose

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if weight.requires_grad and not folds(x):
            return decompose(x, weight, bias)
        return record(x, weight, bias)

    return run


def depends_on_gradients(args: tuple[Any, ...]) -> bool:
    """Whether the products of a recurrent layer depend on whether its weights require gradients."""
    x = args[0]
    if x.dim() != 3 or not any(p.requires_grad for p in args[_PARAMS]):
        return False
    return not folds(x.transpose(0, 1) if args[_BATCH_FIRST] else x)
