"""A full device queues sessions: real clients wait for their turn, are refused, or leave."""

import os
import signal
import subprocess

import pytest
from wooly_bus import contracts
from wooly_testkit.control import ask
from wooly_testkit.forks import Forked
from wooly_wis.messages import NodesRequest

pytestmark = [pytest.mark.connected, pytest.mark.timeout(240)]
#: Uses a device that no other session may use, until its input ends.
USE = """
import sys, torch
x = torch.ones(3, device="cuda").sum().item()
print("running", x, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(stack, tmp_path):
    """`run(**settings)` starts a client that wants the device for itself."""
    script, started = tmp_path / "use.py", []
    most = ask(stack, contracts.ROUTER_NODE_LIST, NodesRequest()).nodes[0].device.total_memory * 6 // 10
    script.write_text(USE)

    def start(**settings):
        wanted = {"GPU_MODE": "exclusive", "REQUIRED_VRAM": str(most)} | settings
        own = {f"WOOLYAI_{k}": v for k, v in wanted.items()}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(
            Forked("wooly", "run", "-q", str(script), env=os.environ | stack.client_env | own, text=True, **pipes)
        )
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            each.kill()
        each.wait(30)
        for pipe in (each.stdin, each.stdout, each.stderr):
            pipe.close()


def tasks(stack, state):
    return stack.request("GET", f"tasks?state={state}")["tasks"]


def queue(stack):
    """The tasks that wait. Sessions of earlier tests whose clients were killed are pending, too, and wait for nothing."""
    return [t for t in tasks(stack, "pending") if t["reason"].startswith("waits")]


def test_session_on_full_device_waits_says_its_place_and_runs_when_its_turn_comes(stack, run):
    first = run()
    assert first.stdout.readline() == "running 3.0\n"
    second = run()
    line = second.stderr.readline()
    assert "place 1 of 1 in the queue" in line and "is held exclusively by another session" in line
    (waiting,) = queue(stack)
    assert waiting["name"].endswith("use.py") and waiting["reason"].startswith("waits: place 1 of 1")
    refused = run(QUEUE_S="0")
    assert refused.wait(60) != 0 and "is held exclusively" in refused.stderr.read()
    gone = run()
    assert "place 2 of 2" in gone.stderr.readline()
    gone.send_signal(signal.SIGINT)
    assert gone.wait(60) != 0 and [t["task_id"] for t in queue(stack)] == [waiting["task_id"]]
    first.stdin.close()
    assert second.stdout.readline() == "running 3.0\n"
    second.stdin.close()
    assert (first.wait(60), second.wait(60)) == (0, 0)
