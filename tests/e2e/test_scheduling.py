"""The scheduler in a real stack: it audits a real executor, admits, refuses and steers sessions, dies and restarts."""

import contextlib
import json
import os
import signal
import subprocess
import time

import pytest
from wooly_bus import contracts
from wooly_bus.errors import BusError
from wooly_local.stack import read_stack
from wooly_testkit import forks
from wooly_testkit.control import ask
from wooly_testkit.forks import Forked
from wooly_wis.messages import GpusRequest

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
WORK = """
import sys, torch
x = torch.ones(8, 8, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(5):
        x = torch.tanh(x @ x)
        x.sum().item()
    print("done", flush=True)
"""


def wooly(stack, *arguments):
    env = os.environ | stack.client_env
    return forks.run("wooly", *arguments, env=env, timeout=60)


def gpu(stack):
    """The scheduler's state of the device, if the scheduler answers."""
    with contextlib.suppress(BusError):
        found = ask(stack, contracts.SCHEDULER_GPU_LIST, GpusRequest()).gpus
        return found[0].model_dump(mode="json") if found else None


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
    return found


class Tenant:
    """A script that works on command."""

    def __init__(self, stack, path, **settings):
        path.write_text(WORK)
        env = os.environ | stack.client_env | {f"WOOLYAI_{k}": v for k, v in settings.items()}
        self.process = Forked(
            "wooly",
            "run",
            "-q",
            str(path),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self):
        return self.process.stdout.readline() == "ready\n"

    def work(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "done\n"

    def end(self):
        return self.process.communicate(timeout=60)


def test_scheduler_admits_refuses_steers_audits_and_may_die(stack, tmp_path):
    declared = {"SERVICE_MS": "50", "INTERVAL_MS": "1000", "PRIORITY": "0"}
    first = Tenant(stack, tmp_path / "a.py", TENANT="acme", LATENCY_OBJECTIVE_MS="90", **declared)
    training = Tenant(stack, tmp_path / "b.py", TENANT="blue", PRIORITY="3", WEIGHT="2")
    try:
        assert first.ready() and training.ready() and first.work() and training.work()

        def both():
            found = gpu(stack)
            sessions = {s["tenant"]: s for s in found["sessions"]} if found else {}
            return sessions if {"acme", "blue"} <= sessions.keys() and sessions["blue"]["programs"] > 5 else None

        sessions = until(both)
        assert sessions["acme"]["policy"]["objective_ns"] == 90_000_000
        assert (sessions["acme"]["policy"]["rate_permille"], sessions["acme"]["policy"]["burst_ns"]) == (
            55,
            100_000_000,
        )
        (shown,) = json.loads(wooly(stack, "top", "--json").stdout)["gpus"]
        assert {s["session_id"] for s in shown["sessions"]} == {s["session_id"] for s in sessions.values()}
        assert (sessions["blue"]["policy"]["priority"], sessions["blue"]["policy"]["weight"]) == (3, 2)

        _, refused = Tenant(stack, tmp_path / "c.py", TENANT="late", LATENCY_OBJECTIVE_MS="200", **declared).end()
        assert (
            "refuses: not admitted: GPU local-0: P0 session" in refused and "beyond its objective of 90 ms" in refused
        )

        name = sessions["blue"]["session_id"]
        done = wooly(stack, "tasks", "priority", name, "4", "--weight", "7")
        assert (done.returncode, done.stdout) == (0, f"session {name}: P4, weight 7\n")
        assert "suspended" in wooly(stack, "tasks", "suspend", name).stdout
        assert "suspended" not in wooly(stack, "tasks", "resume", name).stdout
        assert training.work()

        until(lambda: gpu(stack)["age_s"] > 1)
        before = gpu(stack)
        old = read_stack(stack.state_dir).services["scheduler"]
        os.kill(old, signal.SIGKILL)
        assert first.work() and training.work(), "the executor continues with the last policy"
        until(lambda: read_stack(stack.state_dir).services.get("scheduler") not in (None, old))
        after = until(lambda: (found := gpu(stack)) and found["entries"] > before["entries"] and found)
        assert (after["violations"], after["lost"], after["journal"]) == (0, "", before["journal"])
        kept = {s["tenant"]: s for s in after["sessions"]}
        assert kept["acme"]["programs"] >= sessions["acme"]["programs"] and kept["blue"]["policy"]["weight"] == 7
        assert all(s["unjust_ns"] == 0 for s in after["sessions"])
    finally:
        first.end()
        training.end()
    assert first.process.returncode == training.process.returncode == 0
