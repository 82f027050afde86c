"""The rule of overcommit: what a device may promise, and the reasons of refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_dispatch.overcommit import Commitment, Promises, counted, headroom, limit, promises, refusal

GIB = 1 << 30
SIZES = st.integers(0, 100)


def test_promises_are_summed_by_kind():
    found = promises([Commitment("a", 3), Commitment("b", 5), Commitment("c", 7, swappable=False)])
    assert found == Promises(fixed=7, movable=8)


@given(
    fixed=SIZES,
    movable=st.lists(SIZES),
    capacity=st.integers(1, 100),
    percent=st.integers(0, 1000),
    swappable=st.booleans(),
)
def test_headroom_is_the_largest_promise_that_is_not_refused(fixed, movable, capacity, percent, swappable):
    promised = Promises(fixed, sum(movable))
    most = headroom(promised, capacity, percent, swappable)
    if most >= 0:
        assert not refusal(most, swappable, promised, capacity, percent)
    assert refusal(max(most + 1, 1), swappable, promised, capacity, percent)


def test_session_without_size_counts_with_claim_or_use_whichever_is_more():
    assert [counted(None, 5, 3), counted(None, 5, 7), counted(4, 5, 7)] == [5, 7, 4]
    assert not refusal(0, True, Promises(100, 100), 100, 0) and not refusal(0, False, Promises(100, 100), 100, 0)


def test_twenty_percent_means_up_to_120_percent():
    assert limit(100, 20) == 120 and limit(100, 0) == 100 and limit(100, 1000) == 1100
    assert not refusal(20, True, Promises(movable=100), 100, 20)
    assert "120" in refusal(21 * GIB, True, Promises(movable=100 * GIB), 100 * GIB, 20)


def test_session_that_stays_gets_no_overcommitted_memory():
    """100, overcommitted by 20 %: three sessions of 30 can be swapped out, so 10 are left for one that cannot."""
    promised = promises([Commitment(name, 30) for name in "abc"])
    assert not refusal(30, True, promised, 100, 20)
    assert "physical memory only" in refusal(30, False, promised, 100, 20)
    assert headroom(promised, 100, 20, False) == 10 and headroom(promised, 100, 20, True) == 30


@pytest.mark.parametrize("percent", [-1, 1001])
def test_percentage_out_of_range_raises_value_error(percent):
    with pytest.raises(ValueError, match="0 to 1000"):
        limit(100, percent)
