"""Tests of the measurement of a core's speed, with and without a reference."""

import pytest
from pydantic import ValidationError
from wooly_executor.billing.core_speed import EVERY_NS, FULL, CoreSpeed
from wooly_executor.settings import ExecutorSettings


def after(pace, *measured):
    for ns in measured:
        pace.measured(ns)
    return pace.ppm


def begun(reference=None, ns=10_000):
    pace = CoreSpeed(reference)
    pace.begin()
    # as if `begin` had measured this
    pace.mean_ns = pace._best = float(ns)
    pace.measured(ns)
    return pace


def test_speed_without_reference_is_relative_to_the_best_time():
    pace = begun()
    assert pace.ppm == FULL
    assert after(pace, *[20_000] * 200) == pytest.approx(FULL / 2, rel=0.001)
    assert after(pace, *[10_000] * 200) == pytest.approx(FULL, rel=0.001)
    assert after(pace, *[5_000] * 200) == FULL  # this is the new best time
    assert after(pace, *[10_000] * 200) == pytest.approx(FULL / 2, rel=0.001)


def test_speed_core_faster_than_the_reference_exceeds_full():
    assert begun(20_000).ppm == 2 * FULL
    assert begun(5_000).ppm == FULL // 2


def test_speed_disturbed_measurement_has_little_effect():
    pace = begun()
    assert after(pace, 10**9) > FULL * 0.8
    assert after(pace, *[10**12] * 1000) == 1


def test_speed_is_measured_once_per_interval_of_device_time(monkeypatch):
    pace, looks = begun(), []
    monkeypatch.setattr(CoreSpeed, "look", lambda self: looks.append(1))
    for _ in range(10):
        pace.worked(EVERY_NS // 4)
    assert len(looks) == 2
    pace.worked(10 * EVERY_NS)
    assert len(looks) == 3


def test_speed_real_core_gives_a_positive_pace():
    pace = CoreSpeed()
    pace.begin()
    for _ in range(100):
        pace.look()
        assert 1 <= pace.ppm <= FULL


def test_settings(monkeypatch):
    def of(value):
        monkeypatch.setenv("WOOLY_EXECUTOR_PACE", value)
        return ExecutorSettings().paced()

    assert of("off") is None and of("best")._reference is None and of("15000")._reference == 15_000
    with pytest.raises(ValidationError):
        of("fast")
