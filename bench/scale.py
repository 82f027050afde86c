"""Measures limits of scale: sessions on one executor, executors at one router, jobs in its queue.

`idle`: 1, 10, 100 and 1,000 sessions that do nothing: the executor's memory for each, and how many open per second (over NATS,
channel and hello). `active`: runs per second of 1, 10, 100 and 1,000 sessions with work. `beside`: a session's step (forward,
backward, SGD of a small network, reading the loss) beside 999 idle sessions and alone, in turn on one executor. `heartbeats`: the
share of a core that a router needs for 1,000 simulated executors. `queue`: placement of 10,000 queued jobs.

Run: .venv/bin/python bench/scale.py [--json] [--only NAME[,NAME]] [--sessions N]
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import row, show

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
from wooly_bus import contracts
from wooly_bus.channel import ChannelClient, Endpoint
from wooly_bus.rpc import ControlClient
from wooly_testkit.nats import nats_server
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import PROTOCOL, Kind, pack_json, pack_run
from wooly_wis.messages import (
    CloseSessionRequest,
    DeviceFacts,
    ExecutorHeartbeat,
    HostSessionRequest,
    MemoryState,
)
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

TOKEN = "bench"
EXECUTOR = "scale"
LEASE_S = 3600.0
#: Number of pairs of measurements in `beside`, and of steps in each.
PAIRS, STEPS = 12, 60
#: Duration of the measurements of `active` and `heartbeats`, in seconds.
MEASURE_S = 10.0
EXECUTORS = 1000
QUEUED = 10_000


# -- an executor with a control plane, and sessions on it ----------------------------------------------------------------


class Device:
    """An executor process, and sessions that are opened on it as a router opens them."""

    def __init__(self, folder, nats_url, stack):
        env = os.environ | {
            "WOOLY_EXECUTOR_NATS_URL": nats_url,
            "WOOLY_EXECUTOR_ID": EXECUTOR,
            "WOOLY_EXECUTOR_STATE_DIR": str(folder),
            "WOOLY_EXECUTOR_LISTEN": f"unix://{folder}/x.sock",
            "WOOLY_EXECUTOR_RUNTIME": "torch_cpu",
            "WOOLY_EXECUTOR_MEMORY": str(2 << 30),
        }
        log = stack.enter_context((folder / "log").open("w"))
        self.process = subprocess.Popen([sys.executable, "-m", "wooly_executor"], env=env, stdout=log, stderr=log)
        stack.callback(self.process.wait)
        stack.callback(self.process.terminate)
        self.seen = psutil.Process(self.process.pid)
        self.endpoint = f"unix://{folder}/x.sock"
        self.control = ControlClient(nats_url)
        stack.callback(self.control.close)
        self._made = 0
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(Exception):  # the executor does not answer yet
                self._host("warm", "warm")
                self._close("warm")
                return
            assert time.monotonic() < until, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def _host(self, name, token):
        request = HostSessionRequest(session_id=name, token=token, tenant="bench", priority=2, lease_s=LEASE_S)
        self.control.request(contracts.EXECUTOR_SESSION_OPEN.at(EXECUTOR), request, timeout=30)

    def _close(self, name):
        request = CloseSessionRequest(session_id=name, token=TOKEN)
        self.control.request(contracts.EXECUTOR_SESSION_CLOSE.at(EXECUTOR), request, timeout=30)

    def hosted(self):
        """Open a session without a client, and return its name."""
        self._made += 1
        name = f"s{self._made}"
        self._host(name, TOKEN)
        return name

    def open(self):
        """Open a session with its client's channel."""
        name = self.hosted()
        channel = ChannelClient.connect(Endpoint.parse(self.endpoint))
        channel.send(Kind.HELLO, pack_json({"protocol": PROTOCOL, "session_id": name, "token": TOKEN, "jit": "0"}))
        assert channel.recv(30).kind == Kind.WELCOME
        return channel

    def memory(self):
        return self.seen.memory_full_info().uss


def closed(channels):
    for channel in channels:
        channel.send(Kind.CLOSE)
        channel.close()
    channels.clear()


def bench_idle(device, counts):
    channels, before = [], device.memory()
    for count in counts:
        begun, first = time.perf_counter(), len(channels)
        while len(channels) < count:
            channels.append(device.open())
        took = time.perf_counter() - begun
        yield row(
            f"sessions opened per second, up to {count} sessions", "1/s", (count - first) / took, None, None, digits=0
        )
        kib = (device.memory() - before) / 1024 / count
        yield row(f"memory for each of {count} idle sessions", "KiB", kib, None, None, digits=0)
    cpu = device.seen.cpu_times()
    time.sleep(5)
    used = sum(device.seen.cpu_times()[:2]) - sum(cpu[:2])
    yield row(f"share of a core for {len(channels)} idle sessions", "%", 100 * used / 5, None, None, digits=2)
    closed(channels)


def bench_beside(device, most):
    import torch
    from wooly import api

    torch.set_num_threads(1)
    api.attach([device.endpoint], device.hosted(), TOKEN)
    api.install_facade()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 10, (32,), device="cuda")

    def stretch():
        took = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            took.append(time.perf_counter() - begun)
        return statistics.median(took) * 1e3

    for _ in range(4):
        stretch()
    alone, beside, channels = [], [], []
    for _ in range(PAIRS):
        alone.append(stretch())
        while len(channels) < most:
            channels.append(device.open())
        time.sleep(0.3)
        beside.append(stretch())
        closed(channels)
        time.sleep(0.3)
    ratios = sorted(b / a for a, b in zip(alone, beside, strict=True))
    quartiles = f"{ratios[len(ratios) // 4]:.3f}-{ratios[3 * len(ratios) // 4]:.3f}"
    ours, base = statistics.median(beside), statistics.median(alone)
    yield row(f"step beside {most} idle sessions", "ms", ours, base, 1.05, spread=quartiles)
    api.disable()


def program():
    """x + x of 256 numbers: the program of an active session."""
    v = View(DType.F32, (256,), (1,), 0)
    made = Form("alloc", (Operand(Role.OUT, View(DType.U8, (1024,), (1,), 0)),))
    filled = Form("fill", (Operand(Role.OUT, v),), (), (("value", 1.0),))
    ones = (Operand(Role.IN, v), Operand(Role.IN, v), Operand(Role.OUT, v))
    attrs = (("args", (OperandRef(0), OperandRef(1))), ("kwargs", ()), ("name", "aten.add.Tensor"))
    added = Form("extern", ones, (), attrs)
    freed = Form("free", (Operand(Role.IN, None),))
    body = [Instruction(0, (0,)), Instruction(1, (0,)), Instruction(0, (1,))]
    body += [Instruction(2, (0, 0, 1)), Instruction(3, (0,)), Instruction(3, (1,))]
    return encode_program(Program((made, filled, added, freed), tuple(body)))


def bench_active(device, counts):
    raw, channels, baseline = program(), [], None
    run = pack_run(digest(raw), [1, 2], b"", [], reply=True)
    for count in counts:
        while len(channels) < count:
            channel = device.open()
            channel.send(Kind.DEFINE, raw)
            channels.append(channel)
        for channel in channels:
            channel.send(Kind.RUN, run)
        done, begun = 0, time.perf_counter()
        while (took := time.perf_counter() - begun) < MEASURE_S / 2:
            for channel in channels:  # each session has a running program while others are answered
                frame = channel.recv(30)
                assert frame.kind == Kind.RESULT, bytes(frame.payload)
                channel.send(Kind.RUN, run)
            done += len(channels)
        for channel in channels:
            assert channel.recv(30).kind == Kind.RESULT
        baseline = baseline or done / took
        name = f"runs per second of {count} active sessions, in all"
        yield row(name, "1/s", done / took, baseline, None, digits=2)
    closed(channels)


# -- a router -----------------------------------------------------------------------------------------------------------


async def beat(nats_url, seconds, seen):
    """Publish the heartbeats of all simulated executors, once per second each. Returns the router's CPU time, after a warm-up."""
    import nats
    from wooly_bus.envelope import encode

    client = await nats.connect(nats_url)
    facts = DeviceFacts(name="H100", vendor="nvidia", runtime="cuda", total_memory=80 << 30, cores=132, arch="sm_90")

    def heartbeat(i):
        message = ExecutorHeartbeat(
            executor_id=f"n{i // 8:03}-{i % 8}",
            node=f"n{i // 8:03}",
            pid=1,
            device=facts,
            endpoints=(f"tcp://10.0.0.{i % 250}:7400",),
            sessions=(f"session-{i}",),
            memory_used=i << 20,
            utilization=0.5,
            memory=MemoryState(capacity=80 << 30),
        )
        return encode(message)

    messages = [heartbeat(i) for i in range(EXECUTORS)]
    spent = 0.0
    for second in range(int(seconds) + 5):
        if second == 5:
            spent = sum(seen.cpu_times()[:2])
        begun = time.monotonic()
        for i, (data, headers) in enumerate(messages):
            await client.publish(contracts.EXECUTOR_NODE_HEARTBEAT.subject, data, headers=headers)
            if i % 50 == 49:  # spread over the second, as real heartbeats are
                await asyncio.sleep(max(begun + (i + 1) / EXECUTORS * 0.95 - time.monotonic(), 0))
        await client.flush()
        await asyncio.sleep(max(begun + 1 - time.monotonic(), 0))
    await client.close()
    return sum(seen.cpu_times()[:2]) - spent


def bench_heartbeats():
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats_url = stack.enter_context(nats_server())
        env = os.environ | {
            "WOOLY_ROUTER_NATS_URL": nats_url,
            "WOOLY_ROUTER_STATE_DIR": str(folder),
            "WOOLY_ROUTER_HTTP_PORT": "0",
        }
        log = stack.enter_context((folder / "log").open("w"))
        process = subprocess.Popen([sys.executable, "-m", "wooly_router"], env=env, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        until = time.monotonic() + 60
        while not (folder / "router.port").exists():
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.1)
        spent = asyncio.run(beat(nats_url, MEASURE_S, psutil.Process(process.pid)))
        name = f"share of a core for the heartbeats of {EXECUTORS} executors"
        yield row(name, "%", 100 * spent / MEASURE_S, None, 20.0, digits=1)


def bench_queue():
    """Passes over a queue of 10,000 jobs on a full cluster. A third of the running jobs ends between two passes."""
    import random

    from control import cluster, wants
    from wooly_router.core.placement import Pool
    from wooly_router.core.queue import Waiting, claims_of, plan

    rng = random.Random(5)
    pool, asking = Pool(cluster(125, rng)), wants(rng)
    queue = [Waiting(f"t{i:05}", rng.randrange(5), float(i) / 100, next(asking)) for i in range(QUEUED)]
    placed, spent, running = 0, 0.0, []
    for turn in range(8):
        begun = time.process_time()
        decisions = [(waiting, found) for waiting, found in plan(queue, pool, 1000.0 + turn) if found.gpus]
        spent += time.process_time() - begun
        taken = {waiting.task_id for waiting, _ in decisions}
        running += [claims_of(waiting.want, [g.executor_id for g in found.gpus]) for waiting, found in decisions]
        placed += len(taken)
        queue = [w for w in queue if w.task_id not in taken]
        queue += [
            Waiting(f"u{turn}-{i:05}", rng.randrange(5), 500.0 + i, next(asking)) for i in range(QUEUED - len(queue))
        ]
        for claims in running[: len(running) // 3]:
            for claim in claims:
                pool.release(claim)
        running = running[len(running) // 3 :]
    name = f"placements per second with {QUEUED} queued"
    looked = 8 * QUEUED / spent
    yield row(name, "1/s", placed / spent, None, None, digits=0)
    yield row(
        f"queued jobs examined per second, of {QUEUED}", "1/s", looked, None, 2000, higher_is_better=True, digits=0
    )


BENCHES = ("idle", "beside", "active", "heartbeats", "queue")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--sessions", type=int, default=1000)
    args = parser.parse_args()
    only, rows = args.only.split(","), []
    counts = [n for n in (1, 10, 100, 1000) if n <= args.sessions]
    if {"idle", "beside", "active"} & set(only):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            device = Device(folder, stack.enter_context(nats_server()), stack)
            if "idle" in only:
                rows += bench_idle(device, counts)
            if "active" in only:
                rows += bench_active(device, counts)
            if "beside" in only:
                rows += bench_beside(device, args.sessions - 1)
    if "heartbeats" in only:
        rows += bench_heartbeats()
    if "queue" in only:
        rows += bench_queue()
    show(rows, args.json, title="scale", baseline="alone, or one session")


if __name__ == "__main__":
    main()
