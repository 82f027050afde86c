"""Kernels for layers that PyTorch decomposes differently for an unknown device than for the CPU.

For convolution and LSTM, ATen's choice depends on the device type. The kernels here make the choice of the executor's
library, so that the results have the same bits. `linear` is recorded as one instruction instead of five.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly.devices import NAME
from wooly.kernels.schema import Kernel
from wooly.kernels.whole import is_traced
from wooly.torch_private import (
    convolution_flags,
    convolution_with_flags,
    has_tangents,
    in_trace,
    is_zero_tensor,
    schema_of,
)

aten = torch.ops.aten


_STRIDED = torch.strided


def linear(record: Kernel) -> Kernel:
    """`aten.linear` under autograd: one instruction without gradients and tangents, else PyTorch's decomposition."""
    decompose = aten.linear.default.decompose

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return decompose(x, weight, bias)
        if is_traced(x) or is_traced(weight) or weight.layout is not _STRIDED:
            return decompose(x, weight, bias)
        if has_tangents((x, weight) if bias is None else (x, weight, bias)):
            return decompose(x, weight, bias)
        if x.is_complex() or x.is_neg() or weight.is_neg() or (bias is not None and bias.is_neg()):
            return decompose(x, weight, bias)  # conjugate and negative views are not resolved yet
        if is_zero_tensor(x) or is_zero_tensor(weight) or (bias is not None and is_zero_tensor(bias)):
            return decompose(x, weight, bias)
        return record(x, weight, bias)

    return run


def convolution(record: Kernel) -> Kernel:
    """`aten.convolution`. `torch.jit.trace` cannot record it, so a traced call becomes `aten._convolution`, as on CUDA."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if in_trace():
            return convolution_with_flags(*args, **kwargs, **convolution_flags())
        return record(*args, **kwargs)

    return run


#: Number of arguments of `aten.convolution`. The other arguments of `aten._convolution` choose among CUDA's algorithms.
_PLAIN_ARGUMENTS = 9


def flagged_convolution(make: Callable[..., Kernel]) -> Kernel:
    """`aten._convolution`: `aten.convolution`, but the call has its own flags instead of those of the process.

    Like `torch.backends.cudnn.benchmark` and `.enabled`, the arguments `benchmark` and `cudnn_enabled` have no effect.

    Args:
        make: makes the kernel of `aten.convolution`. The argument `flags` are flags that the kernel keeps.
    """
    kernels = {}
    for deterministic in (False, True):
        for tf32 in (False, True):
            flags = ("cudnn_deterministic",) * deterministic + ("no_conv_tf32",) * (not tf32)
            kernels[deterministic, tf32] = make(flags=flags)

    def run(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        kernel = kernels[bool(named["deterministic"]), bool(named.get("allow_tf32", True))]
        return kernel(*[named[name] for name in _ARGUMENTS[:_PLAIN_ARGUMENTS]])

    return run


_ARGUMENTS = tuple([a.name for a in schema_of(aten._convolution.default).arguments])


def batch_norm(record: Kernel, record_training: Kernel) -> Kernel:
    """`aten.native_batch_norm`, which writes the running statistics in training although its schema does not declare it.

    In training, this kernel records the operator `_native_batch_norm_legit`, which has the same kernel and declares the write. So
    a later read of the statistics gets the new values, and the compiler does not move the read before the write.
    """

    def run(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        *rest: Any,
        **outs: Any,
    ) -> Any:
        updates = rest[0] and mean is not None and var is not None
        return (record_training if updates else record)(x, weight, bias, mean, var, *rest, **outs)

    return run


def embedding_bag_backward(record: Kernel) -> Kernel:
    """Wrap the gradient of `embedding_bag`. A sparse gradient consists of dense parts, which ATen's composite operator makes."""

    def run(
        grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, max_indices: Tensor,
        num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool, *rest: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        counts = (num_weights, scale_grad_by_freq, mode)
        if not sparse:
            told = (grad, indices, offsets, offset2bag, bag_size, max_indices, *counts, sparse)
            return record(*told, *rest, **named)  # type: ignore[no-any-return]
        # The forward does not compute `offset2bag` in its fast case. Here as there: the bag of each index, from the bags' begins.
        begins = offsets.new_zeros(indices.shape[0] + 1).index_add_(0, offsets, torch.ones_like(offsets))
        bag_of = (begins.cumsum(0) - 1)[:-1]
        made = aten._embedding_bag_sparse_backward
        return made(grad, indices, offsets, bag_of, bag_size, *counts, *rest, **named)  # type: ignore[no-any-return]

    return run


def cross_entropy(
    whole: Kernel,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`aten.cross_entropy_loss`: ATen's two operators for class indices; one instruction for label smoothing or probabilities.

    CUDA's autocast has no rule for it, but rules for operators of which ATen composes it.
    """
    plain = not label_smoothing and not target.is_floating_point()
    call = aten.cross_entropy_loss.default.decompose if plain or torch.is_autocast_enabled(NAME) else whole
    return call(logits, target, weight, reduction, ignore_index, label_smoothing)  # type: ignore[no-any-return]


def batch_norm_backward(record: Kernel) -> Kernel:
    """`aten.native_batch_norm_backward` and `batch_norm_backward`.

    For an empty batch, the gradients are zeros. The CPU kernel ends the process.
    """

    def run(grad: Tensor, x: Tensor, weight: Tensor | None, *rest: Any, **named: Any) -> Any:
        if x.numel() or x.dim() < 2:
            return record(grad, x, weight, *rest, **named)
        mask = named["output_mask"] if "output_mask" in named else next(a for a in rest if isinstance(a, (list, tuple)))
        kind = weight.dtype if weight is not None else x.dtype
        of_channels = [torch.zeros(x.shape[1], dtype=kind, device=x.device) if asked else None for asked in mask[1:]]
        return (torch.empty_like(x) if mask[0] else None, *of_channels)

    return run


@functools.cache
def _onednn_takes_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def lstm_input(
    whole: Kernel,
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
    """`aten.lstm.input`: the CPU's fused layers if the CPU would use them, else one instruction by `whole`."""
    h0, c0 = [t.contiguous() for t in hx]
    fused = (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and (x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and _onednn_takes_bfloat16()))
        and x.numel() > 0
        and h0.shape[-1] == c0.shape[-1]
        and len(params) == (4 if has_biases else 2) * num_layers * (2 if bidirectional else 1)
    )
    if not fused:
        return whole(  # type: ignore[no-any-return]
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
    """Call `mkldnn_rnn_layer` once per layer and direction. Each call has its own gradient."""
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
                torch.is_grad_enabled(),  # the kernel uses only this flag, also in evaluation
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
