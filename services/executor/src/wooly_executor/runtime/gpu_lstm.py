"""oneDNN's layer of an LSTM on a GPU: one layer in one direction, by the GPU library's LSTM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wooly_executor.runtime.calls import Gradients, differentiate

aten = torch.ops.aten


def layer(
    data: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    recurrent_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Do `aten.mkldnn_rnn_layer`: the outputs, the last states, and no workspace.

    A program announces a workspace only in training. The executor puts zeros in its place.
    """
    weights = [weight, recurrent, bias, recurrent_bias]
    out, last, last_cell = _run(data, weights, hidden, cell, reverse, has_biases, train=False)
    return out, last, last_cell, None


def layer_backward(
    data: Tensor,
    weight: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    recurrent_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    output: Tensor,
    last: Tensor,
    last_cell: Tensor,
    grad_output: Tensor | None,
    grad_last: Tensor | None,
    grad_cell: Tensor | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    batch_first: bool,
    workspace: Tensor,
) -> list[Tensor]:
    """Do `aten.mkldnn_rnn_layer_backward`: the gradients of the first seven arguments.

    The forward pass runs again, because the workspace of the GPU library's operator has another content than oneDNN's.
    """
    operands = [data, weight, recurrent, bias, recurrent_bias, hidden, cell]
    given: list[int | None] = []
    for grad in (grad_output, grad_last, grad_cell):
        given.append(None if grad is None else len(operands))
        operands += [] if grad is None else [grad]
    if not any(k is not None for k in given):
        return [torch.zeros_like(t) for t in operands]

    def again(own: list[Tensor]) -> Any:
        return _run(own[0], own[1:5], own[5], own[6], reverse, has_biases, train=True)

    found: list[Tensor] = differentiate(again, operands, Gradients(tuple(range(7)), tuple(given)))
    return found


def _run(
    data: Tensor, weights: list[Tensor], hidden: Tensor, cell: Tensor, reverse: bool, has_biases: bool, *, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # cuDNN's memory for weights always contains biases, so a layer without biases gets biases of zero
    biases = weights[2:] if has_biases else [torch.zeros_like(w) for w in weights[2:]]
    used = _adjacent([*weights[:2], *biases])
    states = [t.reshape(1, data.shape[1], -1) for t in (hidden, cell)]
    steps = data.flip(0) if reverse else data
    out, last, last_cell = aten.lstm.input(steps, states, used, True, 1, 0.0, train, False, False)
    return out.flip(0) if reverse else out, last.reshape(hidden.shape), last_cell.reshape(cell.shape)


def _adjacent(weights: list[Tensor]) -> list[Tensor]:
    """Return copies of the weights in one piece of memory, in cuDNN's order.

    PyTorch's call of cuDNN copies weights that are apart, and prints a warning each time.
    """
    memory = torch.cat([w.reshape(-1) for w in weights])
    parts = memory.split([w.numel() for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
