"""Operators that vLLM compiled for CUDA, made of PyTorch's operators, with vLLM's names and schemas.

vLLM's kernels in Triton for mixtures of experts and quantised weights stand between calls of such operators. No shape here
depends on values of the device, so that a step can be a CUDA graph.

If the executor offers an operator with the same schema, because it has vLLM's own library, that one runs (ADR 57).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: PyTorch's keys under which the functions are registered. A function for all devices would go before what an executor offers.
_KEYS = ("CPU", "CUDA", "Meta")
#: A function for each schema of an operator.
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
#: Libraries of the operators. PyTorch forgets operators whose library has no reference.
_LIBRARIES: list[torch.library.Library] = []


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function of an operator with its schema, as `namespace::name(...) -> (...)`."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _FUNCTIONS[schema] = function
        return function

    return keep


def install() -> None:
    """Define the operators that are not there yet. Calling it again changes nothing."""
    for schema, function in _FUNCTIONS.items():
        namespace, _, rest = schema.partition("::")
        name = rest.partition("(")[0]
        if hasattr(getattr(torch.ops, namespace), name):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(rest)
        for key in _KEYS:
            library.impl(name, function, key)
        _LIBRARIES.append(library)


def _choose(
    weights: Tensor,
    chosen: Tensor,
    rows: Tensor,
    scores: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    factor: float,
    is_padding: Tensor | None,
) -> None:
    """Choose each token's experts by the largest scores (plus bias), the first of equal ones; write them and their weights."""
    tokens, k = chosen.shape
    by = scores if bias is None else scores + bias
    found = by.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    taken = scores.gather(1, found)
    if renormalize:
        total = taken.sum(-1, keepdim=True)
        taken = taken / torch.where(total > 0, total, 1.0)
    weights.copy_(taken * factor if factor != 1.0 else taken)
    chosen.copy_(found if is_padding is None else found.masked_fill(is_padding[:, None], -1))
    rows.copy_(torch.arange(k * tokens, device=rows.device).view(k, tokens).t())


@_operator(
    "_moe_C::topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
    "bool renormalize, Tensor? bias, Tensor? is_padding) -> ()"
)
def _topk_softmax(
    weights: Tensor,
    chosen: Tensor,
    rows: Tensor,
    gating: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    is_padding: Tensor | None,
) -> None:
    _choose(weights, chosen, rows, gating.float().softmax(-1), renormalize, bias, 1.0, is_padding)


@_operator(
    "_moe_C::topk_sigmoid(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
    "bool renormalize, Tensor? bias, float routed_scaling_factor, Tensor? is_padding) -> ()"
)
def _topk_sigmoid(
    weights: Tensor,
    chosen: Tensor,
    rows: Tensor,
    gating: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    factor: float,
    is_padding: Tensor | None,
) -> None:
    _choose(weights, chosen, rows, gating.float().sigmoid(), renormalize, bias, factor, is_padding)


@_operator(
    "_moe_C::moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map, Tensor(a!)? scatter_idx=None) -> ()"
)
def _moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    padded: Tensor,
    expert_map: Tensor | None,
    scatter_idx: Tensor | None = None,
) -> None:
    """Sort the places of a batch by expert, and pad each expert's to whole blocks with the number of all places."""
    flat = topk_ids.flatten().long()
    places = flat.numel()
    valid = (flat >= 0) & (flat < num_experts)
    if expert_map is not None:
        flat = torch.where(valid, expert_map[flat.where(valid, 0)].long(), -1)
        valid = flat >= 0
    flat = torch.where(valid, flat, num_experts)  # places of no expert come last, and are written nowhere
    if scatter_idx is not None:
        own = torch.arange(places, device=flat.device, dtype=torch.int32)
        scatter_idx.copy_(torch.where(valid, own, -1)[:, None])
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts[:num_experts] + block_size - 1).div(block_size, rounding_mode="floor")
    ends = blocks.cumsum(0)
    size = sorted_ids.numel()
    experts, order = flat.sort(stable=True)
    before = F.pad((ends - blocks) * block_size, (0, 1), value=size) - (counts.cumsum(0) - counts)
    at = before[experts] + torch.arange(places, device=flat.device)
    at = torch.where(experts < num_experts, at, size).clamp_(max=size)
    whole = torch.full((size + 1,), places, dtype=sorted_ids.dtype, device=flat.device)
    sorted_ids.copy_(whole.scatter_(0, at, order.to(whole.dtype))[:size])
    expert_ids.copy_(torch.searchsorted(ends, torch.arange(expert_ids.numel(), device=flat.device), right=True))
    expert_ids.masked_fill_(expert_ids >= num_experts, -1 if expert_map is not None else 0)
    padded.copy_((ends[-1:] * block_size).to(padded.dtype))


@_operator("_moe_C::moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()")
def _moe_sum(input: Tensor, output: Tensor, topk_ids: Tensor | None = None, expert_map: Tensor | None = None) -> None:
    """Add the results of each token's experts, without those that no expert has computed."""
    parts = input.float()
    if topk_ids is not None:
        computed = topk_ids >= 0
        if expert_map is not None:
            computed &= expert_map[topk_ids.clamp(min=0).long()] >= 0
        parts = torch.where(computed[..., None], parts, 0.0)
    output.copy_(parts.sum(1))


@_operator("_C::silu_and_mul(Tensor! result, Tensor input) -> ()")
def _silu_and_mul(result: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, -1)
    torch.mul(F.silu(gate), up, out=result)


@_operator(
    "_C::silu_and_mul_with_clamp(Tensor! result, Tensor input, float limit, float alpha=1.0, float beta=0.0) -> ()"
)
def _silu_and_mul_with_clamp(
    result: Tensor, input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> None:
    gate, up = input.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result.copy_(gate * torch.sigmoid(alpha * gate) * (up + beta))


@_operator("_C::gelu_and_mul(Tensor! out, Tensor input) -> ()")
def _gelu_and_mul(out: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, -1)
    torch.mul(F.gelu(gate), up, out=out)


@_operator("_C::gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()")
def _gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, -1)
    torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)


@_operator("_C::swigluoai_and_mul(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()")
def _swigluoai_and_mul(out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """The activation of gpt-oss. Gates and values take turns."""
    gate, up = input.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_(gate * torch.sigmoid(alpha * gate) * (up + 1))


@_operator("_C::gptq_shuffle(Tensor! q_weight, int bit) -> ()")
def _gptq_shuffle(q_weight: Tensor, bit: int) -> None:
    """Leave weights in the order of their file, which `gptq_gemm` here reads. vLLM's kernel wants them in another one."""


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The integers of `bits` bits that lie in an int32 tensor, the lowest bits first, along dimension 0 or 1."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    parts = (packed.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)) & ((1 << bits) - 1)
    return parts.flatten(dim, dim + 1)


@_operator(
    "_C::gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, bool use_exllama, "
    "bool use_v2_format, int bit) -> Tensor"
)
def _gptq_gemm(
    a: Tensor, q_weight: Tensor, qzeros: Tensor, scales: Tensor, use_exllama: bool, use_v2_format: bool, bit: int
) -> Tensor:
    """Multiply with weights of 2, 4 or 8 bits, which are made whole first. Zero points of format 1 are one too small."""
    groups = scales.shape[0]
    weights = _unpacked(q_weight, bit, 0)
    zeros = _unpacked(qzeros, bit, 1) + (0 if use_v2_format else 1)
    by_group = weights.view(groups, -1, weights.shape[1]) - zeros[:, None]
    return a @ (by_group.to(a.dtype) * scales[:, None].to(a.dtype)).flatten(0, 1)


#: The type of 8-bit floating-point numbers of quantised weights, its limits, and the smallest scale.
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_FP8_MIN_SCALE = 1.0 / (_FP8_MAX * 512.0)


def _to_fp8(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write `input / scale` to the first rows of `result`, which may have more rows."""
    values = (input.float() * scale.float().reciprocal()).clamp_(-_FP8_MAX, _FP8_MAX)
    result[: input.shape[0]].copy_(values.to(result.dtype))


@_operator("_C::static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()")
def _static_scaled_fp8_quant(
    result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None
) -> None:
    rows, columns = input.shape[-2], input.shape[-1]
    if scale.numel() > 1:
        if group_shape is None:
            down, across = rows // scale.shape[0], columns // scale.shape[1]
        else:
            down, across = (n if n > 0 else full for n, full in zip(group_shape, (rows, columns), strict=True))
        scale = scale.view(rows // down, columns // across).repeat_interleave(down, 0, output_size=rows)
        scale = scale.repeat_interleave(across, 1, output_size=columns)
    _to_fp8(result, input, scale)


@_operator("_C::dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")
def _dynamic_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    scale.copy_((input.abs().amax().float() / _FP8_MAX).clamp_(min=_FP8_MIN_SCALE))
    _to_fp8(result, input, scale)


@_operator(
    "_C::dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()"
)
def _dynamic_per_token_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None) -> None:
    largest = input.abs().amax(-1, keepdim=True).float()
    if scale_ub is not None:
        largest = torch.minimum(largest, scale_ub)
    found = (largest / _FP8_MAX).clamp_(min=_FP8_MIN_SCALE)
    scale[: input.shape[0]].copy_(found)
    _to_fp8(result, input, found)


@_operator("_C::static_scaled_int8_quant(Tensor! result, Tensor input, Tensor scale, Tensor? azp) -> ()")
def _static_scaled_int8_quant(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    values = (input.float() / scale).round_()
    result.copy_((values if azp is None else values + azp).clamp(-128, 127))


@_operator("_C::dynamic_scaled_int8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()")
def _dynamic_scaled_int8_quant(result: Tensor, input: Tensor, scale: Tensor, azp: Tensor | None) -> None:
    rows = input.float().view(-1, input.shape[-1])
    if azp is None:
        found = rows.abs().amax(-1, keepdim=True) / 127
        values = (rows * torch.where(found > 0, 1 / found, 0.0)).round_()
    else:
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        found = (high - low) / 255
        zero = (-128 - torch.where(found > 0, low / found, 0.0)).round_()
        azp.copy_(zero)
        values = torch.where(found > 0, rows / found, 0.0).round_() + zero
    scale.copy_(found)
    result.copy_(values.clamp_(-128, 127).view(input.shape))


@_operator(
    "_C_cache_ops::concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
    "Tensor scale, bool skip_scale=False) -> ()"
)
def _concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,  # since vLLM 0.33: the scale is 1
) -> None:
    """Write the latent state of each token to its slot. Padding has no slot, and goes to vLLM's empty block, which is 0."""
    count, block_size = slot_mapping.numel(), kv_cache.shape[1]
    slots = slot_mapping.clamp(min=0).long()
    entries = torch.cat((kv_c[:count], k_pe[:count]), -1)
    if kv_cache_dtype.startswith("fp8"):
        entries = entries.float() if skip_scale else entries.float() / scale
        entries = entries.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)
        kv_cache = kv_cache.view(_FP8)
    kv_cache.index_put_(
        (slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size)), entries.to(kv_cache.dtype)
    )


@_operator(
    "_C_cache_ops::gather_and_maybe_dequant_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, "
    "Tensor token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts) -> ()"
)
def _gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Tensor,
    seq_starts: Tensor | None,
) -> None:
    """Read the latent states of `num_tokens` tokens of a batch's requests, from place `seq_starts` of each on."""
    block_size = src_cache.shape[1]
    of = token_to_seq[:num_tokens].long()
    place = torch.arange(num_tokens, device=dst.device) - cu_seq_lens[of]
    if seq_starts is not None:
        place = place + seq_starts[of]
    blocks = block_table[of, place.div(block_size, rounding_mode="floor")].long()
    is_fp8 = kv_cache_dtype.startswith("fp8")
    entries = (src_cache.view(_FP8) if is_fp8 else src_cache)[blocks, place.remainder(block_size)]
    dst[:num_tokens].copy_(entries.float() * scale if is_fp8 else entries)
