"""CUDA's fused attention operators: flash, memory-efficient and cuDNN's, with their gradients.

Without dropout, and for calls that the CPU's fused operator can compute, that operator is recorded. The executor of a GPU
computes it with the fused operator of its library. Other calls are composed of matrix products, at least in float32.

The random numbers of dropout lie behind the seed and the offset, in the same storage. So the tensors that autograd keeps for the
gradient lead to them, also in a captured graph, whose replays draw new numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wooly.devices import Devices
from wooly.kernels.schema import Kernel, passing_undefined
from wooly.rng import DeviceGenerator, Generator, replayed_pair
from wooly.storage import dense_strides
from wooly.torch_private import alert_not_deterministic, raw_device, without_autocast

aten = torch.ops.aten

_library = aten._scaled_dot_product_flash_attention_for_cpu.default
_library_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: The memory-efficient operator pads the logarithms of its sums to a multiple of this number of rows.
_LOGS_UNIT = 32
#: int64 words before the random numbers of dropout: seed and offset.
_WORDS = 2


class _Call(NamedTuple):
    """A call of attention: tensors `[batch, heads, length, width]`, and a bias `[batch, heads, length, length of keys]`.

    Attributes:
        aligned: whether the bias says that the last query sees all keys. Then the first ones may see none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    aligned: bool = False

    @classmethod
    def flash(
        cls, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
    ) -> _Call:
        """A call of flash attention, in which the last causal query sees all keys. In other calls, the first sees the first."""
        length, keys = query.size(2), key.size(2)
        if not causal or length == keys:
            return cls(query, key, value, None, dropout, causal, scale)
        seen = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        bias = torch.where(seen, torch.zeros((), dtype=query.dtype, device="cpu"), -math.inf)
        return cls(query, key, value, bias.expand(1, 1, length, keys), dropout, False, scale, aligned=True)

    @property
    def is_for_library(self) -> bool:
        """Whether the CPU's fused operator can compute the call."""
        q, k, v = self.query, self.key, self.value
        same_widths = k.shape == v.shape and q.size(3) == k.size(3)
        blind = self.bias is not None and q.size(2) > k.size(2) and self.aligned
        return not self.dropout and 0 not in (*q.shape, *k.shape) and same_widths and not blind

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.query.size(-1)) if self.scale is None else self.scale

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which products are computed."""
        return torch.float64 if self.query.dtype is torch.float64 else torch.float32

    def shared(self, t: Tensor) -> Tensor:
        """Keys or values in the wide dtype, with one head for each head of the queries."""
        groups = self.query.size(1) // max(t.size(1), 1)
        t = t.to(self.wide)
        return t if groups == 1 else t.repeat_interleave(groups, 1)

    def summed(self, grad: Tensor, of: Tensor) -> Tensor:
        """The gradient of `shared`, in the dtype of `of`."""
        if grad.size(1) != of.size(1):
            grad = grad.unflatten(1, (of.size(1), -1)).sum(2)
        return grad.to(of.dtype)

    def scores(self) -> Tensor:
        """The scaled scores with bias, in the wide dtype. Keys that a causal query does not see have -inf."""
        found = torch.matmul(self.query.to(self.wide) * self.factor, self.shared(self.key).transpose(2, 3))
        if self.bias is not None:
            found = found + self.bias
        if self.causal:
            seen = torch.ones(found.shape[2:], dtype=torch.bool, device=found.device).tril()
            found = found.masked_fill(~seen, -math.inf)
        return found

    def forward(self, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The result, the logarithms of the sums `[batch, heads, length]`, and the weights before dropout.

        Args:
            kept: which weights dropout keeps; None: all.
        """
        scores = self.scores()
        logs = scores.logsumexp(3)
        weights = self.weights(scores, logs)
        used = weights if kept is None else weights * kept * _rescale(self.dropout)
        out = torch.matmul(used, self.shared(self.value)).to(self.query.dtype)
        return out, logs, weights

    def weights(self, scores: Tensor, logs: Tensor) -> Tensor:
        """The weights of the values. A query that sees no key has zeros."""
        logs = logs.unsqueeze(3)
        return (scores - logs).exp().masked_fill(logs == -math.inf, 0.0)

    def backward(self, grad: Tensor, out: Tensor, logs: Tensor, kept: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients of query, key, value and bias. Source: Dao et al. 2022, algorithm 4, with one block."""
        weights = self.weights(self.scores(), logs.to(self.wide))
        grad, value = grad.to(self.wide), self.shared(self.value)
        along = torch.matmul(grad, value.transpose(2, 3))
        used = weights
        if kept is not None:
            along, used = along * kept * _rescale(self.dropout), weights * kept * _rescale(self.dropout)
        of_scores = weights * (along - (grad * out.to(self.wide)).sum(3, keepdim=True))
        return (
            (torch.matmul(of_scores, self.shared(self.key)) * self.factor).to(self.query.dtype),
            self.summed(torch.matmul(of_scores.transpose(2, 3), self.query.to(self.wide)) * self.factor, self.key),
            self.summed(torch.matmul(used.transpose(2, 3), grad), self.value),
            of_scores,
        )


def _rescale(dropout: float) -> float:
    """By how much the weights grow that dropout keeps."""
    return 1 / (1 - dropout) if dropout < 1 else 0.0


def _transposed(out: Tensor) -> Tensor:
    """The result in the layout `[batch, length, heads, width]`, which fused operators make."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


class FusedAttention:
    """The operators, for all devices."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def kernels(self) -> dict[str, Kernel]:
        """The kernels by the operator's name."""
        own: dict[str, Kernel] = {
            "_scaled_dot_product_flash_attention": self.flash,
            "_scaled_dot_product_flash_attention_backward": self.flash_backward,
            "_scaled_dot_product_efficient_attention": self.efficient,
            "_scaled_dot_product_efficient_attention_backward": self.efficient_backward,
            "_scaled_dot_product_cudnn_attention": self.cudnn,
            "_scaled_dot_product_cudnn_attention_backward": self.cudnn_backward,
            "_fill_mem_eff_dropout_mask_": self.fill_mask,
        }
        return {name: without_autocast(passing_undefined(name, kernel)) for name, kernel in own.items()}

    # -- random numbers --------------------------------------------------------------------------------------------------------

    def _drawn(self, call: _Call) -> tuple[Tensor, Tensor | None]:
        """Seed and offset `[2]`, and which weights dropout keeps `[batch, heads, length, length of keys]`; None: all."""
        query = call.query
        words = torch.zeros(_WORDS, dtype=torch.int64, device=query.device)
        if not call.dropout:
            return words, None
        pair = self._devices.recorders[raw_device(query).index].generator.next_pair()
        shape = (*query.shape[:3], call.key.size(2))
        keep = torch.empty(shape, dtype=torch.float32, device=query.device).uniform_() > call.dropout
        words = torch.empty(_WORDS + -(-keep.numel() // 8), dtype=torch.int64, device=query.device)
        words[0].fill_(pair[0])
        words[1].fill_(pair[1])
        kept = words[_WORDS:].view(torch.bool)[: keep.numel()].view(shape)
        return words[:_WORDS], kept.copy_(keep)

    @staticmethod
    def _kept(call: _Call, words: Tensor) -> Tensor | None:
        """Which weights the forward's dropout has kept, of a tensor of its seed."""
        if not call.dropout:
            return None
        shape = (*call.query.shape[:3], call.key.size(2))
        whole = torch.empty(0, dtype=torch.bool, device=words.device)
        strides = torch.empty(shape, device="meta").stride()
        return whole.set_(words.untyped_storage(), 8 * _WORDS, shape, strides)

    def fill_mask(self, mask: Tensor, dropout_p: float, seed: int, offset: int) -> Tensor:
        """`aten._fill_mem_eff_dropout_mask_`: the numbers in [0, 1) that dropout of a seed and an offset compares with its p."""
        sequence = Generator()
        drawn_seed, drawn_offset = replayed_pair((seed, offset))
        sequence.manual_seed(drawn_seed)
        sequence.offset = drawn_offset
        return mask.uniform_(generator=DeviceGenerator(raw_device(mask).index, sequence))

    # -- the operators ---------------------------------------------------------------------------------------------------------

    def forward(self, call: _Call) -> tuple[Tensor, Tensor, Tensor, Callable[[], Tensor]]:
        """Compute a call.

        Returns:
            the result, the logarithms of the sums `[batch, heads, length]`, seed and offset `[2]`, and a function that makes the
            debug mask.
        """
        words, kept = self._drawn(call)
        if call.is_for_library:
            out, logs = _library(
                *(call.query, call.key, call.value, 0.0, call.causal), attn_mask=call.bias, scale=call.scale
            )
            return out, logs, words, lambda: call.query.new_empty(0)
        out, logs, weights = call.forward(kept)

        def debug_mask() -> Tensor:
            if kept is None:
                return call.query.new_empty(0)
            return torch.where(kept, weights, -weights).to(call.query.dtype)

        return _transposed(out), logs, words, debug_mask

    def backward(
        self, call: _Call, grad: Tensor, out: Tensor, logs: Tensor, words: Tensor, *, of_bias: bool = False
    ) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, and of the bias if the call is composed, from what `forward` returned."""
        if call.is_for_library and not of_bias:
            groups = call.query.size(1) // call.key.size(1)
            k, v = [t if groups == 1 else t.repeat_interleave(groups, 1) for t in (call.key, call.value)]
            of_query, of_key, of_value = _library_backward(
                *(grad, call.query, k, v, out, logs, 0.0, call.causal), attn_mask=call.bias, scale=call.scale
            )
            # The library adds the gradients of heads that share a head in a short dtype, and CUDA's kernel does not.
            return of_query, call.summed(of_key, call.key), call.summed(of_value, call.value)
        return call.backward(grad, out, logs, self._kept(call, words))

    def flash(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """`aten._scaled_dot_product_flash_attention`. Dropped weights are negative in the debug mask."""
        call = _Call.flash(query, key, value, dropout_p, is_causal, scale)
        out, logs, words, debug_mask = self.forward(call)
        mask = debug_mask() if return_debug_mask else query.new_empty(0)
        return out, logs, None, None, query.size(2), key.size(2), words, words[0], mask

    def flash_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`aten._scaled_dot_product_flash_attention_backward`."""
        _warn_not_deterministic("Flash Attention")
        call = _Call.flash(query, key, value, dropout_p, is_causal, scale)
        return self.backward(call, grad_out, out, logsumexp, philox_seed)[:3]

    def efficient(
        self, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`aten._scaled_dot_product_efficient_attention`."""
        call = _Call(query, key, value, attn_bias, dropout_p, is_causal, scale)
        out, logs, words, _ = self.forward(call)
        if compute_log_sumexp:
            logs = torch.nn.functional.pad(logs, (0, -logs.size(2) % _LOGS_UNIT), value=math.inf)
        else:
            logs = logs.new_empty((*logs.shape[:2], 0))
        return out, logs, words[0], words[1]

    def efficient_backward(
        self, grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor,
        logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
        is_causal: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """`aten._scaled_dot_product_efficient_attention_backward`."""
        _warn_not_deterministic("Memory Efficient attention")
        call = _Call(query, key, value, attn_bias, dropout_p, is_causal, scale)
        logs = logsumexp[..., : query.size(2)]
        found = self.backward(call, grad_out_, out, logs, philox_seed, of_bias=grad_input_mask[3])
        of_bias = found[3].to(attn_bias.dtype) if attn_bias is not None and grad_input_mask[3] else None
        return *found[:3], of_bias

    def cudnn(
        self, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """`aten._scaled_dot_product_cudnn_attention`. The result has the layout of the queries."""
        call = _Call(query, key, value, attn_bias, dropout_p, is_causal, scale)
        out, logs, words, _ = self.forward(call)
        if query.size(3) == value.size(3):
            layout = dense_strides(tuple(query.shape), query.stride())
            if out.stride() != layout:
                out = torch.empty_strided(out.shape, layout, dtype=out.dtype, device=out.device).copy_(out)
        return out, logs.unsqueeze(3), None, None, query.size(2), key.size(2), words[0], words[1], None

    def cudnn_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        philox_seed: Tensor, philox_offset: Tensor, attn_bias: Tensor | None, cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`aten._scaled_dot_product_cudnn_attention_backward`.

        Raises:
            RuntimeError: the script asks for deterministic algorithms.
        """
        alert_not_deterministic("_scaled_dot_product_cudnn_attention_backward")
        call = _Call(query, key, value, attn_bias, dropout_p, is_causal, scale)
        return self.backward(call, grad_out, out, logsumexp.squeeze(3), philox_seed)[:3]


class _Padded(NamedTuple):
    """Nested queries, keys or values, padded with zeros.

    Attributes:
        dense: `[batch, heads, length, width]`, expanded to the batch and the heads of the call.
        own: batch and heads of the nested tensor.
        sizes: host sizes of its parts `[batch, 3]`: heads, length, width.
        is_nested: whether the tensor was nested.
    """

    dense: Tensor
    own: tuple[int, int]
    sizes: Tensor
    is_nested: bool

    def nested(self, padded: Tensor) -> Tensor:
        """A gradient of `dense` as a gradient of the nested tensor: without padding, and sums where it was expanded."""
        expanded = [dim for dim in (0, 1) if padded.size(dim) != self.own[dim]]
        return _unpadded(padded.sum(expanded, keepdim=True) if expanded else padded, self.sizes)


def _unpadded(padded: Tensor, sizes: Tensor) -> Tensor:
    """Parts `[heads, length, width]` of `[batch, heads, length, width]`, as a nested tensor."""
    parts = [part[:, :length].reshape(-1) for part, (_, length, _) in zip(padded.unbind(), sizes.tolist(), strict=True)]
    facts = aten._nested_compute_contiguous_strides_offsets(sizes)
    return aten._nested_view_from_buffer(torch.cat(parts), sizes, *facts)  # type: ignore[no-any-return]


def _sizes(t: Tensor) -> Tensor:
    if t.is_nested:
        return aten._nested_tensor_size(t)  # type: ignore[no-any-return]
    return torch.tensor([t.shape[1:]], device="cpu").expand(t.size(0), 3).contiguous()


class NestedAttention:
    """Flash and memory-efficient attention of nested tensors `[batch, heads, *, width]`, computed on padded tensors.

    A batch or a number of heads of 1 is expanded, and any of the tensors may be dense.
    """

    def __init__(self, dense: FusedAttention) -> None:
        self._dense = dense

    def kernels(self) -> dict[str, Kernel]:
        """The kernels by the operator's name."""
        own: dict[str, Kernel] = {
            "_scaled_dot_product_flash_attention": self.flash,
            "_scaled_dot_product_flash_attention_backward": self.flash_backward,
            "_scaled_dot_product_efficient_attention": self.efficient,
            "_scaled_dot_product_efficient_attention_backward": self.efficient_backward,
        }
        return {name: without_autocast(passing_undefined(name, kernel)) for name, kernel in own.items()}

    def _call(
        self, tensors: tuple[Tensor, Tensor, Tensor], dropout: float, causal: bool, scale: float | None
    ) -> tuple[_Call, list[_Padded]]:
        """The call on padded tensors. A bias hides the padding of keys.

        Raises:
            RuntimeError: the call is causal, or the batches or heads do not fit.
        """
        if causal:
            raise RuntimeError("Nested tensors for query / key are not supported when is_causal=True.")
        sizes = [_sizes(t) for t in tensors]
        batch = max(s.size(0) for s in sizes)
        heads = max(int(s[0, 0]) for s in sizes)
        padded = list[_Padded]()
        for t, size in zip(tensors, sizes, strict=True):
            dense = t.contiguous().to_padded_tensor(0.0) if t.is_nested else t
            own = (dense.size(0), dense.size(1))
            padded.append(_Padded(dense.expand(batch, heads, *dense.shape[2:]), own, size, t.is_nested))
        q, k, v = [p.dense for p in padded]
        lengths = padded[1].sizes[:, 1].expand(batch)
        hidden = torch.arange(k.size(2), device="cpu") >= lengths[:, None]
        bias = torch.zeros(hidden.shape, device="cpu").masked_fill_(hidden, -math.inf).to(q.device)
        return _Call(q, k, v, bias[:, None, None].expand(*q.shape[:3], k.size(2)), dropout, False, scale), padded

    @staticmethod
    def _result(out: Tensor, query: _Padded) -> Tensor:
        sizes = query.sizes.expand(out.size(0), 3).clone()
        sizes[:, 0], sizes[:, 2] = out.size(1), out.size(3)
        return _unpadded(out, sizes)

    def _grads(
        self, call: _Call, padded: list[_Padded], grad: Tensor, out: Tensor, logs: Tensor, words: Tensor
    ) -> tuple[Tensor, ...]:
        grad, out = [t.contiguous().to_padded_tensor(0.0) for t in (grad, out)]
        found = self._dense.backward(call, grad, out, logs, words)
        return tuple(
            p.nested(g) if p.is_nested else g.sum_to_size((*p.own, *g.shape[2:]))
            for p, g in zip(padded, found[:3], strict=True)
        )

    def flash(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """`aten._scaled_dot_product_flash_attention`."""
        call, padded = self._call((query, key, value), dropout_p, is_causal, scale)
        out, logs, words, debug_mask = self._dense.forward(call)
        mask = debug_mask() if return_debug_mask else logs.new_empty(0)
        lengths = (call.query.size(2), call.key.size(2))
        return self._result(out, padded[0]), logs, None, None, *lengths, words, words[0], mask

    def flash_backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
        philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`aten._scaled_dot_product_flash_attention_backward`."""
        call, padded = self._call((query, key, value), dropout_p, is_causal, scale)
        return self._grads(call, padded, grad_out, out, logsumexp, philox_seed)

    def efficient(
        self, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`aten._scaled_dot_product_efficient_attention`.

        Raises:
            RuntimeError: there is a bias.
        """
        if attn_bias is not None:
            raise RuntimeError("attn_bias is not supported for nested tensors.")
        call, padded = self._call((query, key, value), dropout_p, is_causal, scale)
        out, logs, words, _ = self._dense.forward(call)
        return self._result(out, padded[0]), logs, words[0], words[1]

    def efficient_backward(
        self, grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor,
        logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
        is_causal: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """`aten._scaled_dot_product_efficient_attention_backward`."""
        call, padded = self._call((query, key, value), dropout_p, is_causal, scale)
        return *self._grads(call, padded, grad_out_, out, logsumexp, philox_seed), None


def _warn_not_deterministic(name: str) -> None:
    """CUDA's warning, if the script wants warnings of algorithms that are not deterministic."""
    if torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(
            f"{name} defaults to a non-deterministic algorithm. To explicitly enable determinism call "
            "torch.use_deterministic_algorithms(True, warn_only=False).",
            stacklevel=2,
        )
