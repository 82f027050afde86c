"""When a wait looks for input before it blocks. Time is a number here."""

from itertools import pairwise

import pytest
from wooly_bus.channel import busy_wait
from wooly_bus.channel.busy_wait import PAUSES_NS, TAKEN_NS, BusyWait

LOOK_NS = 100_000


class Waits:
    """Waits for input that arrives after some time. Each look takes `look_ns`."""

    def __init__(self, cores=2):
        self.now, self.look_ns, self.looks = 1, 2_000, 0
        self.began: list[int] = []  # the times of the waits that looked
        self.busy = BusyWait(LOOK_NS, cores=cores, clock=lambda: self.now)

    def wait(self, ns):
        """Wait for input that arrives in `ns`. Returns whether the thread blocked."""
        arrives = self.now + ns
        begun, until = self.busy.begin()
        now = begun
        if until:
            self.began.append(begun)
        while self.now < arrives:
            self.now += self.look_ns
            self.looks += 1
            now = self.busy.go_on(now, until)
            if not now:
                self.now = max(self.now, arrives)
                break
        self.busy.end(begun, until, blocked=not now)
        return not now


def test_wait_after_short_wait_looks_for_input():
    waits = Waits()
    assert waits.wait(50_000) and waits.looks == 1
    assert not waits.wait(50_000) and waits.looks == 1 + 25


def test_wait_after_long_wait_blocks_at_once():
    waits = Waits()
    waits.wait(1_000)
    assert waits.wait(10 * LOOK_NS)
    looks = waits.looks
    assert waits.wait(1_000) and waits.looks == looks + 1


def test_waits_whose_core_is_taken_look_less_and_less_often():
    waits = Waits()
    waits.wait(1_000)
    waits.look_ns = TAKEN_NS + 1
    while len(waits.began) < 16:
        waits.wait(90_000)
    pauses = [b - a for a, b in pairwise(waits.began)]
    for k in range(10):
        assert 0 <= pauses[k] - 2**k * PAUSES_NS[0] <= 2 * LOOK_NS
    assert pauses[-1] <= PAUSES_NS[1] + 2 * LOOK_NS


def test_wait_that_looked_in_vain_pauses_and_one_that_found_input_ends_the_pauses():
    waits = Waits()
    waits.wait(1_000)
    waits.wait(2 * LOOK_NS)  # in vain
    first = waits.now
    while len(waits.began) < 2:
        waits.wait(10_000)  # the wait that looks finds input
    assert PAUSES_NS[0] - LOOK_NS <= waits.began[1] - first <= PAUSES_NS[0] + LOOK_NS
    waits.wait(2 * LOOK_NS)
    second, waits.began = waits.now, []
    while not waits.began:
        waits.wait(10_000)
    assert waits.began[0] - second <= PAUSES_NS[0] + LOOK_NS


@pytest.mark.parametrize("cores", [1, 2])
def test_wait_with_one_core_never_looks(cores):
    waits = Waits(cores)
    for _ in range(10):
        waits.wait(1_000)
    assert bool(waits.began) == (cores >= busy_wait.MIN_CORES)
