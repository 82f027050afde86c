"""LoRA adapters on the device, with PyTorch's operators: each adapter that a step uses is two matrix products per layer.

vLLM's kernels for adapters read the addresses of the weights from memory, which Wooly does not allow (see `block_tables`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


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
