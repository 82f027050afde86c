"""Many tenants on one device, through the whole stack: nats-server, executor, a client process per tenant, real models.

A P0 inference loop runs alone, then beside one and four P4 tenants that train without a pause. Then two tenants train with equal
weights, and with 3:1. Everything is repeated with frames in order of arrival (FIFO).

Latencies are wall times in the client. Shares are device times from the dispatch journal, which is replayed and audited after
each measurement. The available time for background work is the time that P0, alone, leaves of the device thread: its kernels, and
the executor's work around them. Needs two idle cores, one of them for the device. The trainers' clients only get cores that
nothing else uses (SCHED_IDLE), because real clients have their own machines.

Run: .venv/bin/python bench/sharing.py [--json] [--seconds N] [--only latency|shares]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

from figures import row, show

os.environ.setdefault("OMP_NUM_THREADS", "1")

import nats
from wooly_bus import contracts
from wooly_bus.errors import BusError
from wooly_bus.rpc import ControlClient
from wooly_dispatch.decisions import LaunchDecision
from wooly_dispatch.events import LaunchDoneEvent
from wooly_dispatch.invariants import Auditor
from wooly_dispatch.journal import Batch, Replayer
from wooly_testkit.nats import nats_server
from wooly_wis.messages import (
    CloseSessionRequest,
    HostSessionRequest,
    SessionPolicy,
)

TOKEN = "bench"
#: Warm-up runs, after which every program has its edges and its final form.
WARM = 40
#: Number of steps after which a trainer reads its loss, as training loops do. Its queue is empty then, so there is no contention.
LOOK = 100
#: Number of turns of each kind of work in a measurement of latencies.
ROUNDS = 6
#: Time between two requests of the P0 client, as a multiple of the time of one request alone.
PAUSE = 1.0


# -- a tenant's process ----------------------------------------------------------------------------------------------


def infer():
    """One request: 24 layers, and reading a number."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(24) for m in (nn.Linear(384, 384), nn.ReLU())]).to("cuda")
    x = torch.randn(64, 384).to("cuda")

    def run():
        with torch.no_grad():
            return model(x)[0, 0].item()

    return run


def train():
    """One step: forward, backward, SGD of six layers. A kernel takes at most a twentieth of a request's time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.ReLU())]).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(96, 256).to("cuda"), torch.randn(96, 256).to("cuda")

    def run():
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return run


def tenant(role, endpoint, session_id):
    """Attach and warm up. For each line `seconds` on standard input, work for that time and answer with a line of JSON."""
    import torch
    from wooly import api

    torch.set_num_threads(1)
    if role == "train":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    api.attach([endpoint], session_id, TOKEN)
    api.install_facade()
    run = {"infer": infer, "train": train}[role]()
    for _ in range(WARM):
        run()
    torch.cuda.synchronize()
    if role == "infer":
        began = time.perf_counter()
        for _ in range(20):
            run()
        pause = PAUSE * (time.perf_counter() - began) / 20
    print("ready", flush=True)
    for line in sys.stdin:
        asked = time.perf_counter()
        until = asked + float(line)
        times, steps = [], 0
        while time.perf_counter() < until:
            if role == "infer":
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
                time.sleep(pause)
            else:
                loss = run()
                steps += 1
                if steps % LOOK == 0:
                    loss.item()
        torch.cuda.synchronize()  # wait until no work is left, so that it does not count in the next measurement
        print(json.dumps({"times": times, "steps": steps, "seconds": time.perf_counter() - asked}), flush=True)
    os._exit(0)


# -- the stack -------------------------------------------------------------------------------------------------------


class Journals:
    """Receives an executor's journal from NATS, replays and audits it, and returns the device time per session."""

    def __init__(self, url):
        self.done, self.entries, self.violations = [], 0, 0
        self._replayers, self._auditors, self._launches = {}, {}, {}
        self._received = deque()
        self._url, self._ended = url, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), daemon=True)
        self._thread.start()

    async def _listen(self):
        client = await nats.connect(self._url)
        await client.subscribe(contracts.EXECUTOR_DISPATCH_JOURNALED.pattern, cb=self._keep)
        while not self._ended.is_set():
            await asyncio.sleep(0.05)
        await client.close()

    async def _keep(self, message):
        self._received.append(message.data)

    def take(self):
        """Replay and audit all received batches."""
        while self._received:
            self._replay(Batch.decode(self._received.popleft()))

    def _replay(self, batch):
        replayer = self._replayers.setdefault(batch.journal, Replayer(batch.journal))
        auditor = self._auditors.setdefault(batch.journal, Auditor(raises=False))
        for event, decisions in replayer.replay(batch):
            auditor.audit(event, decisions, replayer.state.windows)
            self.entries += 1
            for decision in decisions:
                if isinstance(decision, LaunchDecision):
                    self._launches[decision.launch] = decision.session
            if isinstance(event, LaunchDoneEvent):
                self.done.append((event.at, self._launches.pop(event.launch), event.gpu_ns))
        self.violations = sum(len(a.violations) for a in self._auditors.values())

    def device_ns(self, begin, end):
        """Return the device time per session between two times of the monotonic clock."""
        self.take()
        found = {}
        for at, session, ns in list(self.done):
            if begin <= at < end:
                found[session] = found.get(session, 0) + ns
        return found

    def close(self):
        self._ended.set()
        self._thread.join(10)
        self.take()


class Stack:
    """A nats-server and an executor. Tenants come and go."""

    def __init__(self, url, directory, dispatch):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WOOLY_EXECUTOR_")} | {
            "WOOLY_EXECUTOR_NATS_URL": url,
            "WOOLY_EXECUTOR_ID": "bench",
            "WOOLY_EXECUTOR_STATE_DIR": str(directory),
            "WOOLY_EXECUTOR_DISPATCH": dispatch,
            "OMP_NUM_THREADS": "1",
        }
        self.journals = Journals(url)
        log = (Path(directory) / "executor.log").open("wb")
        self._executor = subprocess.Popen([sys.executable, "-m", "wooly_executor"], env=environment, stderr=log)
        self._control = ControlClient(url)
        self._count = 0

    def ask(self, rpc, message):
        deadline = time.monotonic() + 60
        while True:
            try:
                return self._control.request(rpc.at("bench"), message)
            except BusError:
                if time.monotonic() > deadline or self._executor.poll() is not None:
                    raise
                time.sleep(0.1)

    @contextlib.contextmanager
    def tenants(self, *wanted):
        """Start a process for each (role, policy), and warm it up. Yields them as (session id, process)."""
        found = []
        try:
            for role, policy in wanted:
                self._count += 1
                name = f"{role}-{self._count}"
                request = HostSessionRequest(
                    session_id=name, token=TOKEN, tenant=name, priority=policy.priority, policy=policy, lease_s=3600
                )
                reply = self.ask(contracts.EXECUTOR_SESSION_OPEN, request)
                argv = [sys.executable, __file__, "--tenant", role, reply.endpoints[0], name]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                found.append((name, subprocess.Popen(argv, text=True, **pipes)))
            for name, process in found:
                if process.stdout.readline() != "ready\n":
                    raise RuntimeError(f"{name} did not start")
            yield found
        finally:
            for name, process in found:
                process.kill()
                process.wait()
                with contextlib.suppress(BusError):
                    self.ask(contracts.EXECUTOR_SESSION_CLOSE, CloseSessionRequest(session_id=name))

    def work(self, tenants, seconds):
        """Let all tenants work at the same time. Returns their reports, the device time per session in the middle part, and its
        length.

        Also stores in `occupied` the share of the time in which the executor's busiest thread ran.
        """
        began, before = time.monotonic_ns(), self._thread_times()
        for _, process in tenants:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        found = {name: json.loads(process.stdout.readline()) for name, process in tenants}
        used = [ns - before.get(thread, 0) for thread, ns in self._thread_times().items()]
        self.occupied = max(used) / (time.monotonic_ns() - began)
        time.sleep(0.5)  # wait for the journal
        margin = int(0.1 * seconds * 1e9)
        begin, end = began + margin, began + int(seconds * 1e9) - margin
        return found, self.journals.device_ns(begin, end), end - begin

    def _thread_times(self):
        """Return the CPU time of the executor's threads, in ns."""
        tasks = Path(f"/proc/{self._executor.pid}/task").iterdir()
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}

    def close(self):
        self._executor.terminate()
        self._executor.wait()
        self._control.close()
        time.sleep(0.2)
        self.journals.close()


# -- measurements ----------------------------------------------------------------------------------------------------


def percentile(times, share):
    times = sorted(times)
    return times[min(int(share * len(times)), len(times) - 1)]


def service_of(stack, seconds):
    """Return the device time of a P0 request, in ns."""
    with stack.tenants(("infer", SessionPolicy(priority=0))) as tenants:
        reports, device, span = stack.work(tenants, seconds)
    return int(device[tenants[0][0]] / (len(reports[tenants[0][0]]["times"]) * span / (seconds * 1e9)))


def latency(stack, seconds, dispatch):
    """Return P0's latencies alone and beside 1 and 4 trainers in ms, the trainers' steps per second alone and beside P0, and the
    occupation of the device.

    All tenants exist all the time and work in turns, so that other work of the machine affects all of them equally.
    """
    service_ns = service_of(stack, 2.0) if dispatch == "fair" else 0
    # A token bucket that is never empty: the measurement is about P0, not about policing.
    policy = SessionPolicy(priority=0, service_ns=service_ns, rate_permille=1000, burst_ns=10**9)
    p4, times, rates, occupied = SessionPolicy(priority=4), {0: [], 1: [], 4: []}, {}, []
    with stack.tenants(("infer", policy), *[("train", p4)] * 4) as tenants:
        for _ in range(ROUNDS):
            for others in ("alone", 0, 1, 4):
                working = tenants[1:2] if others == "alone" else tenants[: 1 + others]
                reports, _, _ = stack.work(working, seconds / ROUNDS)
                trainers = [r for r in reports.values() if r["steps"]]
                rates.setdefault(others, []).append(sum(r["steps"] / r["seconds"] for r in trainers))
                if others != "alone":
                    times[others] += reports[tenants[0][0]]["times"]
                if others == 0:
                    occupied.append(stack.occupied)
    found = {"steps alone": statistics.fmean(rates["alone"])}
    for others, taken in times.items():
        found[others] = {
            "requests": len(taken),
            "p50": percentile(taken, 0.5) * 1e3,
            "p99": percentile(taken, 0.99) * 1e3,
            "occupied": statistics.fmean(occupied),
            "steps": statistics.fmean(rates[others]),
        }
    return found


def shares(stack, seconds, weights):
    """Return the share of each of two training tenants in the steps and in the device time of both."""
    with stack.tenants(*[("train", SessionPolicy(priority=3, weight=w)) for w in weights]) as tenants:
        reports, device, _ = stack.work(tenants, seconds)
    steps = [reports[name]["steps"] for name, _ in tenants]
    times = [device.get(name, 0) for name, _ in tenants]
    return [s / sum(steps) for s in steps], [t / max(sum(times), 1) for t in times]


def measure(seconds, only):
    found = {}
    for dispatch in ("fair", "fifo"):
        with nats_server() as url, tempfile.TemporaryDirectory(prefix="wooly-sharing-") as directory:
            stack = Stack(url, directory, dispatch)
            try:
                mine = found[dispatch] = {}
                if only != "shares":
                    mine["latency"] = latency(stack, seconds, dispatch)
                if only != "latency":
                    mine["shares"] = {w: shares(stack, seconds, w) for w in ((1, 1), (3, 1))}
            finally:
                stack.close()
            mine["entries"], mine["violations"] = stack.journals.entries, stack.journals.violations
    return found


def rows_of(found):
    rows = []
    if "latency" in found["fair"]:
        alone = found["fair"]["latency"][0]
        for dispatch, label in (("fair", ""), ("fifo", ", FIFO")):
            mine = found[dispatch]["latency"]
            for others in (1, 4):
                for part, goal in (("p50", None), ("p99", 1.10)):
                    name = f"P0 {part} beside {others} training{label}"
                    rows.append(row(name, "ms", mine[others][part], alone[part], None if label else goal))
                requests = mine[others]["requests"] / mine[0]["requests"]
                rest = mine["steps alone"] * (1 - mine[0]["occupied"] * requests)
                name = f"steps of {others} trainers beside P0, against the remaining time{label}"
                goal = None if label else 0.9
                rows.append(row(name, "1/s", mine[others]["steps"], rest, goal, higher_is_better=True))
    if "shares" in found["fair"]:
        for weights in ((1, 1), (3, 1)):
            due = weights[0] / sum(weights)
            (steps, times), (fifo, _) = found["fair"]["shares"][weights], found["fifo"]["shares"][weights]
            name = f"share error {weights[0]}:{weights[1]}"
            error, theirs = (100 * abs(part[0] - due) for part in (times, fifo))
            rows.append(row(f"{name}, device time (baseline: FIFO)", "%", error, theirs, 2, against="value"))
            rows.append(row(f"{name}, steps", "%", 100 * abs(steps[0] - due), theirs, None, against="value"))
    entries, violations = (sum(f[k] for f in found.values()) for k in ("entries", "violations"))
    rows.append(row("journal entries replayed identically", "", entries, entries, 1.0, higher_is_better=True))
    rows.append(row("violated laws", "", violations, None, 0, against="value"))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement")
    parser.add_argument("--only", choices=("latency", "shares"))
    parser.add_argument("--tenant", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tenant:
        tenant(*args.tenant)
    rows = rows_of(measure(args.seconds, args.only))
    show(rows, args.json)


if __name__ == "__main__":
    main()
