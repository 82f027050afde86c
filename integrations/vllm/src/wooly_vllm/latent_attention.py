"""Prefill of multi-head latent attention (DeepSeek's), by PyTorch's fused attention, request by request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend


class WoolyMLAPrefill(MLAPrefillBackend):  # type: ignore[misc] # vLLM has no stubs
    """vLLM's other backends call libraries for CUDA. Decoding needs none: its kernels are Triton's."""

    @staticmethod
    def get_name() -> str:
        return "WOOLY_MLA"

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Keep a step's metadata, with the lengths of its requests on the host, where they decide the shapes."""
        super().prepare_metadata(prefill_metadata)
        lengths = prefill_metadata.query_lens_cpu
        self._lengths = prefill_metadata.query_start_loc.diff().tolist() if lengths is None else lengths.tolist()

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Attend from the new tokens `[tokens, heads, dim]` to those before them in the same request.

        Returns:
            The result, and with `return_softmax_lse` the logarithms of the sums `[heads, tokens]`.
        """
        return self._attend(q, k, v, self._lengths, self._lengths, True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from the new tokens of a chunk's requests to cached ones. Returns the result and the logarithms of the sums."""
        if not hasattr(chunk, "wooly_lengths"):  # the layers of a step have the same chunks
            chunk.wooly_lengths = [t.diff().tolist() for t in (chunk.query_start_loc, chunk.cu_seq_lens)]
        q_lengths, k_lengths = chunk.wooly_lengths
        result: tuple[Tensor, Tensor] = self._attend(q, k, v, q_lengths, k_lengths, False, True, out)
        return result

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lengths: list[int],
        k_lengths: list[int],
        causal: bool,
        with_sums: bool,
        out: Tensor | None,
    ) -> Any:
        results, sums = [], []
        for mine, keys, values in zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True):
            query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (mine, keys, values))
            if with_sums:
                value = F.pad(value, (0, q.shape[-1] - v.shape[-1]))  # the operator's heads have one size
                result, total, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                    query, key, value, 0.0, causal, scale=self.scale
                )
                sums.append(total[0])
                result = result[..., : v.shape[-1]]
            else:
                result = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=self.scale)
            results.append(result[0].transpose(0, 1))
        found = torch.cat(results) if out is None else torch.cat(results, out=out)
        return (found, torch.cat(sums, 1)) if with_sums else found
