"""The block tables of vLLM's model runner V2, without kernels that read the addresses of tensors from memory.

Wooly checks each access of a kernel against the tensors of its launch, so a kernel cannot use an address that it reads from
memory. vLLM has one table per kind of cache (most models have one), and its kernels read a list of their addresses. Here each
table is a launch of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables


# Triton refuses annotations of types.
@triton.jit(do_not_specialize=["num_slots", "last"])  # type: ignore[untyped-decorator]
def _find_slots(  # type: ignore[no-untyped-def] # noqa: ANN202
    rows, starts, positions, table, columns, block_size,  # noqa: ANN001
    slots, num_slots, last, PADDING: tl.constexpr, BLOCK: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """Program r writes the slots of the tokens of request r. The last program fills the slots after all tokens."""
    request = tl.program_id(0)
    begin = tl.load(starts + request)
    if request == last:
        for first in range(begin, num_slots, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(slots + at, PADDING, mask=at < num_slots)
    else:
        end = tl.load(starts + request + 1)
        row = tl.load(rows + request)  # -1: a request that vLLM made up to warm up; it has no blocks
        for first in range(begin, end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            position = tl.load(positions + at, mask=at < end, other=0)
            block = tl.load(table + row * columns + position // block_size, mask=(at < end) & (row >= 0), other=0)
            slot = block.to(tl.int64) * block_size + position % block_size
            tl.store(slots + at, tl.where(row >= 0, slot, PADDING), mask=at < end)


def gather_block_tables(
    self: Any,
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: Any = None,
    out_ptrs: Any = None,
    num_computed_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Replaces `BlockTables.gather_block_tables`: the rows of the requests of this step, and rows of zeros after them.

    Since vLLM 0.33, blocks that a sliding window has left are zeros, too (with `num_computed_tokens`), and so are the rows of a
    larger step before.
    """
    num_reqs, rows = idx_mapping.shape[0], idx_mapping.clamp(min=0)
    targets, num_rows = tuple(self.input_block_tables if out is None else out), num_reqs_padded
    if out is None:
        num_rows = max(num_rows, getattr(self, "_num_dirty_rows", 0))
        self._num_dirty_rows = num_reqs
    reaches = getattr(self, "_sliding_window_reach", [0] * len(targets))
    for table, target, reach, block_size in zip(self.block_tables, targets, reaches, self.block_sizes, strict=True):
        torch.index_select(table.gpu, 0, rows, out=target[:num_reqs])
        target[num_reqs:num_rows].zero_()
        if num_computed_tokens is not None and reach > 0:
            left = (num_computed_tokens[rows] - reach).clamp(min=0) // block_size
            columns = torch.arange(target.shape[1], device=target.device)
            target[:num_reqs].masked_fill_(columns < left[:, None], 0)
    return tuple([target[:num_reqs_padded] for target in targets])


def compute_slot_mappings(
    self: Any,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replaces `BlockTables.compute_slot_mappings`: where in the cache the keys and values of each token are."""
    slots = self.slot_mappings if out is None else out
    num_reqs, num_slots = idx_mapping.shape[0], slots.shape[1]
    for table, block_size, enabled, row in zip(
        self.block_tables, self.block_sizes, self._slot_mapping_enabled, slots, strict=True
    ):
        if not enabled:
            row.fill_(PAD_SLOT_ID)
            continue
        _find_slots[(num_reqs + 1,)](
            idx_mapping, query_start_loc, positions, table.gpu, table.gpu.stride(0), block_size, row, num_slots, num_reqs,
            PADDING=PAD_SLOT_ID, BLOCK=128,
        )  # fmt: skip
    return slots[:, :num_tokens_padded]


def apply_staged_writes(self: Any) -> None:
    """Replaces `BlockTables.apply_staged_writes`. The kernels here need no numbers of blocks, so these are not sent."""
    for table in self.block_tables:
        table.apply_write()


def install() -> None:
    """Replace the methods. Calling it again changes nothing."""
    for method in (gather_block_tables, compute_slot_mappings, apply_staged_writes):
        setattr(BlockTables, method.__name__, method)
