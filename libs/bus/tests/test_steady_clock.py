"""Tests of a clock that does not jump when the machine's clock is set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_bus.steady_clock import ADOPTED_S, SLEW, SteadyClock


class Machine:
    def __init__(self, wall=1e9, steady=50.0):
        self.wall, self.steady, self.clock = wall, steady, None
        self.clock = SteadyClock(lambda: self.wall, lambda: self.steady)

    def run(self, seconds, jump=0.0):
        self.wall += seconds + jump
        self.steady += seconds
        return self.clock()


@pytest.mark.parametrize("jump", [1337.0, -3459.0, 86_000.0])
def test_steady_clock_machines_clock_is_set_moves_by_little_and_arrives(jump):
    machine = Machine()
    before = machine.clock()
    assert machine.run(15, jump) - before == pytest.approx(15, abs=15 * SLEW + 1e-6)
    for _ in range(3000):
        machine.run(abs(jump) / SLEW / 2990)
    assert machine.clock() == pytest.approx(machine.wall, abs=1e-3)


def test_steady_clock_jump_that_is_undone_leaves_no_difference():
    machine = Machine()
    machine.run(20, 1337)
    machine.run(1, -1337)
    machine.run(25)
    assert machine.clock() == pytest.approx(machine.wall, abs=1e-3)


def test_steady_clock_machine_without_a_valid_time_is_followed_at_once():
    machine = Machine(wall=100.0)
    machine.run(1, 1e9)
    assert machine.clock() == machine.wall
    assert ADOPTED_S < 1e9


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(-4e4, 4e4)), max_size=50))
def test_steady_clock_never_runs_backwards_and_never_faster_than_it_may(steps):
    machine, far = Machine(), 0.0
    last = machine.clock()
    for seconds, jump in steps:
        far += jump
        if abs(far) > ADOPTED_S / 2:
            break
        now = machine.run(seconds, jump)
        assert (1 - SLEW) * seconds - 1e-3 <= now - last <= (1 + SLEW) * seconds + 1e-3
        last = now
