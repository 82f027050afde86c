"""Splits collectives that need more host memory than an executor gives one of them for its work with other executors.

All ranks must split a collective alike. So each looks only at what is the same for all of them: the kind of collective, and the
sizes. Each round is a collective of its own, with the bits of the whole one: every element is reduced in the order of the
ranks.

In `all_to_all`, `gather` and `scatter`, a rank cannot tell the sizes of the parts that other ranks exchange. There, the
collective carries the beginnings of all parts, and pairs of ranks send each other the rest of their parts, whose size both know:
in exchanges, which only they take part in. A large send is several sends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor
from wooly_wis.collectives import MAX_RANGES, What

from wooly.distributed.carrier import Work

#: Share of the memory that is left free, because each range begins at a multiple of 64 bytes there, and rounds differ in size.
_FREE = 1 / 8
#: A send is split if it needs more than this share of the memory: a rank sends to and receives from two others at a time.
_OF_SEND = 1 / 4


def rounds(work: Work, most: int, rank: int, size: int) -> Iterator[Work]:
    """The rounds of one rank's part in a collective. It copies what a rank gives to itself, between the rounds.

    Args:
        work: its part.
        most: bytes of host memory that each round may need, equal for all ranks.
        rank: this rank.
        size: number of ranks.
    """
    usable = most * (1 - _FREE)
    if work.what is What.EXCHANGE:
        yield from _sends(work, max(int(usable * _OF_SEND), 1), usable)
        return
    if work.what in (What.ALL_TO_ALL, What.GATHER, What.SCATTER):
        yield from _parts(work, usable / (2 * size), rank, size)
        return
    need = _bytes_of(work)
    count = -(-need // max(int(usable), 1))
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


def _piece(t: Tensor, k: int, n: int) -> Tensor:
    """Piece `k` of a tensor in pieces of `n` elements."""
    begin = min(k * n, t.numel())
    return t.narrow(0, begin, min(n, t.numel() - begin))


def _parts(work: Work, nbytes: float, rank: int, size: int) -> Iterator[Work]:
    """Rounds of a collective in which each pair of ranks has a part of its own. A round has at most `nbytes` of each part."""
    tensors = [*work.reads, *work.writes]
    n = max(int(nbytes) // tensors[0].element_size(), 1)
    longest = max([t.numel() for t in tensors])
    if longest <= n:
        yield work
        return
    yield replace(work, reads=[_piece(t, 0, n) for t in work.reads], writes=[_piece(t, 0, n) for t in work.writes])
    to, come_from = [_ranks_of(work, tensors, rank, size) for tensors in (work.reads, work.writes)]
    own = [t for t, peer in zip(work.reads, to, strict=True) if peer == rank]
    into = [t for t, peer in zip(work.writes, come_from, strict=True) if peer == rank]
    for t, target in zip(own, into, strict=True):
        if t.numel() > n and t.data_ptr() != target.data_ptr():
            target.narrow(0, n, t.numel() - n).copy_(t.narrow(0, n, t.numel() - n))
    for k in range(1, -(-longest // n)):
        sides = [
            [
                (_piece(t, k, n), peer)
                for t, peer in zip(tensors, peers, strict=True)
                if peer != rank and t.numel() > k * n
            ]
            for tensors, peers in ((work.reads, to), (work.writes, come_from))
        ]
        if any(sides):
            reads, writes = [[t for t, _ in side] for side in sides]
            peers = [peer for side in sides for _, peer in side]
            yield Work(What.EXCHANGE, reads, writes, peers=peers, timeout_s=work.timeout_s)


def _ranks_of(work: Work, tensors: Sequence[Tensor], rank: int, size: int) -> Sequence[int]:
    """The other rank of each part that a rank reads or writes."""
    if len(tensors) == size:  # of the root, or of each rank of an all_to_all
        return range(size)
    return [work.root if work.what is not What.ALL_TO_ALL else rank] * len(tensors)


def _sends(work: Work, n: int, usable: float) -> Iterator[Work]:
    """Rounds of sends and receives of bytes. Both ends of each split it into pieces of `n` bytes, and keep their order."""
    pieces: list[tuple[bool, int, Tensor]] = []
    for k, (t, peer) in enumerate(zip([*work.reads, *work.writes], work.peers, strict=True)):
        pieces += [(k < len(work.reads), peer, _piece(t, j, n)) for j in range(max(-(-t.numel() // n), 1))]
    if sum([t.numel() for _, _, t in pieces]) <= usable and len(pieces) <= MAX_RANGES:
        yield _exchange(work, pieces)
        return
    waiting: defaultdict[tuple[bool, int], deque[Tensor]] = defaultdict(deque)
    for sends, peer, t in pieces:
        waiting[sends, peer].append(t)
    while any(waiting.values()):  # of each way, as much as one piece
        taken: list[tuple[bool, int, Tensor]] = []
        for (sends, peer), queue in waiting.items():
            left = n
            while queue and queue[0].numel() <= left:
                left -= queue[0].numel()
                taken.append((sends, peer, queue.popleft()))
        yield _exchange(work, taken)


def _exchange(work: Work, pieces: Sequence[tuple[bool, int, Tensor]]) -> Work:
    ordered = [each for each in pieces if each[0]] + [each for each in pieces if not each[0]]
    reads, writes = [[t for sends, _, t in ordered if sends is side] for side in (True, False)]
    return replace(work, reads=reads, writes=writes, peers=[peer for _, peer, _ in ordered])
