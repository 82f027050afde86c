"""Measures the cost of the controller's decisions on simulated nodes.

The measure is CPU time of this process, so that other processes do not matter.

`placements`: tasks come and go on a cluster that is almost full. One in eight needs two devices, one in ten a whole device, and
some need a vendor, a group, or weights that are already on a device. `refused`: requests that no device can meet. `plan`: one
pass over a queue on a full cluster. The baseline examines every device each time.

`traces`: cost of tracing on the fast path: CPU time of the client's thread and of the device loop for a launch of one operation
and the wait for it. One session is traced and untraced in turn, because two sessions or processes differ by more than the cost of
tracing. The ratio is the median of the pairs' ratios, and the spread is their quartiles. Work that happens at most once per
second runs after each measurement.

Run: .venv/bin/python bench/control.py [--json] [--only NAME] [--nodes N]
"""

import argparse
import functools
import os
import random
import statistics
import tempfile
import threading
import time
from collections import deque

import figures
from wooly_router.core.placement import DeviceRequest, Gpu, Pool, cost_of, fits
from wooly_router.core.queue import Waiting, claims_of, plan

GIB = 1 << 30
#: Numbers of devices per node; a repeated number is more frequent.
SIZES = (1, 4, 8, 8)

row = functools.partial(figures.row, higher_is_better=True, against="value", digits=1)


def cluster(nodes, rng):
    gpus = []
    for n in range(nodes):
        vendor, arch, total = rng.choice([("nvidia", "sm_90", 80), ("nvidia", "sm_80", 40), ("amd", "gfx942", 192)])
        groups = frozenset(["research"]) if n % 10 == 0 else frozenset()
        for i in range(rng.choice(SIZES)):
            weights = frozenset([f"w{rng.randrange(100)}"]) if rng.random() < 0.3 else frozenset()
            use = rng.randrange(300)
            gpus.append(
                Gpu(f"n{n:04}-{i}", f"n{n:04}", total * GIB, vendor, arch, groups, 20, "active", use, 0, weights)
            )
    return gpus


def wants(rng):
    while True:
        yield DeviceRequest(
            gpu_count=2 if rng.random() < 1 / 8 else 1,
            required_vram=rng.choice([2, 5, 10, 20, 35]) * GIB,
            exclusive=rng.random() < 0.1,
            swappable=rng.random() < 0.7,
            groups=("research",) if rng.random() < 0.1 else (),
            vendor=rng.choice(["", "", "", "nvidia", "amd"]),
            weights=(f"w{rng.randrange(100)}",) if rng.random() < 0.3 else (),
        )


def scan(pool, want):
    """The baseline: all devices that fit, sorted, without regard to nodes."""
    able = [g for g in pool.gpus() if fits(want, g, pool.load(g.executor_id))]
    able.sort(key=lambda g: (cost_of(g, pool.load(g.executor_id)), g.executor_id))
    return able[: want.gpu_count]


def churn(gpus, choose, seconds, seed=7):
    """Return placements per second while tasks come and go. Initially, each device of the cluster gets three tasks."""
    rng, pool = random.Random(seed), Pool(gpus)
    asking, running = wants(rng), deque()

    def come(choose):
        want = next(asking)
        claims = claims_of(want, [g.executor_id for g in choose(pool, want)])
        for claim in claims:
            pool.claim(claim)
        if claims:
            running.append(claims)
        return bool(claims)

    while len(running) < 2 * len(gpus):
        come(lambda pool, want: pool.place(want).gpus)
    done = asked = 0
    spent, begun = 0, time.process_time_ns()
    while spent < seconds * 1e9:
        for claim in running.popleft():
            pool.release(claim)
        done += come(choose)
        asked += 1
        spent = time.process_time_ns() - begun
    return done / (spent / 1e9), done / asked


def bench_placements(gpus, seconds):
    ours, share = churn(gpus, lambda pool, want: pool.place(want).gpus, seconds)
    theirs, _ = churn(gpus, scan, seconds)
    yield row("placements and releases", "1/s", ours, theirs, 2000)
    yield row("share of arriving tasks that are placed", "%", 100 * share, None, None)


def bench_refused(gpus, seconds):
    pool, n = Pool(gpus), 0
    begun = time.process_time_ns()
    while time.process_time_ns() - begun < seconds * 1e9:
        assert pool.place(DeviceRequest(required_vram=500 * GIB + n)).waits
        n += 1
    yield row("refusals with reasons, all different", "1/s", n / seconds, None, None)


def bench_plan(gpus, seconds):
    rng, pool = random.Random(3), Pool(gpus)
    asking = wants(rng)
    queue = [Waiting(f"t{i:05}", rng.randrange(5), float(i) / 100, next(asking)) for i in range(10_000)]
    begun = time.process_time_ns()
    decisions = plan(queue, pool, 1000.0)
    took = (time.process_time_ns() - begun) / 1e9
    placed = sum(bool(p.gpus) for _, p in decisions)
    yield row(f"queue of {len(queue)}, of which {placed} fit", "tasks/s", len(queue) / took, None, None)


def bench_traces(gpus, seconds, pairs=300, launches=150):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from wooly import api
    from wooly_bus.channel import Endpoint
    from wooly_bus.channel.token import SharedPass
    from wooly_bus.tracing import provider_of
    from wooly_executor.device_loop import DeviceLoop
    from wooly_executor.runtime.torch_cpu import TorchCpuRuntime

    torch.set_num_threads(1)
    trace.set_tracer_provider(provider_of("executor", None, InMemorySpanExporter()))
    with trace.get_tracer("bench").start_as_current_span("session") as span:
        hosted = span.get_span_context()
    with tempfile.TemporaryDirectory(prefix="wooly-traces-") as directory:
        loop = DeviceLoop(TorchCpuRuntime())
        endpoint = loop.listen(Endpoint.parse(f"unix://{directory}/x.sock"))
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        loop.call(lambda: loop.sessions.open("traced", SharedPass("token"), None, hosted=hosted)).result()
        api.attach([str(endpoint)], "traced", "token")
        api.install_facade()
        (session,) = loop.call(loop.sessions.all).result()
        spans, clock = session.spans, time.pthread_getcpuclockid(thread.ident)
        x = torch.ones(64, device="cuda")

        def stretch(kept):
            """CPU time per launch of the loop's thread and this thread, in us."""
            loop.call(lambda: setattr(session, "spans", kept)).result()
            before = time.clock_gettime_ns(clock) + time.thread_time_ns()
            for _ in range(launches):
                x.add_(1)
                torch.cuda.synchronize()
            loop.call(loop.sessions.sample_spans).result()
            return (time.clock_gettime_ns(clock) + time.thread_time_ns() - before) / launches / 1e3

        found = []
        for i in range(pairs):
            kinds = (spans, None)[:: 1 if i % 2 else -1]
            times = {kind is spans: stretch(kind) for kind in kinds}
            found.append((times[True], times[False]))
        loop.call(lambda: setattr(session, "spans", spans)).result()
        api.disable()
        loop.stop()
        thread.join()
    low, middle, high = statistics.quantiles([on / off for on, off in found], n=4)
    on, off = [statistics.median(times) for times in zip(*found, strict=True)]
    made = figures.row("CPU of client and executor per launch, traced", "us", on, off, 1.02)
    yield made | {"ratio": round(middle, 4), "ok": middle <= 1.02, "spread": f"{low:.4f} to {high:.4f}"}


BENCHES = {"placements": bench_placements, "refused": bench_refused, "plan": bench_plan, "traces": bench_traces}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=BENCHES)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time per measurement")
    args = parser.parse_args()
    gpus, rows = cluster(args.nodes, random.Random(1)), []
    for name, bench in BENCHES.items():
        if args.only in (None, name):
            rows += bench(gpus, args.seconds)
    figures.show(rows, args.json, title=f"{args.nodes} nodes, {len(gpus)} devices")


if __name__ == "__main__":
    main()
