"""How collectives are divided among executors: the shares together do what the whole does, and each byte is in one share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wooly_executor.collectives.groups import Arrival, Group, difference, own_difference
from wooly_executor.collectives.shares import Division, divide
from wooly_executor.collectives.work import parts_of, steps
from wooly_wis.collectives import (
    MAX_SHARES,
    REDUCING,
    Collective,
    Range,
    Reduction,
    What,
    pack_collective,
    unpack_collective,
)
from wooly_wis.dtypes import DType

GROUP = b"sixteen bytes id"
ITEM = 4
ALL = [What.ALL_REDUCE, What.REDUCE, What.BROADCAST, What.ALL_GATHER, What.REDUCE_SCATTER, What.ALL_TO_ALL, What.GATHER]
ALL += [What.SCATTER]


@st.composite
def groups(draw):
    """The frames of all ranks of one collective, and how their group is divided."""
    size = draw(st.integers(2, 6))
    count = draw(st.integers(2, min(size, 4)))
    carriers = [*range(count), *draw(st.lists(st.integers(0, count - 1), min_size=size - count, max_size=size - count))]
    carriers = draw(st.permutations(carriers))
    what, root = draw(st.sampled_from(ALL)), draw(st.integers(0, size - 1))
    n = draw(st.integers(0, 70))
    matrix = draw(st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size))
    found = []
    for rank in range(size):
        mine = rank == root
        reads, writes = {
            What.ALL_REDUCE: ([n], [n]),
            What.REDUCE: ([n], [n] if mine else []),
            What.BROADCAST: ([n], []) if mine else ([], [n]),
            What.ALL_GATHER: ([matrix[0][rank]], matrix[0]),
            What.REDUCE_SCATTER: (matrix[0], [matrix[0][rank]]),
            What.ALL_TO_ALL: (matrix[rank], [row[rank] for row in matrix]),
            What.GATHER: ([matrix[0][rank]], matrix[0] if mine else []),
            What.SCATTER: (matrix[0] if mine else [], [matrix[0][rank]]),
        }[what]
        reduction = Reduction.SUM if what in REDUCING else Reduction.NONE
        common = {"dtype": DType.F32, "reduction": reduction, "root": root if what not in (What.ALL_REDUCE,) else 0}
        ranges = [_laid(buffer, sizes) for buffer, sizes in ((1, reads), (2, writes))]
        found.append(Collective(GROUP, 7, rank, size, 1000, what, reads=ranges[0], writes=ranges[1], **common))
    return found, Division(tuple(carriers), draw(st.sampled_from([1, 16, 200])))


def _laid(buffer, sizes):
    found, at = [], 0
    for n in sizes:
        found.append(Range(buffer, at, n))
        at += n * ITEM
    return tuple(found)


def memory(calls):
    """Random inputs and zeroed outputs of each rank."""
    generator = torch.Generator().manual_seed(1)
    sizes = [[sum(r.elements for r in ranges) for ranges in (c.reads, c.writes)] for c in calls]
    return [(torch.randn(reads, generator=generator), torch.zeros(writes)) for reads, writes in sizes]


def work(calls, bytes_of):
    """Do a collective."""

    def tensors(rank, ranges):
        return [bytes_of[rank][r.buffer - 1][r.offset // ITEM : r.offset // ITEM + r.elements] for r in ranges]

    parts = parts_of(calls, [(tensors(c.rank, c.reads), tensors(c.rank, c.writes)) for c in calls])
    for _ in steps(parts, calls[0], 64):
        pass


@given(groups())
def test_shares_together_do_what_the_whole_does(made):
    calls, division = made
    expected, found = memory(calls), memory(calls)
    work(calls, expected)
    shares = [divide(call, division) for call in calls]
    assert all(s.keys() == shares[0].keys() for s in shares), "the ranks divide differently"
    assert 0 in shares[0], "the frames are not compared"
    for k in shares[0]:
        work([s[k] for s in shares], found)
    for (_, whole), (_, divided) in zip(expected, found, strict=True):
        assert whole.equal(divided)


@given(groups())
def test_each_share_is_a_collective_that_fits_and_each_element_is_in_one(made):
    calls, division = made
    shares = [divide(call, division) for call in calls]
    for k in shares[0]:
        frames = [unpack_collective(pack_collective(s[k])) for s in shares]
        assert frames == [s[k] for s in shares]
        assert len({f.group for f in frames}) == 1
        arrivals = [Arrival(str(f.rank), f, Group("t", f.group, f.size), 0.0, 1.0) for f in frames]
        assert not any(own_difference(f) for f in frames)
        assert not any(difference(a, b) for a in arrivals for b in arrivals if fits(a.call, b.call))
    for call, mine in zip(calls, shares, strict=True):
        for name in ("reads", "writes"):
            for n, whole in enumerate(getattr(call, name)):
                cut = [getattr(s, name)[n] for s in mine.values()]
                spans = sorted([(r.offset, r.elements) for r in cut if r.elements])
                assert sum([n for _, n in spans]) == whole.elements
                at = whole.offset
                for offset, elements in spans:
                    assert offset == at
                    at += elements * ITEM


def fits(a, b):
    """Whether the executor compares two ranks."""
    return a.rank != b.rank and (a.what not in (What.GATHER, What.SCATTER) or a.root in (a.rank, b.rank))


@given(st.integers(2, 16), st.integers(0, 5000))
def test_slices_of_all_executors_are_about_equal(count, n):
    call = Collective(
        *(GROUP, 7, 0, count, 1000, What.ALL_REDUCE, DType.F32, (Range(1, 8, n),), (Range(1, 8, n),), Reduction.SUM)
    )
    sizes = [s.reads[0].elements for s in divide(call, Division(tuple(range(count)), 1)).values()]
    assert max(sizes) - min(sizes) <= 32


def test_small_collective_is_carried_by_the_first_executor():
    reads = (Range(1, 0, 100),)
    call = Collective(GROUP, 7, 1, 2, 1000, What.ALL_REDUCE, DType.F32, reads, reads, Reduction.SUM)
    assert divide(call, Division((0, 1), 201)).keys() == {0}
    assert divide(call, Division((0, 1), 200)).keys() == {0, 1}


def test_transfers_are_carried_by_their_receivers_executors():
    reads, writes = (Range(1, 0, 5, 1), Range(1, 0, 5, 2)), (Range(2, 0, 5, 2),)
    found = divide(Collective(GROUP, 0, 0, 3, 1000, What.EXCHANGE, DType.U8, reads, writes), Division((0, 1, 0), 1))
    assert {k: (s.reads, s.writes) for k, s in found.items()} == {0: (reads[1:], writes), 1: (reads[:1], ())}


def test_first_barrier_and_the_end_reach_all_executors():
    division = Division((0, 1, 2), 1)
    for what, number in ((What.BARRIER, 1), (What.LEAVE, 0)):
        assert divide(Collective(GROUP, number, 0, 3, 1000, what), division).keys() == {0, 1, 2}
    assert divide(Collective(GROUP, 2, 0, 3, 1000, What.BARRIER), division).keys() == {0}


@pytest.mark.parametrize(
    "carriers", [(0,), (0, 0), (1, 2), (0, 2), tuple(range(MAX_SHARES + 1))], ids=lambda c: str(len(c)) + str(c[:2])
)
def test_division_that_is_none_has_a_problem(carriers):
    assert Division(carriers, 1).problem()
    assert not Division((0, 1, 0), 1).problem()
