"""How collectives are split into rounds: equally by all ranks, with each element in one round, in place where it was."""

from collections import defaultdict, deque

import torch
from hypothesis import given
from hypothesis import strategies as st
from wooly.distributed.carrier import Work
from wooly.distributed.rounds import rounds
from wooly_wis.collectives import What

SPLIT = [What.ALL_REDUCE, What.REDUCE, What.BROADCAST, What.ALL_GATHER, What.REDUCE_SCATTER]


def part_of(what, rank, root, sizes):
    """One rank's part, in place where a rank can work in place."""
    whole = torch.arange(sum(sizes), dtype=torch.int32)
    parts, mine = list(whole.split(sizes)), rank == root
    reads, writes = {
        What.ALL_REDUCE: ([whole], [whole]),
        What.REDUCE: ([whole], [whole] if mine else []),
        What.BROADCAST: ([whole], []) if mine else ([], [whole]),
        What.ALL_GATHER: ([parts[rank]], parts),
        What.REDUCE_SCATTER: (parts, [parts[rank]]),
    }[what]
    return Work(what, reads, writes, root=root)


def nbytes(tensors):
    """Bytes that tensors need in host memory, where each begins at a multiple of 64."""
    return sum([-(-4 * t.numel() // 64) * 64 for t in tensors])


@given(
    what=st.sampled_from(SPLIT),
    sizes=st.lists(st.integers(0, 5000), min_size=2, max_size=4),
    root=st.integers(0, 1),
    most=st.integers(4096, 40000),
)
def test_ranks_split_a_collective_equally_and_each_round_fits(what, sizes, root, most):
    counts = set()
    for rank in range(len(sizes)):
        work = part_of(what, rank, root, sizes)
        found = list(rounds(work, most, rank, len(sizes)))
        counts.add(len(found))
        for side in ("reads", "writes"):
            whole, pieces = getattr(work, side), [getattr(each, side) for each in found]
            assert all(torch.equal(torch.cat([p[k] for p in pieces]), whole[k]) for k in range(len(whole)))
        for each in found:
            assert nbytes(each.reads) * (what is not What.ALL_REDUCE) + nbytes(each.writes) <= most
            own = each.reads[rank if what is What.REDUCE_SCATTER else 0] if each.reads else None
            into = each.writes[rank if what is What.ALL_GATHER else 0] if each.writes else None
            assert own is None or into is None or own.data_ptr() == into.data_ptr()
            assert (each.what, each.root) == (what, root)
    assert len(counts) == 1


def parts_for(what, rank, root, table):
    """One rank's part in a collective in which rank k has `table[k][j]` elements for rank j, and where its results go."""
    size = len(table)
    gives = [torch.arange(n, dtype=torch.int32) + 10000 * (size * rank + k) for k, n in enumerate(table[rank])]
    gets = [torch.full((table[k][rank],), -1, dtype=torch.int32) for k in range(size)]
    if what is What.GATHER:
        return Work(what, [gives[root]], gets if rank == root else [], root=root)
    if what is What.SCATTER:
        return Work(what, gives if rank == root else [], [gets[root]], root=root)
    return Work(what, gives, gets)


def transfer(frames, rank, size, ways):
    """Put what a rank's frames read into the queues of its ways, as one tensor per way."""
    for each in frames:
        peers = list(each.peers) or others_of(each, rank, size)
        for t, peer in zip(each.reads, peers[: len(each.reads)], strict=True):
            ways[rank, peer].append(t)


def others_of(work, rank, size):
    """The other rank of each part of a collective, those of its reads first."""
    sides = []
    for tensors in (work.reads, work.writes):
        sides += list(range(size)) if len(tensors) == size else [work.root] * len(tensors)
    return sides


@given(
    what=st.sampled_from([What.ALL_TO_ALL, What.GATHER, What.SCATTER]),
    table=st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3000), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    root=st.integers(0, 1),
    most=st.integers(4096, 40000),
)
def test_parts_whose_sizes_only_two_ranks_know_are_whole_after_all_rounds(what, table, root, most):
    size, ways = len(table), defaultdict(deque)
    works = [parts_for(what, rank, root, table) for rank in range(size)]
    found = [list(rounds(work, most, rank, size)) for rank, work in enumerate(works)]
    assert all(frames[0].what is what and all(f.what is What.EXCHANGE for f in frames[1:]) for frames in found)
    for frames in found:
        assert all(nbytes(each.reads) + nbytes(each.writes) <= most for each in frames)
    for rank, frames in enumerate(found):
        transfer(frames, rank, size, ways)
    for rank, frames in enumerate(found):
        for each in frames:
            peers = list(each.peers) or others_of(each, rank, size)
            for t, peer in zip(each.writes, peers[len(each.reads) :], strict=True):
                t.copy_(ways[peer, rank].popleft())  # fails if the sizes differ
    assert not any(ways.values())
    for rank, work in enumerate(works):
        for t, peer in zip(work.writes, others_of(work, rank, size)[len(work.reads) :], strict=True):
            assert torch.equal(t, torch.arange(table[peer][rank], dtype=torch.int32) + 10000 * (size * peer + rank))


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9000)), min_size=1, max_size=9),
    most=st.integers(16384, 40000),
)
def test_sends_are_split_alike_at_both_ends_and_keep_their_order(sizes, most):
    sends = [(peer, torch.zeros(n, dtype=torch.uint8)) for out, peer, n in sizes if out]
    receives = [(peer, torch.zeros(n, dtype=torch.uint8)) for out, peer, n in sizes if not out]
    peers = [peer for peer, _ in (*sends, *receives)]
    whole = Work(What.EXCHANGE, [t for _, t in sends], [t for _, t in receives], peers=peers)
    frames = list(rounds(whole, most, 3, 4))
    for side, each_side in (("reads", sends), ("writes", receives)):
        for other in range(3):
            got, alone = [], []
            for frame in frames:
                own = frame.peers[: len(frame.reads)] if side == "reads" else frame.peers[len(frame.reads) :]
                got += [t.numel() for t, peer in zip(getattr(frame, side), own, strict=True) if peer == other]
            for peer, t in each_side:  # the other end may send or receive them one by one
                if peer == other:
                    single = rounds(Work(What.EXCHANGE, [t], peers=[3]), most, other, 4)
                    alone += [p.numel() for frame in single for p in frame.reads]
            assert got == alone


def test_barrier_is_not_split():
    work = Work(What.BARRIER)
    assert list(rounds(work, 64, 0, 2)) == [work]
