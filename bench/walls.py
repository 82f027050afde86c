"""Measures how an attacker affects an urgent tenant (P0) on the same device, by sending requests that are expensive to receive.

A client of class P0 requests one small run after another, and measures the time of each answer. A client of class P2 sends one
of:

    definitions   programs of 16,000 new forms and 32,000 instructions, without a pause, which it never runs
    operands      programs whose forms have 8,192 operands each
    small         programs of 20 instructions, as many as the connection transports
    sources       texts of kernels, 1 MiB each
    reads         reads of 64 KiB whose answers it receives
    unread        reads of 64 KiB whose answers it does not receive

Three sides run in turn, so that other work of the machine affects all of them: P0 alone, beside the attacker, and beside an
attacker of another executor on the same machine. The goal limits the 99th percentile beside the attacker, as a multiple of that
alone. The spread is over the rounds. The third side shows the influence of the machine: if clients and executors share few cores,
two processes that exchange 64 KiB make an unrelated third process three times slower.

Run: .venv/bin/python bench/walls.py [--json] [--rounds N] [--seconds N] [--only KIND]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from figures import row, show

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wooly_bus.channel import ChannelClient, ChannelError, Endpoint
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Source, encode_source
from wooly_wis.frames import PROTOCOL, READ_HEAD, Kind, pack_json, pack_run
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

KINDS = ("definitions", "operands", "small", "sources", "reads", "unread")
TOKEN = "bench"
GOAL = 1.5
#: Size of the matrices that P0 multiplies, and number of products per run.
SIDE, LAYERS = 128, 40
#: Time between two requests of P0, in seconds.
PAUSE_S = 0.002
#: Maximum number of an attacker's sessions, one after another, because the executor ends a session with too many unread answers.
SESSIONS = 64
F32 = 4


# -- programs --------------------------------------------------------------------------------------------------------


def flat(n):
    return View(DType.F32, (n,), (1,), 0)


def alloc(nbytes):
    return Form("alloc", (Operand(Role.OUT, View(DType.U8, (nbytes,), (1,), 0)),))


def call(name, operands, args):
    return Form("extern", operands, (), (("args", args), ("kwargs", ()), ("name", name)))


def request():
    """P0's run: a chain of products. Buffers: the first matrix, then the results; the last one is read."""
    v = View(DType.F32, (SIDE, SIDE), (SIDE, 1), 0)
    operands = (Operand(Role.IN, v), Operand(Role.IN, v), Operand(Role.OUT, v))
    forms = (alloc(SIDE * SIDE * F32), call("aten.mm.default", operands, (OperandRef(0), OperandRef(1))))
    body = [Instruction(0, (0,))]
    for k in range(LAYERS):
        body += [Instruction(0, (k + 1,)), Instruction(1, (k, k, k + 1))]
    return encode_program(Program(forms, tuple(body)))


def many(forms, first):
    """A program with this number of new forms, each used twice."""
    found = [alloc(1 << 30)]
    body = [Instruction(0, (0,)), Instruction(0, (1,))]
    for k in range(forms):
        v = flat(first + k + 1)
        operands = (Operand(Role.IN, v), Operand(Role.IN, v), Operand(Role.INOUT, v))
        found.append(call("aten.add_.Tensor", operands[2:] + operands[:1], (OperandRef(0), OperandRef(1))))
        body += [Instruction(k + 1, (0, 1))] * 2
    return encode_program(Program(tuple(found), tuple(body)))


def wide(forms, first, operands=8192):
    """A program whose forms have very many operands."""
    found = [alloc(1 << 24)]
    body = [Instruction(0, (0,))]
    for k in range(forms):
        given = tuple([Operand(Role.IN, flat(first + k * operands + j + 1)) for j in range(operands - 1)])
        listed = tuple([OperandRef(j) for j in range(operands - 1)])
        found.append(call("aten.cat.default", (*given, Operand(Role.OUT, None)), (listed, 0)))
        body.append(Instruction(k + 1, (*[0] * (operands - 1), k + 1)))
    return encode_program(Program(tuple(found), tuple(body)))


# -- the executor ----------------------------------------------------------------------------------------------------


def serve(path, runtime):
    """One device with sessions for all clients."""
    import torch
    from wooly_bus.channel.token import SharedPass
    from wooly_dispatch.events import Policy
    from wooly_executor.app import make_runtime
    from wooly_executor.collector import Collector
    from wooly_executor.device_loop import DeviceLoop

    torch.set_num_threads(1)
    loop = DeviceLoop(make_runtime(runtime), 4 << 30, collector=Collector())
    loop.sessions.open("p0", SharedPass(TOKEN), None, Policy(priority=0), "alice")
    for kind in KINDS:
        for number in range(SESSIONS):
            loop.sessions.open(f"{kind} {number}", SharedPass(TOKEN), None, Policy(priority=2), "bob")
    loop.listen(Endpoint.parse(f"unix://{path}"))
    print("ready", flush=True)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    sys.stdin.read()
    loop.stop()
    thread.join(10)


# -- clients ---------------------------------------------------------------------------------------------------------


def attach(path, session):
    client = ChannelClient.connect(Endpoint.parse(f"unix://{path}"))
    client.send(Kind.HELLO, pack_json({"protocol": PROTOCOL, "session_id": session, "token": TOKEN}))
    assert client.recv(60).kind == Kind.WELCOME
    return client


def attack(path, kind):
    """Work while the last line on standard input is 1."""
    on = threading.Event()

    def listen():
        for line in sys.stdin:
            (on.set if line.strip() == "1" else on.clear)()
        os._exit(0)

    prepared = []
    if kind == "definitions":
        prepared = [many(16_000, 16_000 * k) for k in range(5)]
    elif kind == "operands":
        prepared = [wide(10, 100_000 * k) for k in range(5)]
    print("ready", flush=True)
    threading.Thread(target=listen, daemon=True).start()
    for session in range(SESSIONS):
        client = attach(path, f"{kind} {session}")
        with contextlib.suppress(ChannelError):
            attack_once(client, kind, prepared, on)
    raise SystemExit(f"the executor ended {SESSIONS} sessions")


def attack_once(client, kind, prepared, on):
    """Work in one session until the executor ends it."""
    if kind in ("reads", "unread"):
        raw = encode_program(Program((alloc(1 << 20),), (Instruction(0, (0,)),)))
        client.send(Kind.DEFINE, raw)
        client.send(Kind.RUN, pack_run(digest(raw), [1], b"", []))
    into, number = memoryview(bytearray(64 << 10)), 0
    while on.wait():
        number += 1
        if prepared:  # different programs each time: the executor has forgotten their forms by the time they repeat
            client.send(Kind.DEFINE, prepared[number % len(prepared)])
            client.send(Kind.SYNC)
            with contextlib.suppress(TimeoutError):
                client.recv(120)
        elif kind == "small":
            client.send(Kind.DEFINE, many(10, 10 * number))
        elif kind == "sources":
            client.send(Kind.SOURCE, encode_source(Source("ttir", f"{number:8d} é" * ((1 << 20) // 12 - 8))))
        else:
            client.send(Kind.READ, READ_HEAD.pack(1, 0, 64 << 10))
            if kind == "reads" and number > 8:
                client.recv_data(into, Kind.DATA)


class Hurried:
    """The client of class P0."""

    def __init__(self, path):
        self.client = attach(path, "p0")
        raw = request()
        self.client.send(Kind.DEFINE, raw)
        self._name, self._ids = digest(raw), list(range(1, LAYERS + 2))
        self._into = memoryview(bytearray(F32))
        for _ in range(100):
            self.once()

    def once(self):
        begun = time.perf_counter()
        self.client.send(Kind.RUN, pack_run(self._name, self._ids, b"", []))
        self.client.send(Kind.READ, READ_HEAD.pack(self._ids[-1], 0, F32))
        other = self.client.recv_data(self._into, Kind.DATA)
        assert other is None, bytes(other.payload)
        took = time.perf_counter() - begun
        self.client.send(Kind.RUN, pack_run(self._empty(), [], b"", self._ids))
        return took

    def _empty(self):
        if not hasattr(self, "_none"):
            raw = encode_program(Program((), ()))
            self.client.send(Kind.DEFINE, raw)
            self._none = digest(raw)
        return self._none

    def during(self, seconds):
        until, times = time.perf_counter() + seconds, []
        while time.perf_counter() < until:
            times.append(self.once())
            time.sleep(PAUSE_S)
        return times


def p99(times):
    return sorted(times)[len(times) * 99 // 100]


def spawn(*arguments):
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def measure(hurried, path, other, kind, rounds, seconds):
    attackers = [spawn("--attack", kind, "--path", p) for p in (other, path)]
    sides, ratios = ([], [], []), []
    try:
        for _ in range(rounds):
            turn = []
            for side in range(3):  # alone, attacker at the other executor, attacker at this executor
                for k, attacker in enumerate(attackers, 1):
                    attacker.stdin.write(f"{int(k == side)}\n")
                    attacker.stdin.flush()
                time.sleep(0.3)
                turn.append(hurried.during(seconds))
            for side, times in zip(sides, turn, strict=True):
                side.extend(times)
            ratios.append(p99(turn[2]) / p99(turn[0]))
    finally:
        for attacker in attackers:
            attacker.kill()
            attacker.wait()
    alone, elsewhere, beside = sides
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    return [
        row(f"P0, p99 beside {kind}", "ms", p99(beside) * 1e3, p99(alone) * 1e3, GOAL, spread=spread),
        row(f"P0, p99 beside {kind} at another executor", "ms", p99(elsewhere) * 1e3, p99(alone) * 1e3, None),
        row(f"P0, median beside {kind}", "ms", statistics.median(beside) * 1e3, statistics.median(alone) * 1e3, None),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--runtime", default="torch_cpu")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.path, args.runtime)
        return
    if args.attack:
        attack(args.path, args.attack)
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="wooly-") as folder:
        path, other = (str(Path(folder) / name) for name in ("x.sock", "other.sock"))
        executors = [spawn("--serve", "--path", p, "--runtime", args.runtime) for p in (path, other)]
        try:
            hurried = Hurried(path)
            for kind in KINDS if args.only is None else (args.only,):
                rows += measure(hurried, path, other, kind, args.rounds, args.seconds)
                if not args.json:
                    print(json.dumps(rows[-3]), file=sys.stderr)
        finally:
            for executor in executors:
                executor.kill()
                executor.wait()
    show(rows, args.json, title="Latency of P0 beside an attacker", baseline="alone")


if __name__ == "__main__":
    main()
