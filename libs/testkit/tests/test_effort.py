"""The sample of a sweep that the quick suite runs."""

import pytest
from wooly_testkit.effort import sampled, sweep

NAMES = [f"case {n}" for n in range(1000)]


def last_digit(name):
    return (int(name[-1]),)


def test_sample_has_its_size_and_at_least_one_case_of_each_kind():
    assert 70 < len(sampled(NAMES, 10)) < 130
    rare = sampled(NAMES, 10**9, last_digit)
    assert len(rare) == 10 and {last_digit(name) for name in rare} == {(n,) for n in range(10)}


def test_sample_depends_on_names_alone():
    chosen = sampled(NAMES, 10)
    assert sampled(reversed(NAMES), 10) == chosen == sampled([*NAMES, *NAMES], 10)
    assert sampled([*NAMES, "one more"], 10) - {"one more"} == chosen


def test_sweep_has_all_cases_in_their_order_and_those_beside_the_sample_are_slow():
    params = sweep(NAMES, 10)
    assert [p.values for p in params] == [(name,) for name in NAMES]
    quick = {p.values[0] for p in params if not p.marks}
    assert quick == sampled(NAMES, 10)
    assert all(p.marks == (pytest.mark.slow,) for p in params if p.values[0] not in quick)
