"""How long programs may become: short until a loop sends the same ones again and again."""

import hypothesis.strategies as st
from hypothesis import given
from wooly.program_limits import IN_A_ROW, MOST_IN_A_ROW, NEW, OFTEN, SHORT, ProgramLimits


def send(limits, number, *, times):
    """Send full programs. Returns the limit of each."""
    found = []
    for _ in range(number):
        found.append(limits.next)
        limits.sent(limits.next, times)
    return found


def test_programs_become_longer_when_enough_are_sent_often_in_a_row():
    limits = ProgramLimits(4 * SHORT)
    send(limits, IN_A_ROW - 1, times=OFTEN)
    send(limits, 1, times=0)
    assert send(limits, IN_A_ROW + 1, times=OFTEN)[-1] == SHORT
    assert send(limits, 3, times=0) == [2 * SHORT, 4 * SHORT, 4 * SHORT]
    limits.waited()
    assert send(limits, 4, times=1) == [SHORT, 2 * SHORT, 4 * SHORT, 4 * SHORT]


def test_programs_that_were_sent_a_few_times_make_none_longer():
    limits = ProgramLimits(4 * SHORT)
    for times in range(OFTEN):
        assert set(send(limits, 4 * IN_A_ROW, times=times)) == {SHORT}


def test_only_full_programs_make_the_next_one_longer():
    limits = ProgramLimits(4 * SHORT)
    send(limits, IN_A_ROW, times=OFTEN)
    for _ in range(3):
        limits.sent(SHORT // 2, OFTEN)
        assert limits.next == SHORT
    limits.sent(SHORT // 2 + 1, OFTEN)  # an end form closes a program that has more than half
    assert limits.next == 2 * SHORT


def test_programs_become_short_again_if_the_longer_ones_stay_new():
    limits = ProgramLimits(4 * SHORT)
    needed = IN_A_ROW
    for _ in range(8):
        limits.waited()
        assert set(send(limits, needed, times=OFTEN)) == {SHORT}, "each attempt waits twice as long"
        assert max(send(limits, NEW + 1, times=0)) == 4 * SHORT
        assert limits.next == SHORT
        needed = min(2 * needed, MOST_IN_A_ROW)
    send(limits, 2 * MOST_IN_A_ROW, times=OFTEN)  # the longer ones are sent often
    send(limits, NEW + 1, times=0)
    assert send(limits, 2 * IN_A_ROW + 2, times=OFTEN)[-2:] == [SHORT, 2 * SHORT]


@given(
    most=st.integers(1, 4096),
    events=st.lists(
        st.one_of(st.just("wait"), st.tuples(st.floats(0, 1), st.integers(1, 200), st.integers(0, 20))), max_size=40
    ),
)
def test_limits_stay_within_bounds(most, events):
    limits = ProgramLimits(most)
    for event in events:
        if event == "wait":
            limits.waited()
            assert limits.next == min(SHORT, most)
            continue
        part, number, times = event
        for _ in range(number):
            before = limits.next
            limits.sent(int(part * before), times)
            assert min(SHORT, most) <= limits.next <= min(most, 2 * before)
