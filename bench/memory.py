"""What an allocation costs and what it wastes, on the recorded trace of two trainings that several sessions run at once.

CPU time of this process, so that neighbours on the machine do not count. The baseline of a loss is the first fit of a heap that
knows neither classes nor best fit.

Run: .venv/bin/python bench/memory.py [--json] [--only NAME] [--allocations N]
"""

import argparse
import bisect
import json
import time

from rich.console import Console
from rich.table import Table
from wooly_executor.memory.pool import Pool
from wooly_testkit.traces import tenants

SESSIONS = 8


def row(name, unit, ours, baseline, goal):
    """One result. `goal` bounds our own figure from above; None: only reported."""
    ratio = ours / baseline if baseline else None
    return {
        "name": name,
        "unit": unit,
        "ours": round(ours, 3),
        "baseline": round(baseline, 3) if baseline else None,
        "ratio": round(ratio, 3) if ratio else None,
        "goal": goal,
        "ok": goal is None or bool(ours <= goal),
    }


class FirstFit:
    """A heap that takes the lowest hole that fits; free neighbours become one."""

    def __init__(self):
        self.holes = [(0, 1 << 60)]
        self.high = 0

    def allocate(self, nbytes):
        size = max(256, -(-nbytes // 256) * 256)
        for i, (offset, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i : i + 1] = [(offset + size, hole - size)] if hole > size else []
                self.high = max(self.high, offset + size)
                return offset, size
        raise AssertionError

    def free(self, block):
        offset, size = block
        i = bisect.bisect_left(self.holes, block)
        if i < len(self.holes) and self.holes[i][0] == offset + size:
            size += self.holes.pop(i)[1]
        if i and sum(self.holes[i - 1]) == offset:
            i -= 1
            offset, before = self.holes.pop(i)
            size += before
        self.holes.insert(i, (offset, size))


def replay(events, allocate, free):
    where = {}
    for session, name, nbytes in events:
        if nbytes is None:
            free(where.pop(name))
        else:
            where[name] = allocate(session, nbytes)


def pool(capacity, sessions):
    made = Pool(capacity)
    for s in range(sessions):
        made.open(str(s))
    return made


def peak_of(events):
    live, now, most = {}, 0, 0
    for _, name, nbytes in events:
        if nbytes is None:
            now -= live.pop(name)
        else:
            live[name] = nbytes
            now += nbytes
            most = max(most, now)
    return most


def bench_cost(allocations):
    """CPU us per allocation, and per allocation with its free; less the loop around them."""
    events = [(str(s), name, nbytes) for s, name, nbytes in tenants(SESSIONS, allocations)]

    def cost(allocate, free):
        started = time.process_time()
        replay(events, allocate, free)
        return time.process_time() - started

    number = iter(range(1 << 60))
    loop = min(cost(lambda session, nbytes: next(number), lambda block: None) for _ in range(2))
    p = pool(1 << 36, SESSIONS)
    both = cost(p.allocate, p.free) - loop

    p, times = pool(1 << 36, SESSIONS), []
    clock, allocate = time.perf_counter_ns, p.allocate

    def timed(session, nbytes):
        started = clock()
        offset = allocate(session, nbytes)
        times.append(clock() - started)
        return offset

    replay(events, timed, p.free)
    times.sort()
    yield row("allocation, median", "us", times[len(times) // 2] / 1e3, None, 5)
    yield row("allocation, 99th percentile", "us", times[len(times) * 99 // 100] / 1e3, None, None)
    yield row("allocation and free", "us", both / allocations * 1e6, None, 5)


def bench_fragmentation(allocations):
    """Share of the memory that the trace needs in all which is not asked for at the worst moment."""
    for sessions in (1, SESSIONS):
        events = [(str(s), name, nbytes) for s, name, nbytes in tenants(sessions, allocations)]
        peak = peak_of(events)
        p, heap = pool(1 << 40, sessions), FirstFit()
        replay(events, p.allocate, p.free)
        replay(events, lambda session, nbytes, heap=heap: heap.allocate(nbytes), heap.free)
        facts = p.facts()
        who = f"{sessions} session" + "s" * (sessions > 1)
        yield row(
            f"lost to rounding and holes, {who}", "%", 100 - 100 * peak / facts.high, 100 - 100 * peak / heap.high, 10
        )
        yield row(f"of it rounding, {who}", "%", 100 - 100 * facts.requested / facts.held, None, None)
        tight = pool(int(peak / 0.9), sessions)
        replay(events, tight.allocate, tight.free)  # raises if it does not fit


BENCHES = {"cost": bench_cost, "fragmentation": bench_fragmentation}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=BENCHES)
    parser.add_argument("--allocations", type=int, default=1_000_000)
    args = parser.parse_args()
    rows = []
    for name, bench in BENCHES.items():
        if args.only in (None, name):
            rows += bench(args.allocations)
    if args.json:
        print(json.dumps(rows))
        return
    columns = ("name", "unit", "ours", "baseline", "ratio", "goal", "ok")
    table = Table(*columns)
    for r in rows:
        table.add_row(*["" if r[k] is None else str(r[k]) for k in columns])
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
