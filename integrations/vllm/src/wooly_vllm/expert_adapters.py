"""LoRA adapters of experts, with vLLM's kernel in Triton for mixtures of experts: each adapter's experts are more experts.

vLLM's own kernels for this read the addresses of the weights from memory, which Wooly does not allow (see `block_tables`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts, TritonWNA16Experts
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.triton_utils import tl

#: Number of rows of a block: few rows per expert waste less of a small one.
FEW, MANY = 16, 64
#: Sizes of the kernel's blocks for the product with an adapter's first matrix, and with its second one.
_SHRINK = {"BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
_EXPAND = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Routes:
    """The experts of each token's adapter, sorted for the kernel."""

    order: Tensor
    expert_of_block: Tensor
    count: Tensor
    block: int


def routes(adapters: Tensor, topk_ids: Tensor, expert_map: Tensor | None, enabled: Tensor, shape: torch.Size) -> Routes:
    """Sort the places of a batch by adapter and expert.

    Args:
        adapters: the adapter of each token `[tokens]`; -1: none.
        topk_ids: experts of each token `[tokens, k]`.
        expert_map: the place of each expert on this device; -1: another device has it. None: this device has all.
        enabled: for each adapter, whether it has weights of experts.
        shape: shape of an adapter's stacked matrices `[adapters, experts, rows, columns]`.
    """
    loras, experts = shape[:2]
    local = topk_ids if expert_map is None else expert_map[topk_ids.clamp(min=0).long()].where(topk_ids >= 0, -1)
    mine = adapters[: topk_ids.shape[0], None]
    used = (mine >= 0) & (enabled[mine.clamp(min=0)] != 0) & (local >= 0)
    ids = torch.where(used, mine * experts + local, -1).to(torch.int32)
    block = FEW if ids.numel() <= FEW * experts else MANY
    order, expert_of_block, count = moe_align_block_size(ids, block, loras * experts)
    return Routes(order, expert_of_block, count, block)


def add(
    y: Tensor,
    x: Tensor,
    first: tuple[Tensor, ...],
    second: tuple[Tensor, ...],
    by: Routes,
    k: int,
    weights: Tensor | None = None,
) -> None:
    """Add the adapters' part to the results of experts.

    Args:
        y: results of experts `[tokens, k, columns]`, changed in place. Each pair of matrices adds to a part of the columns.
        x: input `[rows, size]`: a row per token, or per token and expert.
        first: first matrices `[adapters, experts, rank, size]`.
        second: second matrices `[adapters, experts, columns, rank]`.
        by: the routes of the batch.
        k: number of experts that use a row of `x`.
        weights: factor of each token's experts `[tokens, k]`.
    """
    places, begin = y.shape[0] * y.shape[1], 0
    for a, b in zip(first, second, strict=True):
        inner = torch.empty(places, 1, a.shape[2], dtype=x.dtype, device=x.device)
        _multiply(x, a, inner, by, k, None, _SHRINK)
        part = torch.zeros(places, 1, b.shape[2], dtype=y.dtype, device=y.device)
        _multiply(inner[:, 0], b, part, by, 1, weights, _EXPAND)
        y[..., begin : begin + b.shape[2]] += part.view(*y.shape[:2], -1)
        begin += b.shape[2]


def _multiply(
    x: Tensor, matrices: Tensor, out: Tensor, by: Routes, k: int, weights: Tensor | None, sizes: dict[str, int]
) -> None:
    invoke_fused_moe_triton_kernel(
        x, matrices.flatten(0, 1).to(x.dtype), out, None, None, weights, by.order, by.expert_of_block, by.count,
        weights is not None, k, {"BLOCK_SIZE_M": by.block, **sizes}, compute_type=_TYPES[out.dtype],
        use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
    )  # fmt: skip


def apply_packed(self: Any, **call: Any) -> None:
    """Replaces `TritonWNA16Experts.apply`, which forgets adapters: keep what the two steps below need of the call."""
    self._call = call
    _apply_packed(self, **call)
    self._call = None


def activate_packed(self: Any, activation: Any, output: Tensor, input: Tensor, **more: Any) -> None:
    """The activation of `TritonWNA16Experts`: first add the adapters' part to the first product."""
    context, call = self._lora_context, self._call
    if context is not None:
        tokens, k = call["topk_ids"].shape
        names = ("topk_ids", "topk_weights", "expert_map", "w1", "w2")
        found = self.apply_w13_lora(
            context, y=input.view(tokens, k, -1), x=call["hidden_states"], num_tokens=tokens, top_k_num=k,
            **{name: call[name] for name in names},
        )  # fmt: skip
        call |= {"lora_routes": found, "lora_inner": output}
    TritonExperts.activation(self, activation, output, input, **more)


def sum_packed(self: Any, input: Tensor, output: Tensor, *more: Any) -> None:
    """The sum of `TritonWNA16Experts`: first add the adapters' part to the second product."""
    context, call = self._lora_context, self._call
    if context is not None:
        tokens, k = call["topk_ids"].shape
        order, of_block, count, mapping = call["lora_routes"]
        self.apply_w2_lora(
            context, y=input, x=call["lora_inner"], topk_weights=call["topk_weights"], sorted_token_ids_lora=order,
            expert_ids_lora=of_block, num_tokens_post_padded_lora=count, token_lora_mapping=mapping, num_tokens=tokens,
            w1=call["w1"], w2=call["w2"], top_k_num=k,
        )  # fmt: skip
    TritonExperts.moe_sum(self, input, output, *more)


_apply_packed = TritonWNA16Experts.apply


def install() -> None:
    """Replace the methods. Calling it again changes nothing."""
    TritonWNA16Experts.apply, TritonWNA16Experts.activation = apply_packed, activate_packed
    TritonWNA16Experts.moe_sum = sum_packed
