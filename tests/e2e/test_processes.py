"""Services as forks of their supervisor: each behaves as if `python -m` had started it."""

import subprocess
import sys
import textwrap

import pytest
from wooly_local.supervisor import Supervisor

SERVICE = """
import atexit, os, signal, sys, threading, time

atexit.register(lambda: print("at exit", flush=True))
print(__name__, sys.argv, os.environ["GIVEN"], sys.stdin.read() == "", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
if os.environ["GIVEN"] == "waits":
    while True:
        time.sleep(1)
sys.exit({"a": None, "b": 3, "c": "words"}[os.environ["GIVEN"]])
"""
SUPERVISOR = """
import os, signal, subprocess, sys, time
from pathlib import Path
from wooly_local.processes import Forked, Service, preload

signal.signal(signal.SIGTERM, lambda *_: print("not the fork's", flush=True))
preload(["json", "no_such_module"])
for given in "abc":
    log = Path(f"{given}.log")
    fork = Forked("some_service", {"GIVEN": given}, log, given)
    print(given, fork.wait(20), fork.poll(), log.read_text().split("\\n")[1:-1])
service = Service("waits", "some_service", {"GIVEN": "waits"}, Path("waits.log"))
service.start()
while not Path("waits.log").exists() or "thread" not in Path("waits.log").read_text():
    time.sleep(0.02)
print(Path("waits.log").read_text().splitlines()[0], Path(f"/proc/{service.pid}/comm").read_text().strip())
try:
    service.process.wait(0.05)
except subprocess.TimeoutExpired:
    print("it waits")
service.stop()
print(service.pid, service.process.returncode == -signal.SIGTERM, os.environ.get("GIVEN"))
print(service.keep_alive(time.monotonic()), service.keep_alive(time.monotonic() + 1), service.pid is not None)
service.stop()
"""


def test_forked_service_behaves_like_started_process(tmp_path):
    (tmp_path / "some_service.py").write_text(textwrap.dedent(SERVICE))
    (tmp_path / "supervisor.py").write_text(textwrap.dedent(SUPERVISOR))
    done = subprocess.run(
        [sys.executable, "supervisor.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.PIPE,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "some_service.py"
    assert done.stdout.splitlines() == [
        "a 0 0 ['thread', 'at exit']",
        "b 3 3 ['thread', 'at exit']",
        "c 1 1 ['words', 'thread', 'at exit']",
        f"__main__ ['{path}'] waits True wooly-waits",
        "it waits",
        "None True None",
        "False True True",
    ]


@pytest.mark.parametrize(("ephemeral", "durable"), [(True, "0"), (False, "1")])
def test_databases_have_durability_of_stack(tmp_path, ephemeral, durable):
    supervisor = Supervisor(tmp_path, 1, ephemeral=ephemeral)
    told = supervisor._router(tmp_path).env | supervisor._metering(tmp_path).env
    assert (told["WOOLY_ROUTER_DURABLE"], told["WOOLY_METERING_DURABLE"]) == (durable, durable)


def test_supervisor_outlasts_a_full_disk(tmp_path, monkeypatch, capsys):
    """The stack ended with all its sessions if a service was started again while the disk was full."""
    supervisor = Supervisor(tmp_path, 1)
    crashed, full, written = [True], [True] * 3, []

    class Crashed:
        def keep_alive(self, now):
            return bool(crashed) and crashed.pop()

    class NoMemory:
        def keep_alive(self, now):
            if full:
                full.pop()
                raise OSError("cannot allocate memory")
            return False

    def write_state(state):
        if full:
            full.pop()
            raise OSError("no space left on device")
        written.append(state)
        supervisor.stop()

    supervisor.services = [Crashed(), NoMemory()]
    monkeypatch.setattr(supervisor, "write_state", write_state)
    supervisor.watch(stdin=False)
    assert written == ["ready"] and not full
    assert capsys.readouterr().err.count("cannot allocate memory; trying again") == 1
