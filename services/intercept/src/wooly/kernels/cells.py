"""Cells of recurrent networks as other operators, for traces and modes of PyTorch, which look at those operators.

PyTorch's own composition calls fused kernels on devices other than the CPU. These compute the same, in the CPU's order, and
refuse the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from wooly.torch_private import in_trace

aten = torch.ops.aten


def _check(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor) -> None:
    """Refuse what PyTorch refuses, in its words. The operators below would broadcast a batch of one.

    `torch.jit.trace` records sizes as tensors, so that comparisons would become a part of the trace. There, nothing is checked.

    Raises:
        RuntimeError: the sizes of the tensors do not fit.
    """
    if in_trace():
        return
    if x.size(1) != w_ih.size(1):
        raise RuntimeError(f"input has inconsistent input_size: got {x.size(1)} expected {w_ih.size(1)}")
    if x.size(0) != hx.size(0):
        raise RuntimeError(f"Input batch size {x.size(0)} doesn't match hidden0 batch size {hx.size(0)}")
    if hx.size(1) != w_hh.size(1):
        raise RuntimeError(f"hidden0 has inconsistent hidden_size: got {hx.size(1)}, expected {w_hh.size(1)}")


def _lstm(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if len(hx) != 2:
        raise RuntimeError("lstm_cell expects two hidden states")
    _check(x, hx[0], w_ih, w_hh)
    _check(x, hx[1], w_ih, w_hh)
    gates = linear(hx[0], w_hh, b_hh) + linear(x, w_ih, b_ih)
    entering, forgetting, new, leaving = gates.chunk(4, 1)
    cell = forgetting.sigmoid() * hx[1] + entering.sigmoid() * new.tanh()
    return leaving.sigmoid() * cell.tanh(), cell


def _gru(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    _check(x, hx, w_ih, w_hh)
    from_x, from_h = linear(x, w_ih, b_ih).chunk(3, 1), linear(hx, w_hh, b_hh).chunk(3, 1)
    reset, update = (from_h[0] + from_x[0]).sigmoid(), (from_h[1] + from_x[1]).sigmoid()
    new = (from_x[2] + from_h[2] * reset).tanh()
    return (hx - new) * update + new


def _rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        _check(x, hx, w_ih, w_hh)
        return activation(linear(hx, w_hh, b_hh) + linear(x, w_ih, b_ih))

    return cell


#: The function that composes each cell.
COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.lstm_cell.default: _lstm,
    aten.gru_cell.default: _gru,
    aten.rnn_tanh_cell.default: _rnn(torch.tanh),
    aten.rnn_relu_cell.default: _rnn(torch.relu),
}
