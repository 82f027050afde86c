"""Tests the pure parts of chaos and soak: repeatable schedules, verdicts that can fail; and, as a slow test, two minutes of
chaos.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import schedule
import soak
import verdict
from wooly_testkit.links import Link
from work import Job, Run

HERE = Path(__file__).parent
TARGETS = {
    "kill": ("nats-0", "nats-1", "executor-0"),
    "stop": ("nats-2", "executor-0"),
    "cut": ("clients of executor-0",),
}
KILL = schedule.Fault(20.0, "kill", "executor-0", 1.0)
ERROR = "Traceback\nwooly.errors.ExecutorLostError: lost the executor executor-0: the other end closed the connection"


def row(rows, name):
    (found,) = [r for r in rows if r.name.startswith(name)]
    return found


def test_draw_same_seed_gives_same_faults():
    once = schedule.draw(7, 20, TARGETS)
    assert once == schedule.draw(7, 20, TARGETS) != schedule.draw(8, 20, TARGETS)
    assert {f.kind for f in once} == set(TARGETS) and len(once) > 20


@pytest.mark.parametrize("seed", range(20))
def test_draw_faults_on_one_target_or_nats_servers_never_overlap(seed):
    faults = schedule.draw(seed, 20, TARGETS)
    for i, fault in enumerate(faults):
        assert fault.at_s >= schedule.QUIET_S and fault.until_s <= 20 * 60 - schedule.QUIET_S
        for other in faults[:i]:
            same = fault.target == other.target or fault.target[:4] == other.target[:4] == "nats"
            assert not same or fault.at_s >= other.until_s + 3


def test_verdict_scripts_bad_run_fails_its_row():
    good = Run("train.py", 1, 0.0, 10.0, 0, "a")
    clear = Run("train.py", 2, 10.0, 23.0, 1, error=ERROR)
    runs = [good, clear]
    rows = verdict.scripts(runs, [KILL], lambda script, seed: "a")
    assert all(r.ok is not False for r in rows), rows
    for run, name in (
        (replace(good, result="b"), "finished with the exact bits"),
        (replace(clear, error="Segmentation fault"), "errors without a clear reason"),
        (replace(clear, ended_s=27.0), "errors later than"),
        (replace(clear, began_s=1.0, ended_s=15.0), "errors without any fault"),
        (replace(clear, hung=True), "scripts that hung"),
    ):
        rows = verdict.scripts([good, run], [KILL], lambda script, seed: "a")
        assert row(rows, name).ok is False, name


def test_verdict_stopped_process_is_detected_at_its_end_or_after_the_lease():
    still = schedule.Fault(20.0, "stop", "executor-0", 10.0)
    assert verdict.behind(Run("s", 1, 0.0, 33.0, 1), [still]) == pytest.approx(3.0)
    assert verdict.behind(Run("s", 1, 0.0, 25.0, 1), [still]) == 0.0
    assert verdict.behind(Run("s", 1, 0.0, 19.0, 1), [still]) is None


def test_verdict_jobs_bad_job_fails_its_row():
    good = Job("j", "short", 1.0, "completed", "", ["pending", "started", "completed"], ("d",))
    assert all(r.ok is not False for r in verdict.jobs([good], {"short": ("d",)}))
    for job, name in (
        (replace(good, state="started"), "acknowledged jobs that are lost"),
        (replace(good, state="failed"), "jobs that failed"),
        (replace(good, story=[*good.story, "completed"]), "jobs with two results"),
        (replace(good, outputs=("e",)), "jobs with wrong results"),
    ):
        assert row(verdict.jobs([good, job], {"short": ("d",)}), name).ok is False, name


def test_verdict_ledger_missing_and_changed_records_fail():
    key, record = ("executor-0/1", 1, 0), ("s", 100, 200)
    assert all(r.ok is not False for r in verdict.ledger({key: record}, {key: record}, ()))
    other = {("executor-0/1", 2, 0): record}
    assert row(verdict.ledger({key: record}, other, ()), "published records that were not booked").ok is False
    assert row(verdict.ledger({key: record}, {key: ("s", 200, 400)}, ()), "records booked with other").ok is False
    assert all(r.ok is not False for r in verdict.ledger({key: record}, other, ("s",)))


def test_verdict_streams_without_limit_or_with_commands_fail():
    assert all(r.ok is not False for r in verdict.streams({"A": (1, 10, 100)}, ()))
    assert row(verdict.streams({"A": (1, 10, -1)}, ()), "streams without a bound").ok is False
    assert row(verdict.streams({"A": (1, 10, 100)}, ("A",)), "commands left in queues").ok is False


def test_slopes_growth_differs_from_noise():
    times = [i * 5.0 for i in range(240)]
    noise = [(t, 1e8 + (i * 7919 % 13) * 1e5) for i, t in enumerate(times)]
    grown = [(t, v + t * 3e4) for t, v in noise]
    rows = {r["name"]: r for r in soak.slopes({("a", "memory"): noise, ("b", "memory"): grown}, 400.0)}
    assert rows["a: memory"]["ok"] is True and rows["b: memory"]["ok"] is False
    assert rows["b: memory"]["per_hour"] == pytest.approx(3600 * 3e4, rel=0.1)


def test_slopes_begin_when_the_work_has_filled_the_caches():
    """On a busy machine, this takes more than a part of the time."""
    busy = [(i * 5.0, min(i * 5.0, 900.0) * 1e5) for i in range(240)]
    warm_s = soak.warm([900.0 * k / soak.WARM_SCRIPTS for k in range(soak.WARM_SCRIPTS, 0, -1)])
    assert warm_s == 900
    assert [r["ok"] for r in soak.slopes({("a", "memory"): busy}, warm_s)] == [True]
    assert [r["ok"] for r in soak.slopes({("a", "memory"): busy}, 400.0)] == [False]
    assert soak.slopes({("a", "memory"): busy}, soak.warm([1.0] * (soak.WARM_SCRIPTS - 1))) == []


def test_link_cut_holds_bytes_until_restored():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link("l", [("127.0.0.1", 1), listener.getsockname()])  # nothing answers at the first target
        try:
            with socket.create_connection(("127.0.0.1", link.port)) as near:
                far, _ = listener.accept()
                with far:
                    near.sendall(b"before")
                    assert far.recv(16) == b"before"
                    link.cut()
                    near.sendall(b"during")
                    far.settimeout(0.3)
                    with pytest.raises(TimeoutError):
                        far.recv(16)
                    link.mend()
                    far.settimeout(20)
                    assert far.recv(16) == b"during"
        finally:
            link.close()


@pytest.mark.slow
@pytest.mark.connected
@pytest.mark.timeout(900)
def test_chaos_two_minutes_lose_nothing(tmp_path):
    argv = [sys.executable, str(HERE / "chaos.py"), "--minutes", "2", "--seed", "1", "--json", "--keep", str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    failed = [r for r in found["rows"] if r["ok"] is False]
    assert ran.returncode == 0 and not failed, (failed, ran.stderr[-2000:])
