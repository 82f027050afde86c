"""Copies of requests' states (Mamba, linear attention) between blocks of vLLM's cache, for cached prefixes and speculation.

vLLM copies the states of all layers by one kernel, which reads the addresses of the states from memory. Wooly does not allow this
(see `block_tables`). Here the state of each layer is a launch of its own. A step in which no request begins a block launches
nothing, unless the server speculates: then the device alone knows how many tokens a request has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

#: Number of elements that a program copies at a time, and largest number of programs per request.
BLOCK, TILES = 1024, 8
#: Kinds of layers whose kernels take no number of accepted tokens.
_WITHOUT_DRAFTS = (MambaAttentionBackendEnum.MAMBA1, MambaAttentionBackendEnum.LINEAR)
#: Integers with as many bytes as an element: a copy keeps all bits.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Triton refuses annotations of types.
@triton.jit(do_not_specialize=["tokens", "inner"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def] # noqa: ANN202
    state, table, rows, sources, targets, shifts,  # noqa: ANN001
    columns, block_stride, token_stride, inner_stride, tokens, inner,  # noqa: ANN001
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program (r, t) copies part t of a request's state, from column `sources[r]` of row `rows[r]` of the table; -1: nothing.

    `WINDOW`: the state is a window of tokens, which loses its first `shifts[r]`. Other states: the blocks from the source on have
    the states after each token, and the one `shifts[r]` columns further is copied.
    """
    request = tl.program_id(0)
    source = tl.load(sources + request)
    if source >= 0:
        shift = tl.load(shifts + request)
        begin = shift if WINDOW else 0
        blocks = table + tl.load(rows + request) * columns
        old = tl.load(blocks + source + (0 if WINDOW else shift)).to(tl.int64) * block_stride
        new = tl.load(blocks + tl.load(targets + request)).to(tl.int64) * block_stride
        # From the first token to the last, so that a window can be moved within its block.
        for token in range(begin, tokens):
            for first in range(tl.program_id(1) * BLOCK, inner, BLOCK * TILES):
                at = first + tl.arange(0, BLOCK)
                value = tl.load(state + old + token * token_stride + at * inner_stride, mask=at < inner)
                tl.store(state + new + (token - begin) * token_stride + at * inner_stride, value, mask=at < inner)


@triton.jit(do_not_specialize=["block_size"])
def _choose(  # type: ignore[no-untyped-def] # noqa: ANN202
    rows, accepted, current, computed, accepted_out, sources, targets, shifts, block_size,  # noqa: ANN001
):  # fmt: skip
    """Program r finds the state to keep of request r: that after the last token of a block which the step has filled.

    The step has accepted some of the draft's tokens, so the state of the request is further than that, or in the same block.
    """
    request = tl.program_id(0)
    row = tl.load(rows + request)
    source, target, shift = -1, 0, 0
    if row >= 0:
        end = tl.load(computed + row).to(tl.int32)
        first = end - tl.load(accepted + row).to(tl.int32) + 1
        filled = end // block_size
        shift = filled * block_size - first
        target = filled - 1
        at = tl.load(current + row).to(tl.int32)
        if shift >= 0:
            if at == target:
                tl.store(accepted_out + row, 1)
            if (at != target) | (shift != 0):
                source = at
    tl.store(sources + request, source)
    tl.store(targets + request, target)
    tl.store(shifts + request, shift)


@dataclass(frozen=True)
class State:
    """One of a layer's states, as blocks of whole numbers; the table of the layer's group; sizes and strides in elements."""

    blocks: Tensor
    table: Tensor
    is_window: bool
    tokens: int
    inner: int
    token_stride: int
    inner_stride: int

    @classmethod
    def of(cls, state: Tensor, table: Tensor, is_window: bool) -> State:
        """Describe a state `[blocks, …]`. A window has a dimension of tokens: the last one, or the one before it."""
        blocks = state.view(_WHOLE[state.element_size()])
        if not is_window:
            return cls(blocks, table, False, 1, state[0].numel(), 0, 1)
        by_token = blocks.transpose(1, 2) if is_conv_state_dim_first() else blocks
        return cls(blocks, table, True, *by_token.shape[1:], *by_token.stride()[1:])

    def copy(self, rows: Tensor, sources: Tensor, targets: Tensor, shifts: Tensor) -> None:
        """Copy from block to block, for each request of `rows`. See `_copy`."""
        tiles = min(TILES, triton.cdiv(self.inner, BLOCK))
        _copy[(rows.shape[0], tiles)](
            self.blocks, self.table, rows, sources, targets, shifts, self.table.stride(0), self.blocks.stride(0),
            self.token_stride, self.inner_stride, self.tokens, self.inner,
            WINDOW=self.is_window, BLOCK=BLOCK, TILES=tiles,
        )  # fmt: skip


def populate(
    self: Any,
    kv_cache_config: Any,
    forward_context: dict[str, Any],
    functions: Any,
    tables: list[Tensor],
    batch: list[Tensor],
) -> None:
    """Replaces `MambaSpecDecodeGPUContext._populate_metadata`: keep the states of all layers, and the tables of blocks."""
    self.states, self.batch_tables = [], [_whole(table) for table in batch]
    for group_id, table in zip(self.mamba_group_ids, tables, strict=True):
        group = kv_cache_config.kv_cache_groups[group_id]
        for layer in group.layer_names:
            kind = mamba_utils._get_mamba_spec_for_layer(group, layer).mamba_type
            for state, function in zip(forward_context[layer].kv_cache, functions[kind], strict=False):
                self.states.append(State.of(state, _whole(table), function is get_conv_copy_spec))
    self.is_initialized = True


def _whole(table: Tensor) -> Tensor:
    """All rows of a table of which vLLM may hand over a part."""
    rows = table.untyped_storage().nbytes() // (table.element_size() * table.stride(0))
    return table.as_strided((rows, table.shape[1]), table.stride(), 0)


def align(self: Any, seq_lens: Tensor, num_reqs: int) -> Tensor:
    """Replaces `MambaSpecDecodeGPUContext.compute_aligned_state_indices`: blocks of states `[groups, requests, n]`."""
    found: Tensor = self.aligned_state_indices[:, :num_reqs]
    first = (seq_lens[:num_reqs] - 1).div(self.block_size, rounding_mode="floor").clamp(min=0)
    columns = first[:, None] + torch.arange(found.shape[2], device=found.device)
    for table, target in zip(self.batch_tables, found, strict=True):
        target.copy_(table[:num_reqs].gather(1, columns.clamp(max=table.shape[1] - 1).long()))
    return found


def move(
    self: Any,
    num_reqs: int,
    state_idx_gpu: Tensor,
    src_col_gpu: Tensor,
    token_bias_gpu: Tensor,
    idx_mapping: Tensor | None,
) -> None:
    """Replaces `MambaSpecDecodeGPUContext.run_fused_precopy`: requests that begin a block take their states there."""
    if num_reqs == 0 or not self.is_initialized or not getattr(self, "may_move", True):
        return
    rows = _rows(num_reqs, idx_mapping, src_col_gpu)
    at = rows.clamp(min=0)
    sources, targets = src_col_gpu[at], state_idx_gpu[at]
    sources = sources.masked_fill((rows < 0) | (sources == targets), -1)
    for state in self.states:
        state.copy(rows, sources, targets, token_bias_gpu[at])


def _rows(num_reqs: int, idx_mapping: Tensor | None, like: Tensor) -> Tensor:
    return torch.arange(num_reqs, device=like.device) if idx_mapping is None else idx_mapping[:num_reqs].long()


def keep(
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    mamba_state_idx_gpu: Tensor,
    num_scheduled_tokens_gpu: Tensor,
    num_computed_tokens_gpu: Tensor,
    num_draft_tokens_gpu: Tensor,
) -> None:
    """Replaces `MambaSpecDecodeGPUContext.run_fused_postprocess`, of model runner V1: keep the states at the ends of blocks."""
    if num_reqs == 0 or not self.is_initialized:
        return
    out = self.num_accepted_tokens_out
    out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    end = num_computed_tokens_gpu + num_scheduled_tokens_gpu - num_draft_tokens_gpu + num_accepted_tokens_gpu - 1
    _keep(self, _rows(num_reqs, None, out), num_accepted_tokens_gpu, mamba_state_idx_gpu, end, out)


def keep_aligned(
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    state_idx_gpu: Tensor,
    new_num_computed_tokens_gpu: Tensor,
    idx_mapping: Tensor,
) -> None:
    """Replaces `MambaSpecDecodeGPUContext.run_fused_postprocess_align`, of model runner V2: like `keep`."""
    if num_reqs == 0 or not self.is_initialized or not getattr(self, "speculates", True):
        return
    rows = _rows(num_reqs, idx_mapping, state_idx_gpu)
    _keep(self, rows, num_accepted_tokens_gpu, state_idx_gpu, new_num_computed_tokens_gpu, num_accepted_tokens_gpu)


def _keep(self: Any, rows: Tensor, accepted: Tensor, current: Tensor, computed: Tensor, out: Tensor) -> None:
    sources, targets, shifts = torch.empty(3, rows.shape[0], dtype=torch.int32, device=rows.device).unbind()
    _choose[rows.shape](rows, accepted, current, computed, out, sources, targets, shifts, self.block_size)
    for state in self.states:
        state.copy(rows, sources, targets, shifts)


def preprocess(
    self: Any, input_batch: Any, block_tables: Any, kv_cache_config: Any, num_computed_tokens: Tensor
) -> None:
    """Wraps `MambaHybridModelState.preprocess_state`: tell `move` whether a request may begin a block in this step."""
    if self._align_mode and self._mamba_ctx is not None:
        block_size, context = self._mamba_ctx.block_size, self._mamba_ctx
        context.speculates = self.vllm_config.num_speculative_tokens > 0
        before = input_batch.num_computed_tokens_np[: input_batch.num_reqs]
        after = before + input_batch.num_scheduled_tokens[: input_batch.num_reqs]
        moves = (before > 0) & ((before - 1) // block_size != (after - 1) // block_size)
        context.may_move = context.speculates or bool(moves.any())
    _preprocess(self, input_batch, block_tables, kv_cache_config, num_computed_tokens)


def collect(
    copy_bufs: Any,
    kv_cache_config: Any,
    functions: Any,
    group_ids: list[int],
    source: int,
    target: int,
    shift: int,
    request: Any,
    context: Any,
) -> None:
    """Replaces `collect_mamba_copy_meta`, of model runner V1 without speculation, where `shift` is 0: copy a request's states."""
    if source == target:
        return
    for group_id in group_ids:
        blocks, group = request.block_ids[group_id], kv_cache_config.kv_cache_groups[group_id]
        for layer in group.layer_names:
            kind = mamba_utils._get_mamba_spec_for_layer(group, layer).mamba_type
            for state, _ in zip(context[layer].kv_cache, functions[kind], strict=False):
                state[blocks[target]].copy_(state[blocks[source]])


def done(copy_bufs: Any) -> None:
    """Replaces `do_mamba_copy_block`: `collect` has copied."""


def describe(self: Any, vllm_config: Any) -> Any:
    """Wraps `MambaBase.get_kv_cache_spec`, which vLLM asks of each layer at the start.

    Raises:
        ValueError: the server speculates, but vLLM keeps no state for each token of a draft for layers of this kind. It would
            go on with the state after rejected tokens.
    """
    if vllm_config.num_speculative_tokens > 0 and self.mamba_type in _WITHOUT_DRAFTS:
        raise ValueError(
            f"vLLM on Wooly does not support: speculative decoding of layers of the kind {self.mamba_type.name}: vLLM keeps no "
            "state for each token of a draft; leave --speculative-config out"
        )
    return _describe(self, vllm_config)


_describe = MambaBase.get_kv_cache_spec
_preprocess = MambaHybridModelState.preprocess_state


def install() -> None:
    """Replace the functions. Calling it again changes nothing."""
    context = mamba_utils.MambaSpecDecodeGPUContext
    context._populate_metadata, context.compute_aligned_state_indices = populate, align
    context.run_fused_precopy, context.run_fused_postprocess = move, keep
    context.run_fused_postprocess_align = keep_aligned
    MambaHybridModelState.preprocess_state, MambaBase.get_kv_cache_spec = preprocess, describe
    mamba_utils.collect_mamba_copy_meta, mamba_utils.do_mamba_copy_block = collect, done
