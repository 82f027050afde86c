"""How long programs may become: short while many are new, longer once all are known."""

import hypothesis.strategies as st
from hypothesis import given
from wooly.program_limits import KNOWN_IN_A_ROW, NEW, SHORT, ProgramLimits


def send(limits, times, *, known):
    """Send full programs. Returns the limit of each."""
    found = []
    for _ in range(times):
        found.append(limits.next)
        limits.sent(limits.next, known=known)
    return found


def test_programs_become_longer_when_enough_are_known_in_a_row():
    limits = ProgramLimits(4 * SHORT)
    send(limits, KNOWN_IN_A_ROW - 1, known=True)
    send(limits, 1, known=False)
    assert send(limits, KNOWN_IN_A_ROW + 1, known=True)[-1] == SHORT
    assert send(limits, 3, known=False) == [2 * SHORT, 4 * SHORT, 4 * SHORT]
    limits.waited()
    assert send(limits, 4, known=True) == [SHORT, 2 * SHORT, 4 * SHORT, 4 * SHORT]


def test_only_full_programs_make_the_next_one_longer():
    limits = ProgramLimits(4 * SHORT)
    send(limits, KNOWN_IN_A_ROW, known=True)
    for _ in range(3):
        limits.sent(SHORT // 2, known=True)
        assert limits.next == SHORT
    limits.sent(SHORT // 2 + 1, known=True)  # an end form closes a program that has more than half
    assert limits.next == 2 * SHORT


def test_programs_become_short_again_if_the_longer_ones_stay_new():
    limits = ProgramLimits(4 * SHORT)
    for turn in range(3):
        limits.waited()
        assert set(send(limits, KNOWN_IN_A_ROW << turn, known=True)) == {SHORT}, "each attempt waits twice as long"
        assert max(send(limits, NEW + 1, known=False)) == 4 * SHORT
        assert limits.next == SHORT
    send(limits, KNOWN_IN_A_ROW << 3, known=True)
    send(limits, KNOWN_IN_A_ROW << 3, known=True)  # the longer ones repeat
    send(limits, NEW + 1, known=False)
    assert send(limits, 2 * KNOWN_IN_A_ROW + 2, known=True)[-2:] == [SHORT, 2 * SHORT]


@given(
    most=st.integers(1, 4096),
    events=st.lists(
        st.one_of(st.just("wait"), st.tuples(st.floats(0, 1), st.integers(1, 200), st.booleans())), max_size=40
    ),
)
def test_limits_stay_within_bounds(most, events):
    limits = ProgramLimits(most)
    for event in events:
        if event == "wait":
            limits.waited()
            assert limits.next == min(SHORT, most)
            continue
        part, times, known = event
        for _ in range(times):
            before = limits.next
            limits.sent(int(part * before), known=known)
            assert min(SHORT, most) <= limits.next <= min(most, 2 * before)
