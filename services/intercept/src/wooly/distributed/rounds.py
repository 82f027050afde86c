"""Splits collectives that need more host memory than an executor gives one of them for its work with other executors.

All ranks must split a collective alike. So each looks only at what is the same for all of them: the kind of collective, and the
sizes. Each round is a collective of its own, with the bits of the whole one: every element is reduced in the order of the
ranks.

Ranks cannot tell the sizes of each other's parts in `all_to_all`, `gather`, `scatter`, and sends, so these are not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor
from wooly_wis.collectives import What

from wooly.distributed.carrier import Work

#: Share of the memory that is left free, because each range begins at a multiple of 64 bytes there, and rounds differ in size.
_FREE = 1 / 8


def rounds(work: Work, most: int) -> Iterator[Work]:
    """The rounds of one rank's part in a collective.

    Args:
        work: its part.
        most: bytes of host memory that each round may need, equal for all ranks.
    """
    need = _bytes_of(work)
    count = -(-need // max(int(most * (1 - _FREE)), 1))
    if count < 2:
        yield work
        return
    for k in range(count):
        yield replace(work, reads=_cut(work.reads, k, count), writes=_cut(work.writes, k, count))


def _bytes_of(work: Work) -> int:
    """Bytes that a collective needs for any of its ranks, at most: 0 if it cannot be split."""
    reads, writes = [[t.numel() * t.element_size() for t in side] for side in (work.reads, work.writes)]
    if work.what in (What.ALL_REDUCE, What.BROADCAST):
        return max([*reads, *writes])  # an all_reduce has its results where its operands were
    if work.what is What.REDUCE:
        return 2 * reads[0]
    if work.what is What.ALL_GATHER:
        return sum(writes) + max(writes)
    if work.what is What.REDUCE_SCATTER:
        return sum(reads) + max(reads)
    return 0


def _cut(tensors: Sequence[Tensor], k: int, count: int) -> list[Tensor]:
    """Round `k` of `count` of each tensor."""
    found = []
    for t in tensors:
        begin, end = [t.numel() * n // count for n in (k, k + 1)]
        found.append(t.narrow(0, begin, end - begin))
    return found
