"""No operation costs more bytecode instructions than was accepted (`accepted/`). Counts do not depend on the machine."""

from __future__ import annotations

import functools
import json

import pytest

from tests.costs.record import ACCEPTED, OPERATIONS, measured, total

#: Change of a count, in percent, that needs to be accepted. Releases of one minor version of Python may differ by less.
TOLERANCE = 1.0
CURE = "if this is meant, accept it: make costs COSTS=--accept"
measured_once = functools.cache(measured)


def grown(before: dict[str, int], now: dict[str, int]) -> str:
    """The functions whose instructions changed most, one per line."""
    changes = {name: now.get(name, 0) - before.get(name, 0) for name in {*before, *now}}
    largest = sorted(changes.items(), key=lambda change: (-abs(change[1]), change[0]))[:12]
    return "\n".join([f"  {change:+6} to {now.get(name, 0):6}  {name}" for name, change in largest if change])


def compare(name: str, before: dict[str, int], now: dict[str, int]) -> None:
    """Compare a count with the accepted one.

    Raises:
        AssertionError: it differs by more than the tolerance. The message names the functions.
    """
    was, is_ = total(before), total(now)
    assert abs(is_ - was) <= was * TOLERANCE / 100, (
        f"{name}: {is_:,} bytecode instructions, accepted are {was:,}; {CURE}\n{grown(before, now)}"
    )


@pytest.mark.parametrize(("native", "name"), [(way, name) for way, names in OPERATIONS.items() for name in names])
def test_operation_costs_what_was_accepted(native: str, name: str) -> None:
    if not ACCEPTED.exists():
        pytest.skip(f"no costs are accepted for this release of Python; {CURE}")
    found, _ = measured_once(native)
    if not found:
        pytest.skip("wooly-native is not there, so native calls cannot be counted: make native")
    compare(name, json.loads(ACCEPTED.read_text())[name], found[name])


def test_each_program_of_a_llama_is_one_replay_on_a_gpu_with_graphs() -> None:
    """Attention, products and index checks are in the graph, and each of the layers has one."""
    _, replays = measured_once("off")
    assert replays == {"prefill": 1.0, "decode": 1.0}


def test_growth_of_a_function_is_reported_with_its_name_and_the_cure() -> None:
    with pytest.raises(
        AssertionError, match=r"1,020 .*accepted are 1,000;.*COSTS=--accept\n +\+20 to +120  wooly.x: grown"
    ):
        compare("read", {"wooly.x: grown": 100, "wooly.x: same": 900}, {"wooly.x: grown": 120, "wooly.x: same": 900})


def test_smaller_count_must_be_accepted_so_that_later_growth_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"980 .*accepted are 1,000"):
        compare("read", {"wooly.x: f": 1000}, {"wooly.x: f": 980})
