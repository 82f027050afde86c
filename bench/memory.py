"""Measures what device memory costs, wastes and saves.

- *cost*, *fragmentation*: the cost of an allocation, and the lost memory, for several sessions with the recorded trace of two
  trainings. The measure is CPU time of this process, so that other processes do not matter. The baselines of the lost memory are
  a first-fit heap without size classes, and the rules of PyTorch's caching allocator (which never gives segments back).
- *lora*: sessions that train adapters on one base model, through the whole stack: used memory, and the second load against the
  first.
- *overcommit*: bursty sessions whose memory is 150 % of the device's, against a device on which all fit.
- *swap*: bytes per second from and to the device, against a plain copy between two places that were used before.

Run: .venv/bin/python bench/memory.py [--json] [--only NAME] [--allocations N]
"""

import argparse
import bisect
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import figures

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wooly_executor.memory.pool import Pool
from wooly_executor.memory.swap import Place
from wooly_executor.mover import Loading, LoadJob, Mover, SaveJob, Saving
from wooly_executor.swap_space import Pages, SwapSpace
from wooly_local.stack import start_stack
from wooly_testkit.traces import tenants

MIB = 1 << 20
SESSIONS = 8

row = functools.partial(figures.row, against="value")


class FirstFit:
    """A heap that takes the lowest hole that fits, and merges free neighbours."""

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


class Caching:
    """The rules of PyTorch's CUDA caching allocator, for one process.

    Blocks are multiples of 512 B. Segments have 2 MiB for blocks up to 1 MiB, 20 MiB for blocks up to 10 MiB, and otherwise the
    size rounded up to 2 MiB. Cached blocks are chosen by best fit, and split if enough is left.
    """

    def __init__(self):
        self.high = 0
        self.free_blocks = {True: [], False: []}  # small pool, large pool: sorted (bytes, segment, offset)
        self.blocks = {}  # (segment, offset) -> [bytes, previous offset, next offset, free, small]
        self.segments = 0

    def allocate(self, nbytes):
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        pool = self.free_blocks[small]
        at = bisect.bisect_left(pool, (size,))
        if at < len(pool):
            found, segment, offset = pool.pop(at)
        else:
            found = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segment, offset = self.segments, 0
            self.segments += 1
            self.high += found
            self.blocks[segment, 0] = [found, None, None, False, small]
        block = self.blocks[segment, offset]
        block[3] = False
        left = found - size
        if left >= 512 if small else left > MIB:
            rest = offset + size
            self.blocks[segment, rest] = [left, offset, block[2], True, small]
            if block[2] is not None:
                self.blocks[segment, block[2]][1] = rest
            block[0], block[2] = size, rest
            bisect.insort(pool, (left, segment, rest))
        return segment, offset

    def free(self, key):
        segment, offset = key
        block = self.blocks[key]
        pool = self.free_blocks[block[4]]
        after = block[2]
        if after is not None and self.blocks[segment, after][3]:
            other = self.blocks.pop((segment, after))
            pool.remove((other[0], segment, after))
            block[0], block[2] = block[0] + other[0], other[2]
            if other[2] is not None:
                self.blocks[segment, other[2]][1] = offset
        before = block[1]
        if before is not None and self.blocks[segment, before][3]:
            other = self.blocks[segment, before]
            pool.remove((other[0], segment, before))
            del self.blocks[key]
            other[0], other[2] = other[0] + block[0], block[2]
            if block[2] is not None:
                self.blocks[segment, block[2]][1] = before
            block, offset = other, before
        block[3] = True
        bisect.insort(pool, (block[0], segment, offset))


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
    """CPU time in us per allocation, and per allocation with its free, without the loop around them."""
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
    """Share of the needed memory that is lost at the worst moment of the trace."""
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
        yield row(f"lost to rounding alone, {who}", "%", 100 - 100 * facts.requested / facts.held, None, None)
        cached = [Caching() for _ in range(sessions)]  # one process for each session, as without Wooly

        def allocate(session, nbytes, cached=cached):
            return int(session), cached[int(session)].allocate(nbytes)

        replay(events, allocate, lambda block, cached=cached: cached[block[0]].free(block[1]))
        reserved = sum(c.high for c in cached)
        yield row(
            f"memory needed, {who}, against PyTorch's caching",
            "MiB",
            facts.high / MIB,
            reserved / MIB,
            1,
            against="ratio",
        )
        tight = pool(int(peak / 0.9), sessions)
        replay(events, tight.allocate, tight.free)  # raises if the trace does not fit


# -- whole stacks ----------------------------------------------------------------------------------------------------

#: A client that executes standard input, a line of Python at a time, and prints the value of `out`.
WORK = """
import json, sys, time, torch
from torch import nn
from wooly import api
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    out = None
    exec(json.loads(line))
    print(json.dumps(out), flush=True)
"""


@contextlib.contextmanager
def stack(**executor):
    """A local stack whose executor has these settings."""
    before = dict(os.environ)
    os.environ.update({f"WOOLY_EXECUTOR_{k}": str(v) for k, v in executor.items()})
    with tempfile.TemporaryDirectory() as folder:
        try:
            running = start_stack(Path(folder))
        finally:
            os.environ.clear()
            os.environ.update(before)
        try:
            yield running
        finally:
            running.stop()


class Client:
    def __init__(self, stack, folder, number, **settings):
        path = Path(folder) / f"{number}.py"
        path.write_text(WORK)
        env = os.environ | stack.client_env | {f"WOOLYAI_{k}": str(v) for k, v in settings.items()}
        argv = [sys.executable, "-m", "wooly", "run", "-q", str(path)]
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("a client process ended before it was ready")

    def tell(self, code):
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def do(self, code):
        self.tell(code)
        return self.hear()

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def memory(stack):
    env = os.environ | stack.client_env
    argv = [sys.executable, "-m", "wooly", "nodes", "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["nodes"][0]["memory"]


LAYERS, WIDTH, RANK, TENANTS = 24, 1024, 8, 4
LOAD = f"""
torch.manual_seed(0)
base = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})]).requires_grad_(False)
torch.zeros(1, device="cuda").item()
sent, began = api.session_stats()["bytes_sent"], time.perf_counter()
base.to("cuda")
torch.cuda.synchronize()
out = [time.perf_counter() - began, api.session_stats()["bytes_sent"] - sent]
"""
TRAIN = f"""
down = [nn.Parameter(torch.randn({WIDTH}, {RANK}, device="cuda") * 0.01) for _ in base]
up = [nn.Parameter(torch.zeros({RANK}, {WIDTH}, device="cuda")) for _ in base]
optimizer = torch.optim.Adam(down + up)
x = torch.randn(8, {WIDTH}, device="cuda")
for _ in range(3):
    h = x
    for layer, a, b in zip(base, down, up):
        h = torch.tanh(layer(h) + h @ a @ b)
    loss = h.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss.item()
del h, loss
torch.cuda.synchronize()
out = torch.cuda.memory_allocated()
"""


def bench_lora(allocations):
    """Sessions that train adapters on one base model."""
    base = LAYERS * WIDTH * WIDTH * 4
    with stack(MEMORY=1 << 30, RESERVE=0) as running, tempfile.TemporaryDirectory() as folder:
        clients, loads, private = [], [], []
        try:
            for n in range(TENANTS):
                clients.append(Client(running, folder, n, DEDUP="tenant", TENANT="acme"))
                loads.append(clients[-1].do(LOAD))
                while clients[-1].do("out = api.attached_links()[0].stats()['sealing']"):
                    time.sleep(0.05)
            private = [client.do(TRAIN) - base for client in clients]
            time.sleep(2.5)  # wait for the next heartbeat
            found = memory(running)
        finally:
            for client in clients:
                client.end()
    used, alone = found["own"] + found["contents"], TENANTS * base + sum(private)
    wanted = base + sum(private)
    yield row(
        f"{TENANTS} LoRA sessions over one base, against base + private parts",
        "MiB",
        used / MIB,
        wanted / MIB,
        1.02,
        against="ratio",
    )
    yield row(f"{TENANTS} LoRA sessions over one base, against copies", "MiB", used / MIB, alone / MIB, None)
    seconds = statistics.median([s for s, _ in loads[1:]])
    sent = max(n for _, n in loads[1:])
    yield row("second load, bytes sent", "MiB", sent / MIB, loads[0][1] / MIB, 0.01, against="ratio")
    yield row("second load, time", "s", seconds, loads[0][0], None)


BURSTS, STATE = 6, 48 * MIB
BURSTY = f"""
def burst():
    began = time.perf_counter()
    for _ in range(20):
        y = (w @ w).mul_(1e-3)
    total = state.add_(1)[0].item() + y[0, 0].item()
    return time.perf_counter() - began
torch.manual_seed(0)
w = torch.randn(512, 512).to("cuda")
state = torch.zeros({STATE} // 4, device="cuda")
burst()
"""
RUN = f"""
times = []
for _ in range({BURSTS}):
    times.append(burst())
    time.sleep(pause)
assert state[5].item() == {BURSTS} + 1
out = times
"""


def bursts(capacity, percent):
    """Return the seconds for all bursts of three sessions, the times of single bursts, the swaps per tenant, and the executor's
    log of victims.
    """
    settings = {"MEMORY": capacity, "RESERVE": 0, "LARGE_ALLOCATION": MIB, "SWAP_IDLE_S": 0.1}
    env = {"CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT": str(percent)}
    os.environ.update(env)
    with stack(**settings) as running, tempfile.TemporaryDirectory() as folder:
        clients = []
        try:
            for n, priority in enumerate((0, 2, 2)):
                client = Client(running, folder, n, PRIORITY=priority, REQUIRED_VRAM=STATE + 8 * MIB, TENANT=f"t{n}")
                clients.append(client)
                client.do(BURSTY)
            for n, client in enumerate(clients):
                client.do(f"pause = {0.6 + 0.13 * n}")
            began = time.perf_counter()
            for client in clients:
                client.tell(RUN)
            times = [client.hear() for client in clients]
            took = time.perf_counter() - began
            time.sleep(1.5)
            found = {s["tenant"]: s["swaps"] for s in memory(running)["sessions"]}
            log = "\n".join(path.read_text() for path in Path(running.state_dir).rglob("*executor*.log"))
            choices = re.findall(r"needs memory; victims: (.*); also eligible: (.*)", log)
        finally:
            for name in env:
                os.environ.pop(name, None)
            for client in clients:
                client.end()
    return took, times, found, choices


def bench_overcommit(allocations):
    """Three bursty sessions of 56 MiB each on 112 MiB, and on a device with room for all."""
    tight, times, swaps, choices = bursts(3 * (STATE + 8 * MIB) * 2 // 3, 50)
    roomy, alone, none, _ = bursts(4 * (STATE + 8 * MIB), 0)
    work = 3 * BURSTS
    yield row(
        "bursts per second at 150 %, against a device without overcommit", "1/s", work / tight, work / roomy, None
    )
    yield row("all bursts done", "", sum(map(len, times)), work, 1, against="ratio", higher_is_better=True)
    wronged = sum("(P0)" in left and "(P2)" in others for left, others in choices)
    yield row(
        "sessions chosen as victims", "", sum(left.count("(P") for left, _ in choices), None, 1, higher_is_better=True
    )
    yield row("P0 sessions among them although another one could leave", "", wronged, None, 0)
    yield row("swap-outs of the P0 session", "", swaps.get("t0", 0), None, None)
    yield row("swap-outs of P2 sessions", "", sum(swaps.values()) - swaps.get("t0", 0), None, None)
    yield row("P0's burst, median", "ms", 1e3 * statistics.median(times[0]), 1e3 * statistics.median(alone[0]), None)
    assert not any(none.values())


def bench_swap(allocations):
    """Host memory to the device and back. All memory was used before, as pinned memory and a GPU's memory are."""
    import torch

    blocks, size = 16, 16 * MIB
    source = [torch.ones(size, dtype=torch.uint8) for _ in range(blocks)]
    target = [torch.empty(size, dtype=torch.uint8) for _ in range(blocks)]
    pages = Pages(1 << 40)
    with tempfile.TemporaryDirectory() as folder:
        swap_space, mover = SwapSpace(1 << 40, 1 << 40, Path(folder), pages), Mover()

        def run(job):
            done = threading.Event()
            job.done = lambda job, error: done.set()
            began = time.perf_counter()
            mover.submit(job)
            done.wait()
            return blocks * size / (time.perf_counter() - began) / 1e9

        found = {Place.HOST: ([], []), Place.DISK: ([], [])}
        plain = []
        for _ in range(8):
            for place, (out, back) in found.items():
                file = swap_space.open() if place is Place.DISK else None
                copies = [swap_space.take(place, size, file) for _ in range(blocks)]
                out.append(
                    run(
                        SaveJob(
                            1,
                            None,
                            pieces=[Saving(i, s, c) for i, (s, c) in enumerate(zip(source, copies, strict=True))],
                        )
                    )
                )
                job = LoadJob(1, None, pieces=[Loading(i, c) for i, c in enumerate(copies)], pages=pages)
                back.append(run(job))
                for piece, copy in zip(job.pieces, copies, strict=True):
                    pages.give(piece.target)
                    swap_space.drop(copy)
            began = time.perf_counter()
            for to, at in zip(target, source, strict=True):
                to.copy_(at)
            plain.append(blocks * size / (time.perf_counter() - began) / 1e9)
        mover.stop()
    best = statistics.median(sorted(plain)[-4:])
    for place, (out, back) in found.items():
        goal = 0.8 if place is Place.HOST else None
        name = "host memory" if place is Place.HOST else "disk (page cache)"
        fast = statistics.median(sorted(back)[-4:])
        label = f"swap-in from {name}, against a copy"
        yield row(label, "GB/s", fast, best, goal, against="ratio", higher_is_better=True)
        yield row(f"swap-out to {name}, against a copy", "GB/s", statistics.median(sorted(out)[-4:]), best, None)


BENCHES = {
    "cost": bench_cost,
    "fragmentation": bench_fragmentation,
    "swap": bench_swap,
    "lora": bench_lora,
    "overcommit": bench_overcommit,
}


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
    figures.show(rows, args.json)


if __name__ == "__main__":
    main()
