"""When a wait looks for input before it blocks. Time is a number here."""

import pytest
from wooly_bus.channel import busy_wait
from wooly_bus.channel.busy_wait import PAUSES_NS, TAKEN_NS, BusyWait

LOOK_NS = 100_000


class Waits:
    """Waits for input that arrives after some time. Other threads take the core for `taken_ns` after each look."""

    def __init__(self, cores=2):
        self.now, self.taken_ns, self.looks = 1, 2_000, 0
        self.busy = BusyWait(LOOK_NS, cores=cores, clock=lambda: self.now, give_way=self.give_way)

    def give_way(self):
        self.looks += 1
        self.now += self.taken_ns

    def wait(self, ns):
        """Wait for input that arrives in `ns`. Returns whether the thread blocked."""
        arrives = self.now + ns
        begun, until = self.busy.begin()
        now = begun
        while self.now < arrives:
            now = self.busy.go_on(now, until)
            if not now:
                self.now = max(self.now, arrives)
                break
        self.busy.end(begun, until, blocked=not now)
        return not now


def test_wait_after_short_wait_looks_for_input():
    waits = Waits()
    assert waits.wait(50_000)
    assert not waits.wait(50_000) and waits.looks == 25


def test_wait_after_long_wait_blocks_at_once():
    waits = Waits()
    waits.wait(1_000)
    assert waits.wait(10 * LOOK_NS) and waits.looks == LOOK_NS // 2_000
    assert waits.wait(1_000) and waits.looks == LOOK_NS // 2_000
    assert not waits.wait(1_000)


def test_wait_while_others_want_the_core_blocks_for_a_growing_time():
    waits = Waits()
    waits.wait(1_000)
    waits.taken_ns = TAKEN_NS + 1
    pauses = []
    for _ in range(40):
        before, since = waits.looks, waits.now
        while waits.looks == before:
            waits.wait(90_000)
        pauses.append(waits.now - since)
    assert pauses[1] < pauses[3] < pauses[5]
    assert PAUSES_NS[1] <= pauses[-1] <= PAUSES_NS[1] + 10 * LOOK_NS
    waits.taken_ns = 2_000
    while waits.wait(50_000):
        continue
    waits.taken_ns = TAKEN_NS + 1
    since = waits.now
    waits.wait(90_000)
    before = waits.looks
    while waits.looks == before:
        waits.wait(90_000)
    assert waits.now - since <= PAUSES_NS[0] + 10 * LOOK_NS  # looking that found input ends the growth


@pytest.mark.parametrize("cores", [1, 2])
def test_wait_with_one_core_never_looks(cores):
    waits = Waits(cores)
    for _ in range(10):
        waits.wait(1_000)
    assert bool(waits.looks) == (cores >= busy_wait.MIN_CORES)
