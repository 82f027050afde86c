"""LoRA adapters on the device: in each layer, two matrix products of PyTorch's per adapter that a step uses.

vLLM's kernels for adapters read the addresses of the weights from memory, which Wooly does not allow (see `block_tables`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from wooly_vllm import expert_adapters


class WoolyPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc] # vLLM has no stubs
    """Adds the adapters' part to a layer's result.

    The rows of tokens without an adapter, and those of other adapters, are multiplied by 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: For each adapter of this step: its index in the stacked weights, and a column with 1 for its tokens, 0 for others.
        self._used: list[tuple[int, torch.Tensor]] = []

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take the adapter of each token, for the next step. Waits for nothing."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        ids = {number for number in mapping.index_mapping if number > 0}
        indices = [k for k, number in enumerate(lora_index_to_id) if number in ids]
        self._used = [(k, (self.token_lora_indices == k).unsqueeze(-1)) for k in indices]
        self.is_prefill, self.no_lora = mapping.is_prefill, not indices

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        for k, mine in self._used:
            y += (x.to(y.dtype) @ w_t_all[k, 0].to(y.dtype).t()) * (mine * scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = y[:, y_offset : y_offset + y_slice_size]
        if not add_inputs:
            part.zero_()
        for k, mine in self._used:
            part += (x @ w_t_all[k, 0].to(x.dtype).t()) * mine

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        self._apply_expand(y, x, lora_b_stacked, 0, y.shape[-1], add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Add the adapters' part to logits: those of each request's last token, or those of tokens of the batch's prompts."""
        if x.shape[0] == self.indices_len[1] and x.untyped_storage().nbytes() == x.nbytes:
            adapters = self.sampler_indices
        else:  # rows of the batch's hidden states
            first = x.storage_offset() // x.stride(0)
            adapters = self.token_lora_indices[first : first + x.shape[0]]
        for k, _ in self._used:
            inner = (x @ lora_a_stacked[k, 0].to(x.dtype).t()) * scale
            part = inner @ lora_b_stacked[k, 0].to(x.dtype).t()
            y[:, : part.shape[1]] += part * (adapters == k).unsqueeze(-1)

    def add_lora_w13(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        num_tokens: int,
        top_k_num: int,
        max_loras: int,
        adapter_enabled: torch.Tensor,
        *sizes: Any,
        **kwargs: Any,
    ) -> tuple[Any, None, None, None]:
        """Add the adapters' part to the first products of experts. Returns what vLLM passes on to `add_lora_w2`."""
        if not self._used:
            return None, None, None, None
        by = expert_adapters.routes(
            self.token_lora_indices, topk_ids, expert_map, adapter_enabled, lora_a_stacked[0].shape
        )
        expert_adapters.add(y.view(num_tokens, top_k_num, -1), x, lora_a_stacked, lora_b_stacked, by, top_k_num)
        return by, None, None, None

    def add_lora_w2(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor,
        sorted_token_ids_lora: Any,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        """Add the adapters' part to the second products of experts, with each expert's weight."""
        if self._used:
            expert_adapters.add(y, x, lora_a_stacked, lora_b_stacked, sorted_token_ids_lora, 1, topk_weights)
