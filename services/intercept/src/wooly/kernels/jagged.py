"""Attention over sequences of different lengths that lie one after the other, which PyTorch uses for jagged tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wooly.kernels.schema import passing_undefined
from wooly.torch_private import jagged_attention

_Window = tuple[int | None, int | None]

#: The dtypes of CUDA's flash attention.
_HALVES = (torch.float16, torch.bfloat16)

#: Values of `custom_mask_type`: no mask, causal from the first, and from the last position of each sequence.
_NONE, _FROM_FIRST = 0, 1
#: The logarithms of the sums are padded to a multiple of this number of rows.
_LOGS_UNIT = 32
#: For each value: how many keys before and behind its own position a query sees (None: all).
_WINDOWS: tuple[_Window, ...] = ((None, None), (None, 0), (None, 0))


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
    """`aten._efficient_attention_forward`, for a batch `[batch, length, heads, width]`, or for sequences
    `[1, total, heads, width]` with the offsets `cu_seqlens_q` and `cu_seqlens_k`.

    The sequences are padded and masked. Autograd differentiates this composition. The seed and the offset are zero.

    Raises:
        NotImplementedError: the call has a window or lengths of keys, or a bias for sequences of different lengths.
        RuntimeError: CUDA's kernel lacks the dtype; only one of the sides has offsets, or their greatest length is not given.
    """
    if query.dtype not in (torch.float32, *_HALVES):
        raise RuntimeError("Only fp32, half & bf16 supported at the moment")
    if seqlen_k is not None or window_size is not None:
        raise NotImplementedError(
            "aten._efficient_attention_forward on the wooly device takes no seqlen_k or window_size; give a bias"
        )
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise RuntimeError("cu_seqlens_q and cu_seqlens_k must both be given, or none of them")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _efficient_batch(
            query, key, value, bias, dropout_p, custom_mask_type, compute_log_sumexp=compute_log_sumexp, scale=scale
        )
    if max_seqlen_q is None or max_seqlen_k is None:
        raise RuntimeError("max_seqlen_q and max_seqlen_k must be given with cu_seqlens_q and cu_seqlens_k")
    if bias is not None:
        raise NotImplementedError(
            "aten._efficient_attention_forward on the wooly device takes no bias with cu_seqlens_q; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    q = _padded(query[0], cu_seqlens_q, max_seqlen_q)
    k, v = [_padded(t[0], cu_seqlens_k, max_seqlen_k) for t in (key, value)]
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    first = custom_mask_type == _FROM_FIRST
    mask = _mask(lengths_k if first else lengths_q, lengths_k, max_seqlen_q, max_seqlen_k, _WINDOWS[custom_mask_type])
    attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    out = _packed(attended.transpose(1, 2), cu_seqlens_q, query.size(1)).unsqueeze(0)
    sums = _log_sums(q, k, mask, scale) if compute_log_sumexp else _no_log_sums(q)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, sums, seed, seed.clone(), max_seqlen_q, max_seqlen_k


def _efficient_batch(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, mask_type: int, *,
    compute_log_sumexp: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:  # fmt: skip
    """`efficient_attention` of a batch `[batch, length, heads, width]` with an optional bias `[batch, heads, length, keys]`."""
    q, k, v = [t.transpose(1, 2) for t in (query, key, value)]
    length_q, length_k = q.size(2), k.size(2)
    mask = bias
    if mask_type != _NONE:
        later = 1 if mask_type == _FROM_FIRST else 1 + length_k - length_q
        hidden = torch.ones(length_q, length_k, dtype=torch.bool, device=query.device).triu(later)
        mask = ~hidden if bias is None else bias.masked_fill(hidden, -math.inf)
    attended = functional.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    sums = _log_sums(q, k, mask, scale) if compute_log_sumexp else _no_log_sums(q)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    return attended.transpose(1, 2).contiguous(), sums, seed, seed.clone(), length_q, length_k


def _log_sums(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The logarithms of the sums of attention: float32 `[batch, heads, length]`, with infinity up to a multiple of 32."""
    factor = 1 / math.sqrt(q.size(3)) if scale is None else scale
    scores = torch.matmul(q.detach().float() * factor, k.detach().float().transpose(2, 3))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.detach().float()
    return functional.pad(scores.logsumexp(3), (0, -q.size(2) % _LOGS_UNIT), value=math.inf)


def _no_log_sums(q: Tensor) -> Tensor:
    """What stands for the logarithms of the sums if nobody asks for them."""
    return q.new_empty((*q.shape[:2], 0), dtype=torch.float32)


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


def _mask(lengths_q: Tensor, lengths_k: Tensor, length_q: int, length_k: int, window: _Window) -> Tensor:
    """Which keys each query sees: bool `[batch, 1, length_q, length_k]`. The last query's position is that of the last key."""
    before, behind = window
    lengths = lengths_k[:, None, None]
    keys = torch.arange(length_k, device=lengths.device)
    own = torch.arange(length_q, device=lengths.device)[None, :, None] + lengths - lengths_q[:, None, None]
    mask = (keys < lengths).expand(-1, length_q, -1)
    if behind is not None:
        mask = mask & (keys <= own + behind)
    if before is not None:
        mask = mask & (keys >= own - before)
    return mask[:, None]


class _Flash:
    """One call of flash attention, computed in float32 on padded sequences `[batch, heads, length, width]`."""

    def __init__(
        self, query: Tensor, key: Tensor, cumulative: tuple[Tensor | None, Tensor | None], longest: tuple[int, int],
        causal: bool, scale: float | None, window: tuple[int | None, int | None], used: Tensor | None,
    ) -> None:  # fmt: skip
        self._places = [
            _even(t, length) if c is None else (c, length)
            for t, c, length in zip((query, key), cumulative, longest, strict=True)
        ]
        self._shapes = (query.shape, key.shape)
        self._groups = query.size(-2) // key.size(-2)
        self.scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        before, behind = (None if w is None or w < 0 else w for w in window)
        self.queries, self.keys = self.padded(query, 0), self.repeated(key)
        lengths_q, lengths_k = (c.diff() for c, _ in self._places)
        mask = _mask(
            *(lengths_q, lengths_k if used is None else used, self._places[0][1], self._places[1][1]),
            (before, 0 if causal else behind),
        )
        scores = torch.matmul(self.queries * self.scale, self.keys.transpose(2, 3))
        self.scores = scores.masked_fill(~mask, -math.inf)

    def padded(self, t: Tensor, side: int) -> Tensor:
        """A tensor with rows of queries (side 0) or keys (side 1), padded."""
        return _padded(t.reshape(-1, *t.shape[-2:]).float(), *self._places[side])

    def repeated(self, t: Tensor) -> Tensor:
        """Padded keys or values, with one head for each head of the queries."""
        return self.padded(t, 1).repeat_interleave(self._groups, 1)

    def packed(self, t: Tensor, side: int, dtype: torch.dtype) -> Tensor:
        """A padded result in the form of the queries or keys; the sum over the heads that share a head."""
        shape = self._shapes[side]
        if side == 1:
            t = t.unflatten(1, (shape[-2], self._groups)).sum(2)
        rows = math.prod(shape[:-2])
        return _packed(t.transpose(1, 2), self._places[side][0], rows).reshape(*shape[:-1], t.size(-1)).to(dtype)

    def sums(self, logsumexp: Tensor) -> Tensor:
        """The logarithms of the sums `[batch, heads, length, 1]`, of those that the forward has returned."""
        if logsumexp.dim() == 3:
            return logsumexp[..., None]
        return _padded(logsumexp.t()[..., None], *self._places[0])

    def weights(self, sums: Tensor) -> Tensor:
        """The weights of the values. A query that sees no key has zeros."""
        return torch.where(sums == -math.inf, 0, (self.scores - sums).exp())


def _even(t: Tensor, length: int) -> tuple[Tensor, int]:
    """Places of the sequences of a dense tensor `[batch, length, heads, width]`."""
    return torch.arange(t.size(0) + 1, device=t.device, dtype=torch.int32) * t.size(1), t.size(1)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`aten._flash_attention_forward`, which `torch.nn.attention.varlen` calls. The state of random numbers is empty.

    Raises:
        NotImplementedError: the call has dropout, slopes, or pages of keys.
        RuntimeError: CUDA's kernel lacks the dtypes.
    """
    if query.dtype not in _HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for name, other in (("key", key), ("value", value)):
        if other.dtype is not query.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype")
    if dropout_p or return_debug_mask or alibi_slopes is not None or block_table is not None:
        raise NotImplementedError(
            "aten._flash_attention_forward on the wooly device takes no dropout, alibi_slopes or block_table; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    call = _Flash(
        *(query, key, (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal, scale, (window_size_left, window_size_right)),
        seqused_k,
    )
    sums = call.scores.logsumexp(3, keepdim=True)
    out = call.packed(torch.matmul(call.weights(sums), call.repeated(value)), 0, query.dtype)
    sums = sums[..., 0] if cum_seq_q is None else _packed(sums.transpose(1, 2), cum_seq_q, query.size(0))[..., 0].t()
    nothing = query.new_empty(0)
    return out, sums.contiguous(), nothing, nothing.clone(), nothing.clone()


def flash_attention_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`aten._flash_attention_forward_no_dropout_inplace`."""
    found, sums, *_ = flash_attention(*args, **kwargs)
    out.copy_(found)
    return sums


def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
    *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`aten._flash_attention_backward`: the gradients of queries, keys and values."""
    call = _Flash(
        *(query, key, (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal, scale, (window_size_left, window_size_right)),
        None,
    )
    weights = call.weights(call.sums(logsumexp))
    grad, values = call.padded(grad_out, 0), call.repeated(value)
    share = (grad * call.padded(out, 0)).sum(3, keepdim=True)
    of_scores = weights * (torch.matmul(grad, values.transpose(2, 3)) - share) * call.scale
    return (
        call.packed(torch.matmul(of_scores, call.keys), 0, query.dtype),
        call.packed(torch.matmul(of_scores.transpose(2, 3), call.queries), 1, key.dtype),
        call.packed(torch.matmul(weights.transpose(2, 3), grad), 1, value.dtype),
    )


#: Kernels by the operator's name. Some releases of PyTorch do not have all of the operators.
KERNELS: dict[str, Callable[..., Any]] = {
    name: passing_undefined(name, kernel)
    for name, kernel in (
        ("_flash_attention_forward", flash_attention),
        ("_flash_attention_forward_no_dropout_inplace", flash_attention_into),
        ("_flash_attention_backward", flash_attention_backward),
    )
    if hasattr(torch.ops.aten, name)
}


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch (owner, name, value) that lets PyTorch choose this attention for jagged tensors on the device."""
    owner, name, real = jagged_attention()

    def can_use(params: Any, debug: bool = False) -> bool:
        if params.query.is_cuda:
            return bool(torch.backends.cuda.mem_efficient_sdp_enabled())
        return real(params, debug)

    yield owner, name, can_use
