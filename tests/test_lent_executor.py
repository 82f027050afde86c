"""A client that starts a stack for itself forks the executor, which ends with the client and with the supervisor."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from wooly_local import processes

pytestmark = pytest.mark.skipif(not processes.can_lend(), reason="this system has no pidfds")
#: The process that forks is not the process of the tests, which has threads. It waits until its standard input is closed.
LENDER = """
import sys
from pathlib import Path
from wooly_local.processes import fork_lent
print(fork_lent(Path("paper")), flush=True)
sys.stdin.read()
"""
SERVICE = """
import os, sys, time
print("started", os.environ["WOOLY_TEST"], sys.argv, os.getsid(0) == os.getpid(), len(os.listdir("/proc/self/fd")), flush=True)
{rest}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lender():
    return subprocess.Popen([sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def lend(folder, rest):
    (folder / "lent_service.py").write_text(SERVICE.format(rest=rest))
    return processes.Lent(folder / "paper", "lent_service", {"WOOLY_TEST": "x"}, folder / "log", "test")


def forked(lent, client):
    pid = int(client.stdout.readline())
    assert lent.poll() is None and lent.pid == pid
    return pid


def test_lent_service_runs_with_its_environment_and_log(folder):
    lent = lend(folder, "")
    assert lent.poll() is None and lent.pid == 0
    lent.terminate()  # nothing to end yet
    with lender() as client:
        lent_pid = int(client.stdout.readline())
        assert lent.wait(60) == 0 and lent.pid in (0, lent_pid)
    assert (folder / "log").read_text().startswith(f"started x ['{folder}/lent_service.py'] True ")


def test_lent_service_is_ended_by_the_supervisor(folder):
    lent = lend(folder, "time.sleep(600)")
    with lender() as client:
        forked(lent, client)
        with pytest.raises(subprocess.TimeoutExpired):
            lent.wait(0.01)
        lent.terminate()
        assert lent.wait(60) == 0 and lent.poll() == 0


def test_lent_service_ends_with_its_client(folder):
    lent = lend(folder, "time.sleep(600)")
    with lender() as client:
        forked(lent, client)
        client.kill()
    assert lent.wait(60) == 0


def test_lent_service_ends_with_its_supervisor(folder):
    lent = lend(folder, "time.sleep(600)")
    paper = Path("paper")
    supervisor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    paper.write_text(json.dumps(json.loads(paper.read_text()) | {"supervisor": supervisor.pid}))
    with lender() as client:
        forked(lent, client)
        supervisor.kill()
        assert lent.wait(60) == 0
        supervisor.communicate()


def test_service_that_was_lent_is_restarted_by_its_supervisor(folder):
    (folder / "lent_service.py").write_text(SERVICE.format(rest="time.sleep(600)"))
    code = """
import time
from pathlib import Path
from wooly_local.processes import Service
service = Service("test", "lent_service", {}, Path("log"))
service.lend(Path("paper"), {"WOOLY_TEST": "x"})
while not service.pid:
    time.sleep(0.01)
print(service.pid, flush=True)
while service.pid is not None:
    time.sleep(0.01)
service.env["WOOLY_TEST"] = "again"
while not service.keep_alive(time.monotonic()):
    time.sleep(0.01)
while not Path("log").exists() or "again" not in Path("log").read_text():
    time.sleep(0.01)
service.stop()
print(service.pid, flush=True)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        while not Path("paper").exists():
            assert supervisor.poll() is None
        with lender() as client:
            pid = int(supervisor.stdout.readline())
            os.kill(pid, signal.SIGKILL)
            assert supervisor.stdout.readline() == b"None\n"
            client.kill()
    finally:
        supervisor.kill()
        supervisor.communicate()


def test_paper_of_a_stack_that_does_not_lend_is_an_error(folder):
    with pytest.raises(FileNotFoundError):
        processes.fork_lent(Path("paper"))
