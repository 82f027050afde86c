"""Arithmetic and checks: prices, plans, impossible records, repeated and missing batches."""

import dataclasses
import datetime
import random

import pytest
from wooly_metering.core.booking import HOUR_US, SUMS, Source, book, read
from wooly_metering.core.budgets import DAY_US, Budget, period_begin_us
from wooly_metering.core.checks import impossible
from wooly_metering.core.rating import PLAIN, UNIT, Tariff, TariffPlan, price, text

from .conftest import NOW, SECOND, delivery, event, record


def booked(*events, sources=None, tariff=None, first=1):
    deliveries = [delivery(n, e) for n, e in enumerate(events, 1)]
    return book(*read(deliveries), sources or {}, first, 1, tariff or Tariff([]), NOW)


def column(booking, name):
    return [getattr(entry, name) for entry in booking.entries]


def test_price_matches_the_examples_of_the_readme():
    one_core_ms = record(gpu_ns=1_000_000, core_ns=1_000_000, resident_mib_us=0, idle_mib_us=0)
    assert price(one_core_ms, PLAIN) == (UNIT, 0)
    # 80 cores for 2.5 ms; 1,024 MiB in this time, and for the rest of the second
    run = record(gpu_ns=2_500_000, core_ns=200_000_000, resident_mib_us=1024 * 2500, idle_mib_us=1024 * 997_500)
    assert price(run, PLAIN) == (200 * UNIT, 2_560_000)
    assert price(run, TariffPlan(1, core_rate=1_500_000, vram_rate=500_000, idle_rate=100_000)) == (
        300 * UNIT,
        103_424_000,
    )


def test_price_of_a_slow_core_follows_its_pace():
    slow = record(core_ns=2_000_000, pace_ppm=500_000, resident_mib_us=2_000_001, idle_mib_us=3)
    assert price(slow, PLAIN) == (UNIT, 1_000_000)
    # idle memory is charged by wall time, whatever the pace of the cores is
    assert price(slow, TariffPlan(1, core_rate=3 * UNIT, idle_rate=UNIT)) == (3 * UNIT, 1_000_003)
    (entry,) = booked(event(slow)).entries
    assert (entry.core_ns, entry.pace_ppm, entry.core_ucr) == (2_000_000, 500_000, UNIT)


def test_price_is_rounded_down_once_per_amount():
    assert price(
        record(core_ns=3, resident_mib_us=1, idle_mib_us=1),
        TariffPlan(1, core_rate=500_000, vram_rate=500_000, idle_rate=500_000),
    ) == (1, 1)


def test_price_at_plain_rates_is_additive():
    chance = random.Random(1)
    parts = [record(core_ns=chance.randrange(10**9), resident_mib_us=chance.randrange(10**9)) for _ in range(100)]
    whole = record(core_ns=sum(p.core_ns for p in parts), resident_mib_us=sum(p.resident_mib_us for p in parts))
    assert price(whole, PLAIN) == tuple(map(sum, zip(*[price(p, PLAIN) for p in parts], strict=True)))


def test_text_of_an_amount_has_six_decimals():
    assert [text(0), text(1), text(-1_500_000), text(123 * UNIT)] == ["0.000000", "0.000001", "-1.500000", "123.000000"]


def test_tariff_prefers_the_most_specific_then_the_latest_plan():
    any_, kind, klass, both = (
        TariffPlan(1),
        TariffPlan(2, device_kind="cpu"),
        TariffPlan(3, priority=0),
        TariffPlan(4, device_kind="cpu", priority=0),
    )
    later = TariffPlan(5, device_kind="cpu", priority=0, valid_from_us=100, valid_until_us=200)
    tariff = Tariff([later, any_, both, klass, kind])
    assert (
        tariff.plan("cpu", 0, 99) == both and tariff.plan("cpu", 0, 100) == later and tariff.plan("cpu", 0, 200) == both
    )
    assert (
        tariff.plan("cpu", 1, 150) == kind
        and tariff.plan("nvidia", 0, 0) == klass
        and tariff.plan("nvidia", 4, 0) == any_
    )
    assert Tariff([TariffPlan(1, valid_from_us=10)]).plan("cpu", 2, 9) == PLAIN


def test_usage_is_priced_by_the_plan_at_its_start():
    tariff = Tariff([TariffPlan(1), TariffPlan(2, valid_from_us=NOW, core_rate=2 * UNIT)])
    assert column(booked(event(record(at_us=NOW)), tariff=tariff), "plan_id") == [1]
    after = event(record(at_us=NOW + SECOND))
    assert column(booked(after, tariff=tariff), "plan_id") == [2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"core_ns": -1}, "core_ns is -1"),
        ({"pace_ppm": 0}, "pace_ppm is 0"),
        ({"pace_ppm": 10**4000}, "pace_ppm is astronomical"),
        ({"flops": 1 << 63}, "flops is"),
        ({"flops": 10**4000}, "astronomical"),
        ({"gpu_ns": 1_100_000_000}, "of device time in"),
        ({"core_ns": 3_000_000_000}, "core-ns in"),
        ({"resident_mib_us": 1_000 * SECOND}, "resident MiB-us in"),
        ({"idle_mib_us": 1_100 * SECOND}, "more resident MiB-us than"),
        ({"priority": 5}, "class 5 does not exist"),
        ({"tenant": ""}, "the tenant is empty"),
        ({"session_id": "a b"}, "session id is not valid"),
        ({"model": "a\0"}, "zero byte"),
        ({"at_us": SECOND}, "before 2020"),
    ],
)
def test_impossible_record_is_quarantined_alone(change, reason):
    bad = record().model_copy(update=change)
    assert reason in impossible(bad, event())
    found = booked(event(record("a"), bad, record("b")))
    assert column(found, "session_id") == ["a", "b"] and column(found, "item") == [0, 2]
    (q,) = found.quarantined
    assert reason in q.reason and (q.source, q.batch, q.item) == ("gpu-0/1", 1, 1) and "span_us" in q.payload


@pytest.mark.parametrize(
    ("stored_s", "booked_s", "moved"),
    [(0, 0, "1000 s ahead"), (99, 99, "901 s ahead"), (800, 1000, ""), (1000, 1000, "")],
)
def test_record_of_an_executor_whose_clock_is_ahead_is_booked_at_its_arrival(stored_s, booked_s, moved):
    """Our clock may be behind, so the stream's clock counts, too. A record that either confirms keeps its time."""
    told = event(record(at_us=NOW + 1000 * SECOND))
    kept = dataclasses.replace(delivery(1, told), stored_us=NOW + stored_s * SECOND)
    found = book(*read([kept]), {}, 1, 1, Tariff([]), NOW)
    (entry,) = found.entries
    assert not found.quarantined and entry.end_us == NOW + booked_s * SECOND
    assert entry.end_us - entry.begin_us == record().span_us and entry.gpu_ns == record().gpu_ns
    assert entry.reason.endswith(moved) and bool(entry.reason) == bool(moved)


def test_record_of_an_astronomical_time_is_booked_at_its_arrival():
    (entry,) = booked(event(record().model_copy(update={"at_us": 10**4000}))).entries
    assert entry.end_us == NOW and entry.reason == "its executor's clock was far ahead"


def test_possible_record_is_not_quarantined():
    full = {"gpu_ns": 10**9, "core_ns": 2 * 10**9, "resident_mib_us": 1024 * SECOND, "idle_mib_us": 0}
    for good in (record(), record(**full), record(span_us=0, gpu_ns=0, core_ns=0, resident_mib_us=0, idle_mib_us=0)):
        assert impossible(good, event()) == ""


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff\x00", b'{"source": 1}', event(record()).model_dump_json().encode()[:-9]]
)
def test_undecodable_message_is_quarantined_whole(data):
    found = booked(data, event(record()))
    assert len(found.entries) == 1 and len(found.quarantined) == 1
    (q,) = found.quarantined
    assert (
        "not a UsageRecorded" in q.reason
        and q.sequence == 1
        and (q.payload in (data.decode(errors="replace"), data.hex()))
    )


def test_number_sent_as_text_is_quarantined():
    data = event(record()).model_dump_json().replace('"runs":10', '"runs":"10"').encode()
    assert booked(data).quarantined[0].reason.startswith("the message is not a UsageRecorded: records.0.runs")


def test_repeated_batch_is_booked_once():
    found = booked(event(record()), event(record()), event(record(), batch=2), event(record()))
    assert column(found, "batch") == [1, 2] and found.duplicates == 2 and not found.quarantined
    assert booked(event(record(), batch=7), sources={"gpu-0/1": Source(3, 7)}).duplicates == 1


def test_missing_batches_are_quarantined():
    found = booked(event(record(), batch=9), sources={"gpu-0/1": Source(3, 5)})
    assert len(found.entries) == 1 and found.sources == {"gpu-0/1": (3, 9)}
    assert "batches 6 to 8 of this source are missing" in found.quarantined[0].reason


def test_sums_equal_the_sums_of_entries():
    chance = random.Random(3)
    events = []
    for batch in range(1, 30):
        records = [
            record(f"s{chance.randrange(4)}", tenant=f"t{chance.randrange(3)}", at_us=NOW - chance.randrange(5 * HOUR_US),
                   core_ns=chance.randrange(400_000_000), ended=chance.random() < 0.1)
            for _ in range(chance.randrange(5))
        ]  # fmt: skip
        events.append(event(*records, batch=batch))
    found = booked(*events)
    for sums in (list(found.hours.values()), [r.sums for r in found.runs.values()]):
        assert sum(s.entries for s in sums) == len(found.entries)
        for name in SUMS[1:]:
            assert sum(getattr(s, name) for s in sums) == sum(column(found, name)), name
    assert all(key.hour_us % HOUR_US == 0 for key in found.hours)
    assert column(found, "id") == list(range(1, len(found.entries) + 1))


def test_budget_periods_follow_the_calendar():
    at = int(datetime.datetime(2027, 3, 15, 13, 5, tzinfo=datetime.UTC).timestamp()) * SECOND
    day = int(datetime.datetime(2027, 3, 15, tzinfo=datetime.UTC).timestamp()) * SECOND
    month = int(datetime.datetime(2027, 3, 1, tzinfo=datetime.UTC).timestamp()) * SECOND
    assert [period_begin_us(p, at) for p in ("total", "month", "day")] == [0, month, day]
    assert day % DAY_US == 0


def test_budget_reports_the_highest_reached_limit():
    budget = Budget("t", soft_ucr=10, hard_ucr=20)
    assert [budget.reached(n) for n in (9, 10, 19, 20)] == ["", "soft", "soft", "hard"]
    assert Budget("t", hard_ucr=0).held(0) and not Budget("t").held(1 << 62)
