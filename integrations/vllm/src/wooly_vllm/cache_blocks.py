"""Zeroing of new blocks of vLLM's cache, without a kernel that reads the addresses of tensors from memory.

Models with a state per request (Mamba and hybrids) need it: a block that held a state may hold keys and values next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.utils import KVBlockZeroer


def prepare(
    self: Any,
    device: torch.device,
    attn_groups_iter: Iterable[Any],
    kernel_block_sizes: list[int],
    static_forward_context: dict[str, Any],
    num_blocks: int,
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Replaces `KVBlockZeroer.__init__`: keep each layer's cache, and how many of its blocks one of the scheduler's has."""
    self.device = device
    self._caches = []
    for group in attn_groups_iter:
        if not isinstance(group.kv_cache_spec, AttentionSpec) or group.kv_cache_group_id >= len(kernel_block_sizes):
            continue
        for layer in group.layer_names:
            cache = static_forward_context[layer].kv_cache
            if layer in (runner_only_attn_layers or ()) or not isinstance(cache, torch.Tensor):
                continue
            if group.kernel_block_stride:
                cache = group.map_kv_cache_to_manager_blocks(cache, num_blocks)
            if cache.device.type == device.type:
                self._caches.append((cache, cache.shape[0] // num_blocks))


def zero_block_ids(self: Any, block_ids: list[int]) -> None:
    """Replaces `KVBlockZeroer.zero_block_ids`: one operator per layer."""
    if not block_ids or not self._caches:
        return
    by_ratio = {
        ratio: async_tensor_h2d(
            [block * ratio + k for block in block_ids for k in range(ratio)], device=self.device, dtype=torch.int64
        )
        for ratio in {ratio for _, ratio in self._caches}
    }
    for cache, ratio in self._caches:
        cache.index_fill_(0, by_ratio[ratio], 0)


def install() -> None:
    """Replace the methods. Calling it again changes nothing."""
    KVBlockZeroer.__init__, KVBlockZeroer.zero_block_ids = prepare, zero_block_ids
