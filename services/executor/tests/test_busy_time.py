"""How long the device has worked: in all, and in the last second."""

from hypothesis import given
from hypothesis import strategies as st
from wooly_executor.billing.busy_time import SAMPLE_NS, WINDOW_NS, BusyTime

S = 1_000_000_000


def test_percent_of_idle_device_is_zero():
    busy = BusyTime()
    assert busy.percent(5 * S) == 0
    busy.add(S // 2, 6 * S)
    assert busy.percent(6 * S) == 50 and busy.percent(7 * S) == 0 and busy.total_ns == S // 2


def test_percent_of_busy_device_is_hundred():
    busy, now = BusyTime(), 10 * S
    for _ in range(400):
        now += 5_000_000
        busy.add(5_000_000, now)
    assert busy.percent(now) >= 99 and busy.percent(now + S // 2) in range(40, 61)


def test_percent_counts_a_launch_that_is_longer_than_the_window_once():
    busy = BusyTime()
    busy.add(3 * S, 20 * S)
    assert busy.percent(20 * S) == 100 and busy.percent(21 * S) == 0


@given(st.lists(st.tuples(st.integers(0, 300_000_000), st.integers(0, 300_000_000)), max_size=60))
def test_percent_is_exact_to_a_sample(launches):
    """(device time of a launch, idle time before it): the share counted by the definition, launch by launch."""
    busy, now, ends = BusyTime(), 100 * S, []
    for ns, pause in launches:
        now += ns + pause
        busy.add(ns, now)
        ends.append((now, ns))
    exact = sum(min(ns, max(0, end - (now - WINDOW_NS))) for end, ns in ends)
    longest = max([ns + pause for ns, pause in launches], default=0)
    assert abs(busy.percent(now) * WINDOW_NS / 100 - min(exact, WINDOW_NS)) <= SAMPLE_NS + longest + WINDOW_NS / 100
