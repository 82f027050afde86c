"""Substitutes for operators that only the CPU's library has: programs are recorded as a CPU would run them (ADR 6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wooly_executor.errors import OperationError
from wooly_executor.runtime.torch_private import OpOverload


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of attention, and the logarithm of the sum of exponentials of each row."""
    scores = _scores(query, key, is_causal, attn_mask, scale)
    logs = torch.logsumexp(scores, -1)
    shares = torch.exp(scores - _finite(logs).unsqueeze(-1))
    return torch.matmul(shares, value.to(shares.dtype)).to(query.dtype), logs


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attention`, from the logarithms of its rows (Dao et al. 2022, algorithm 4, with one block)."""
    scores = _scores(query, key, is_causal, attn_mask, scale)
    shares = torch.exp(scores - _finite(logsumexp.to(scores.dtype)).unsqueeze(-1))
    wide = shares.dtype
    grad, factor = grad_out.to(wide), scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    grad_value = torch.matmul(shares.transpose(-2, -1), grad)
    along = torch.matmul(grad, value.to(wide).transpose(-2, -1))
    row = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = shares * (along - row) * factor
    grad_query = torch.matmul(grad_scores, key.to(wide))
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), query.to(wide))
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the scaled and masked scores, at least in float32."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1)) * factor
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores


def _finite(logs: Tensor) -> Tensor:
    """Replace -inf by 0. Fully masked rows have no finite logarithm, and all of their weights become 0."""
    return logs.masked_fill(logs == -math.inf, 0.0)


_DONE_BY: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
}
_LACKING = {
    "aten.mkldnn_rnn_layer.default": "set torch.backends.mkldnn.enabled = False in the script",
    "aten.mkldnn_rnn_layer_backward.default": "set torch.backends.mkldnn.enabled = False in the script",
    "aten.histogram.bin_ct": "use torch.histc",
    "aten.histogram.bin_ct_out": "use torch.histc",
    "aten.histogram.bins_tensor": "use torch.bucketize and torch.bincount",
    "aten.histogram.bins_tensor_out": "use torch.bucketize and torch.bincount",
}


def substitute(op: OpOverload) -> Callable[..., Any] | None:
    """Return the substitute for an operator that a GPU's library lacks; None: the library has the operator.

    Raises:
        OperationError: the library lacks the operator, and there is no substitute.
    """
    name = str(op)
    if name in _LACKING:
        raise OperationError(f"{name}: the library has this operator only for CPUs; {_LACKING[name]}")
    return _DONE_BY.get(name)
