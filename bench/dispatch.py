"""Measures the cost of a dispatch decision, and the results of the dispatch rule for all pairs of models in simulation.

The measure is CPU time of this process, so that other processes do not matter. Without --profiles, the models are synthetic.

Run: .venv/bin/python bench/dispatch.py [--json] [--profiles FILE] [--only cost|pairs|shares|cluster] [--processes N]
"""

import argparse
import functools
import sys
import time
from collections import deque
from pathlib import Path

import figures
from wooly_dispatch.core import step
from wooly_dispatch.events import LaunchDoneEvent, Policy, ProgramSubmittedEvent, SessionOpenedEvent
from wooly_dispatch.journal import Journal, Replayer
from wooly_dispatch.state import DispatchState
from wooly_testkit.simulate import study
from wooly_testkit.simulate.workload import read_profiles, synthetic_profiles

row = functools.partial(figures.row, against="value")


def busy(tenants, decisions, journal=None):
    """CPU time per launch decision in us, including its done event, its true-up, and a new program at every fourth launch."""
    state = DispatchState()
    entries = []

    def feed(event):
        _, found = step(state, event)
        if journal is not None:
            journal.record(event, found)
            entries.append((event, found))
        return found

    queue, programs, now = deque(), {}, 0
    for n in range(tenants):
        feed(SessionOpenedEvent(0, f"s{n}", Policy(priority=2 + n % 3, weight=1 + n % 4)))
    for n in range(tenants):
        programs[f"s{n}"] = 1
        queue.extend(feed(ProgramSubmittedEvent(0, f"s{n}", 1, (100_000,) * 4)))
    started = time.process_time()
    for _ in range(decisions):
        launch = queue.popleft()
        now += 90_000
        queue.extend(feed(LaunchDoneEvent(now, launch.launch, launch.estimate_ns * 9 // 10)))
        if launch.last == 4:
            programs[launch.session] += 1
            queue.extend(feed(ProgramSubmittedEvent(now, launch.session, programs[launch.session], (100_000,) * 4)))
    return (time.process_time() - started) / decisions * 1e6, entries


def bench_cost(given):
    ten = min(busy(10, 50_000)[0] for _ in range(3))
    thousand = min(busy(1_000, 50_000)[0] for _ in range(3))
    yield row("decision at 1,000 tenants (baseline: at 10)", "us", thousand, ten, 20)
    more = min(busy(20_000, 50_000)[0] for _ in range(2))
    yield row("decision at 20,000 tenants over 1,000", "us", more, thousand, 2, against="ratio")
    journal = Journal("bench")
    _, entries = busy(1_000, 50_000, journal)
    started = time.process_time()
    batch = journal.cut()
    cut = (time.process_time() - started) / len(entries) * 1e6
    yield row("journal, encode and hash an entry", "us", cut, None, None)
    yield row("journal, bytes of an entry", "B", len(batch.entries) / len(entries), None, None)
    replayer = Replayer("bench")
    started = time.process_time()
    replayer.feed(batch)
    yield row("replay and verify an entry", "us", (time.process_time() - started) / len(entries) * 1e6, None, None)


def bench_pairs(given):
    profiles = given.models
    options = study.Options(seconds=given.seconds, processes=given.processes, policies=("wooly",))
    fifo = study.Options(seconds=given.seconds, processes=given.processes, policies=("fifo",))
    for background in (1, 4):
        found = study.pairs(profiles, options, background)
        near = [r for r in found if r["longest_share"] <= 0.05]
        others = study.pairs(profiles, fifo, background)
        beside = f"beside {background} saturating P4"
        short = f"longest kernel <= 5 % of a request ({len(near)} of {len(found)} pairs)"
        worst = max(r["p99"] for r in near)
        yield row(f"P0 p99 against P0 alone, worst, {beside}, {short}", "x", worst, max(r["p99"] for r in others), 1.10)
        yield row(f"P0 p50 against P0 alone, worst, {beside}, same pairs", "x", max(r["p50"] for r in near), None, 1.10)
        least = min(r["reclaimed"] for r in near)
        yield row(
            f"share of the remaining device time that P4 gets, least, {beside}, same pairs",
            "",
            least,
            None,
            0.90,
            higher_is_better=True,
        )
        mean = sum(r["reclaimed"] for r in found) / len(found)
        yield row(f"share of the remaining device time that P4 gets, mean, {beside}, all pairs", "", mean, None, None)
        ordered = sorted(r["p99"] for r in found)
        yield row(f"P0 p99 against P0 alone, median, {beside}, all pairs", "x", ordered[len(ordered) // 2], None, None)
    checked = study.Options(seconds=given.seconds, processes=given.processes, audit=True)
    found = [r for n in (1, 4) for r in study.pairs(profiles, checked, n)]
    yield row(
        "decisions audited over all pairs", "", sum(r["launches"] for r in found), None, 10**6, higher_is_better=True
    )
    yield row("bound violations in these decisions", "", sum(r["violations"] for r in found), None, 0)
    yield row("unjust wait in these decisions", "ns", sum(r["unjust_ns"] for r in found), None, 0)


def bench_shares(given):
    options = study.Options(seconds=given.seconds, processes=given.processes, audit=True)
    fifo = study.Options(seconds=given.seconds, processes=given.processes, policies=("fifo",))
    for weights in ((1, 1), (3, 1)):
        found = study.shares(given.models, options, weights)
        other = study.shares(given.models, fifo, weights)
        name = f"share error of two tenants {weights[0]}:{weights[1]}, worst of {len(found)} pairs (baseline: FIFO)"
        yield row(name, "", max(r["share_error"] for r in found), max(r["share_error"] for r in other), 0.02)
        yield row("bound violations in these decisions", "", sum(r["violations"] for r in found), None, 0)


def bench_cluster(given):
    """Simulate one minute in one process. This takes up to ten minutes on a slow machine."""
    started = time.process_time()
    found = study.cluster(given.models, study.Options(seconds=60), 100, 1000, 700)
    yield row("1,000 tenants on 100 GPUs for a minute, CPU", "s", time.process_time() - started, None, 300)
    yield row("launches in that minute", "", found[-1]["launches"], None, None)


BENCHES = {"cost": bench_cost, "pairs": bench_pairs, "shares": bench_shares, "cluster": bench_cluster}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profiles", type=Path, help="kernel sequences, schema profiles/1")
    parser.add_argument(
        "--only", choices=BENCHES, help="run only this benchmark; cluster runs only if it is named here"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="virtual time of each pair")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    given.models = read_profiles(given.profiles) if given.profiles else synthetic_profiles()
    names = [given.only] if given.only else [name for name in BENCHES if name != "cluster"]
    rows = []
    for name in names:
        for found in BENCHES[name](given):
            rows.append(found)
            if not given.json:
                print(f"{found['name']}: {found['ours']} {found['unit']}", file=sys.stderr)
    figures.show(rows, given.json)
    return 1 if any(found["ok"] is False for found in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
