"""How fast a core is: against its best, or against a reference; looks are few, and one that was disturbed counts little."""

import pytest
from pydantic import ValidationError
from wooly_executor.core_speed import EVERY_NS, FULL, CoreSpeed
from wooly_executor.settings import ExecutorSettings


def after(pace, *measured):
    for ns in measured:
        pace.measured(ns)
    return pace.ppm


def begun(reference=None, ns=10_000):
    pace = CoreSpeed(reference)
    pace.begin()
    # as if it had found out this
    pace.mean_ns = pace._best = float(ns)
    pace.measured(ns)
    return pace


def test_core_at_its_best_has_the_full_pace_and_a_slower_one_less():
    pace = begun()
    assert pace.ppm == FULL
    assert after(pace, *[20_000] * 200) == pytest.approx(FULL / 2, rel=0.001)
    assert after(pace, *[10_000] * 200) == pytest.approx(FULL, rel=0.001)
    assert after(pace, *[5_000] * 200) == FULL  # it has a new best
    assert after(pace, *[10_000] * 200) == pytest.approx(FULL / 2, rel=0.001)


def test_against_a_reference_a_faster_core_has_more():
    assert begun(20_000).ppm == 2 * FULL
    assert begun(5_000).ppm == FULL // 2


def test_one_disturbed_look_counts_little_and_the_pace_is_never_nothing():
    pace = begun()
    assert after(pace, 10**9) > FULL * 0.8
    assert after(pace, *[10**12] * 1000) == 1


def test_it_looks_now_and_then(monkeypatch):
    pace, looks = begun(), []
    monkeypatch.setattr(CoreSpeed, "look", lambda self: looks.append(1))
    for _ in range(10):
        pace.worked(EVERY_NS // 4)
    assert len(looks) == 2
    pace.worked(10 * EVERY_NS)
    assert len(looks) == 3


def test_what_it_measures_is_a_pace():
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
