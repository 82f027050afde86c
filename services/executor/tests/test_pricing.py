"""Tests of prices on a CPU: equal runs cost the same although their times vary, and different runs do not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_executor.billing import pricing
from wooly_executor.billing.core_speed import FULL
from wooly_executor.billing.pricing import (
    MAX_RATIO,
    MEAN_FROM_RUNS,
    MIN_RATIO,
    SETTLED_NS,
    SKIPPED_RUNS,
    MeanPrice,
    PriceBook,
)
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType

PLAIN, PLAN = object(), object()


def known(*took, of=PLAIN):
    found = PriceBook().of("t", b"p", of)
    for ns in (9_000,) * SKIPPED_RUNS + took:
        found.ran(ns, 2 * ns)
    return found


def price(found, ns, part=1, whole=1):
    """The price at the usual pace, which is one half."""
    return found.price(ns, 2 * ns, part, whole)


def test_price_of_a_new_program_is_the_measured_time():
    found = known(*[1000] * (MEAN_FROM_RUNS - 1))
    assert [price(found, ns) for ns in (900, 1000, 1300)] == [900, 1000, 1300]
    found.ran(1000, 2000)
    assert [price(found, ns) for ns in (900, 1000, 1300)] == [1000] * 3


def test_price_of_an_unusual_run_is_bounded_by_its_measured_time():
    found = known(*[1000] * MEAN_FROM_RUNS)
    assert price(found, 6000) == 3000 and price(found, 300) == 600
    assert price(found, 0) == 0 and price(found, 500, 0, 0) == 500


@pytest.mark.parametrize(("ns", "core_ns"), [(400, 2400), (2400, 1700), (1000, 9000), (9000, 2000)])
def test_price_with_a_wrong_pace_uses_the_mean_pace(ns, core_ns):
    """The core seems four times slower or faster than usual, or the run took longer and the pace explains it."""
    assert known(*[1000] * MEAN_FROM_RUNS).price(ns, core_ns, 1, 1) == 1000


def test_price_of_a_partial_run_is_proportional():
    found = known(*[1000] * MEAN_FROM_RUNS)
    assert [price(found, ns, part, 4) for ns, part in ((300, 1), (750, 3), (990, 4))] == [250, 750, 1000]


@pytest.mark.parametrize("seed", range(3))
def test_price_over_many_runs_equals_the_measured_time(seed):
    chance = random.Random(seed)
    found = known()
    paid = took = 0
    for k in range(20_000):
        ns = int(
            1000 * chance.uniform(0.8, 1.3) * (1.15 if k % 2000 < 1000 else 1.0)
        )  # a neighbour slows the core in phases
        paid, took = paid + price(found, ns), took + ns
        found.ran(ns, 2 * ns)
    assert paid == pytest.approx(took, rel=0.01)


def test_price_follows_a_lasting_change():
    found = known(*[1000] * 500)
    for _ in range(3000):
        found.ran(1400, 2800)
    assert price(found, 1400) > 1300
    for _ in range(3000):
        found.ran(5000, 10_000)  # each run counts as at most twice the mean
    assert price(found, 5000) >= int(5000 * MIN_RATIO) and found.mean_ns < 5000 * MAX_RATIO


def test_price_after_one_disturbed_run_changes_little():
    found = known(*[1000] * 100)
    found.ran(10**9, 10**9)
    assert price(found, 1000) <= 1010  # the run counts as twice the mean


def test_price_is_separate_per_tenant_and_resets_with_a_plan():
    book = PriceBook()
    for _ in range(SKIPPED_RUNS + MEAN_FROM_RUNS):
        book.of("a", b"p", PLAIN).ran(1000, 2000)
    assert book.of("a", b"p", PLAIN).price(900, 1800, 1, 1) == 1000
    assert book.of("b", b"p", PLAIN).price(900, 1800, 1, 1) == 900
    assert book.of("a", b"q", PLAIN).price(900, 1800, 1, 1) == 900
    assert book.of("a", b"p", PLAN).price(900, 1800, 1, 1) == 900


def test_price_book_number_of_programs_is_bounded(monkeypatch):
    monkeypatch.setattr(pricing, "REMEMBERED", 3)
    book = PriceBook()
    first = book.of("a", b"0", PLAIN)
    for k in (1, 2):
        book.of("a", b"%d" % k, PLAIN)
    assert book.of("a", b"0", PLAIN) is first
    book.of("a", b"3", PLAIN)
    assert book.of("a", b"0", PLAIN) is first and len(book._known) == 3
    assert isinstance(first, MeanPrice)


class Meter:
    """A tenant's account, as the device loop keeps it: whole runs, at a pace of one half."""

    def __init__(self):
        self.book, self.took, self.paid = PriceBook(), 0, 0

    def run(self, ns, program=b"p", other=2, tenant="t"):
        found = self.book.of(tenant, program, PLAIN)
        price = self.book.bill(tenant, ns, found.price(ns, other * ns, 1, 1))
        found.ran(ns, other * ns)
        self.took, self.paid = self.took + ns, self.paid + price
        return price


def test_balance_expensive_runs_of_a_cheap_program_are_paid_in_the_end():
    """An hour of core time in runs of a second, of a program known from a hundred thousand runs of a microsecond."""
    meter = Meter()
    for _ in range(100_000):
        meter.run(1_000)
    prices = [meter.run(10**9) for _ in range(3600)]
    assert prices[0] == pytest.approx(10**9 * MIN_RATIO, rel=0.01)
    assert prices[-1] == pytest.approx(10**9, rel=0.01) and meter.took - meter.paid <= SETTLED_NS * (1 - MIN_RATIO)


def test_balance_applies_to_new_programs_but_not_to_other_tenants():
    meter = Meter()
    for program in range(60):
        name = b"%d" % program
        for _ in range(SKIPPED_RUNS + MEAN_FROM_RUNS):
            meter.run(1_000, name)
        for _ in range(60):
            meter.run(10**9, name)
    assert meter.took - meter.paid <= SETTLED_NS
    took, paid = meter.took, meter.paid
    assert [meter.run(10**9, tenant="other") for _ in range(3)] == [10**9] * 3
    assert (meter.took - took, meter.paid - paid) == (3 * 10**9, 3 * 10**9)


COSTS = st.sampled_from([0, 1, 1_000, 10**6, 3 * 10**8, 10**10, 10**12])


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    st.lists(
        st.tuples(COSTS, st.integers(1, 400), st.sampled_from([b"p", b"q"]), st.sampled_from([1, 2, 5])), max_size=8
    )
)
def test_balance_any_sequence_of_runs_is_paid_up_to_a_constant(phases):
    meter, most = Meter(), 0
    for ns, times, program, other in phases:
        for _ in range(times):
            meter.run(ns, program, other)
            most = max(most, ns)
            assert meter.paid >= meter.took - SETTLED_NS - most
    assert meter.paid >= 0


@pytest.mark.parametrize("slower", [0.85, 1.15])
def test_balance_slow_phase_of_a_minute_changes_the_price_little(slower):
    meter = Meter()
    usually = [meter.run(10**7) for _ in range(20_000)][-1]
    then = [meter.run(int(10**7 * slower)) for _ in range(3000)]  # half a minute of runs
    assert usually == pytest.approx(10**7, rel=0.001)
    assert sum(then) == pytest.approx(usually * len(then), rel=0.03)


def test_price_book_number_of_balances_is_bounded(monkeypatch):
    monkeypatch.setattr(pricing, "REMEMBERED", 3)
    book = PriceBook()
    for k in range(10):
        book.bill(str(k), 5, 1)
    assert list(book._owed) == ["7", "8", "9"]


class Steady:
    """A core with a constant pace."""

    ppm = FULL // 2

    def begin(self):
        pass

    def worked(self, ns):
        pass


def test_loop_equal_runs_are_billed_equally(make_device, wis):
    device = make_device(pace=Steady())
    client, x = device.open("a", tenant="t"), wis.at(DType.F32, 1 << 10)
    client.make(1, *[0.0] * (1 << 10))
    body = wis.body()
    for _ in range(8):
        body.call("aten.add_.Tensor", ("inout", "x", x), ("in", "x", x))

    name = client.define(body)  # define once, because decoding a definition is billed, too
    client.sync()
    device.call(device.loop.take_usage)

    def run():
        client.start(name, [1])
        client.sync()
        ((used,),) = [device.call(device.loop.take_usage)]
        return used.core_ns, used.pace * used.core_ns // FULL

    taken, prices = zip(*[run() for _ in range(SKIPPED_RUNS + MEAN_FROM_RUNS)], strict=True)
    assert all(abs(price - ns // 2) <= 1 + ns // 100 for ns, price in zip(taken, prices, strict=True))
    *_, known = device.loop.launcher.prices._known.values()
    for _ in range(20):
        mean, owed = known.mean_ns, device.call(lambda: device.loop.launcher.prices._owed.get("t", 0))
        ns, price = run()
        mean_price = min(max(mean, ns / 2 * MIN_RATIO), ns / 2 * MAX_RATIO)
        settled = owed * min(ns / 2, SETTLED_NS) / SETTLED_NS  # the balance from a busy machine is paid
        assert price == pytest.approx(max(mean_price + settled, 0), rel=0.05)
    assert known.runs == MEAN_FROM_RUNS + 20
    device.call(lambda: device.loop.launcher.prices._owed.update(t=4 * SETTLED_NS))
    ns, price = run()
    assert price >= 4 * ns / 2, "what the tenant owes is billed with its next runs"
