"""Attention over sequences of different lengths that lie one after the other, which PyTorch uses for jagged tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wooly.torch_private import jagged_attention

#: Values of `custom_mask_type`: no mask, causal from the first, and from the last position of each sequence.
_NONE, _FROM_FIRST, _FROM_LAST = 0, 1, 2


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """`aten._efficient_attention_forward` for sequences `[1, total, heads, width]` with the offsets `cu_seqlens_q`.

    The sequences are padded and masked. Autograd differentiates this composition. The seed and the offset are zero.

    Raises:
        NotImplementedError: the call has a bias, a window, or no sequences of different lengths.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        raise NotImplementedError(
            "aten._efficient_attention_forward on the wooly device needs cu_seqlens_q and cu_seqlens_k; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    if bias is not None or seqlen_k is not None or window_size is not None:
        raise NotImplementedError(
            "aten._efficient_attention_forward on the wooly device takes no bias, seqlen_k or window_size"
        )
    q = _padded(query[0], cu_seqlens_q, max_seqlen_q)
    k, v = [_padded(t[0], cu_seqlens_k, max_seqlen_k) for t in (key, value)]
    mask = _mask(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, custom_mask_type)
    attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    out = _packed(attended.transpose(1, 2), cu_seqlens_q, query.size(1)).unsqueeze(0)
    sums = query.new_empty((cu_seqlens_q.size(0) - 1, query.size(2), 0), dtype=torch.float32)
    if compute_log_sumexp:
        factor = 1 / math.sqrt(query.size(3)) if scale is None else scale
        scores = torch.matmul(q.detach().float() * factor, k.detach().float().transpose(2, 3))
        sums = scores.masked_fill(~mask, -math.inf).logsumexp(3)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, sums, seed, seed.clone(), max_seqlen_q, max_seqlen_k


def _places(cumulative: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """For each place of the padded sequences `[batch, length]`: the row, and whether the sequence has it."""
    rows = cumulative[:-1, None] + torch.arange(length, device=cumulative.device)
    return rows, rows < cumulative[1:, None]


def _padded(packed: Tensor, cumulative: Tensor, length: int) -> Tensor:
    """Rows `[total, heads, width]` as `[batch, heads, length, width]`, with zeros behind the end of each sequence."""
    rows, inside = _places(cumulative, length)
    padded = torch.where(inside[..., None, None], packed[torch.where(inside, rows, 0)], packed.new_zeros(()))
    return padded.transpose(1, 2)


def _packed(padded: Tensor, cumulative: Tensor, total: int) -> Tensor:
    """Sequences `[batch, length, heads, width]` as rows `[total, heads, width]`."""
    rows = torch.arange(total, device=cumulative.device, dtype=cumulative.dtype)
    sequence = torch.searchsorted(cumulative, rows, right=True) - 1
    return padded[sequence, rows - cumulative[sequence]]


def _mask(cumulative_q: Tensor, cumulative_k: Tensor, length_q: int, length_k: int, kind: int) -> Tensor:
    """Which keys each query sees: bool `[batch, 1, length_q, length_k]`."""
    places = torch.arange(length_k, device=cumulative_k.device)
    queries = torch.arange(length_q, device=cumulative_q.device)[None, :, None]
    lengths = (cumulative_k[1:] - cumulative_k[:-1])[:, None, None]
    mask = places < lengths
    if kind == _FROM_LAST:
        queries = queries + lengths - (cumulative_q[1:] - cumulative_q[:-1])[:, None, None]
    if kind != _NONE:
        mask = mask & (places <= queries)
    return mask.expand(-1, length_q, -1)[:, None]


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, value) that lets PyTorch choose this attention for jagged tensors on the device."""
    owner, name, real = jagged_attention()

    def can_use(params: Any, debug: bool = False) -> bool:
        if params.query.is_cuda:
            return bool(torch.backends.cuda.mem_efficient_sdp_enabled())
        return real(params, debug)

    yield owner, name, can_use
