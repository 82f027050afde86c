"""Operators that PyTorch would break up differently for an unknown device than for the CPU.

Where ATen chooses by device type (convolution, attention, LSTM), these make the choice that the executor's library makes, so that
the results are the same bits; and where one instruction says as much as five (linear), they keep it one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Kernel = Callable[..., Any]


def linear(record: Kernel) -> Kernel:
    """`aten.linear` under autograd: one instruction for inference, PyTorch's own pieces when a gradient is wanted."""
    decompose = aten.linear.default.decompose

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return decompose(x, weight, bias)
        return record(x, weight, bias)

    return run


_sdp_choices: dict[tuple[Any, ...], int] = {}


def fused_sdp_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """The attention kernel that the CPU would choose for tensors of this kind.

    Asked of PyTorch itself, on host tensors of the same shapes that share one element.
    """
    needs = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    mask_needs = attn_mask is not None and torch.is_grad_enabled() and attn_mask.requires_grad
    signature = (
        *((t.dtype, t.shape, t.stride()) for t in (query, key, value)),
        None if attn_mask is None else (attn_mask.dtype, attn_mask.shape),
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        needs,
        mask_needs,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )
    choice = _sdp_choices.get(signature)
    if choice is None:

        def like(t: Tensor, grad: bool) -> Tensor:
            # Real strides are part of the choice; the memory behind them is never touched.
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).requires_grad_(grad)

        if len(_sdp_choices) > 16384:
            _sdp_choices.clear()
        choice = _sdp_choices[signature] = torch._fused_sdp_choice(
            like(query, needs),
            like(key, needs),
            like(value, needs),
            None if attn_mask is None else like(attn_mask, mask_needs),
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return choice


def lstm_input(
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.lstm.input`: through the CPU's fused layers where the CPU would use them, else PyTorch's own pieces."""
    h0, c0 = hx
    fused = (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and x.dtype is torch.float32
        and x.numel() > 0
        and h0.shape[-1] == c0.shape[-1]
        and len(params) == (4 if has_biases else 2) * num_layers * (2 if bidirectional else 1)
    )
    if not fused:
        return aten.lstm.input.decompose(  # type: ignore[no-any-return]
            x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    return _fused_lstm(x, h0, c0, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _fused_lstm(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer loop around `mkldnn_rnn_layer`, one call per layer and direction, each with its own gradient."""
    lstm_mode = 2
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    layer_in = x.transpose(0, 1) if batch_first else x
    layer_in = layer_in.contiguous()
    hidden = h0.shape[2]
    hs, cs = [], []
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            index = layer * directions + direction
            w = params[index * per_layer : (index + 1) * per_layer]
            if has_biases:
                biases = (w[2], w[3])
            else:
                biases = (w[0].new_zeros(w[0].shape[0]), w[0].new_zeros(w[0].shape[0]))
            out, h, c, _ = torch.mkldnn_rnn_layer(
                layer_in,
                w[0],
                w[1],
                *biases,
                h0[index],
                c0[index],
                direction == 1,
                [],
                lstm_mode,
                hidden,
                num_layers,
                has_biases,
                bidirectional,
                False,
                train,
            )
            outs.append(out)
            hs.append(h)
            cs.append(c)
        layer_in = outs[0] if directions == 1 else torch.cat(outs, outs[0].dim() - 1)
        if dropout != 0 and train and layer < num_layers - 1:
            layer_in = torch.dropout(layer_in, dropout, True)
    if batch_first:
        layer_in = layer_in.transpose(0, 1)
    return layer_in, torch.stack(hs, 0), torch.stack(cs, 0)
