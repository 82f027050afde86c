"""How collectives are split into rounds: equally by all ranks, with each element in one round, in place where it was."""

import pytest
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
        found = list(rounds(work, most))
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


@pytest.mark.parametrize("what", sorted(set(What) - set(SPLIT)))
def test_collective_whose_ranks_do_not_know_all_sizes_is_not_split(what):
    work = Work(what, [torch.zeros(1000)], [torch.zeros(1000)])
    assert list(rounds(work, 64)) == [work]
