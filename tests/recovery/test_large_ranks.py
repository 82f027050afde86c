"""Ranks of one executor that a loss puts on two: collectives that were sent before must fit into the executors' host memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from wooly_testkit import forks

pytestmark = [pytest.mark.connected, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"
HOST = str(16 << 20)
EXECUTORS = (({"NODE": "node-a", "SESSION_HOST": HOST}, {}), ({"NODE": "node-b", "SESSION_HOST": HOST}, {}))
#: Memory of a rank, and of a session on node-b: two of three fit on a device.
SIZE = {"WOOLYAI_REQUIRED_VRAM": str(400 << 20)}
OCCUPY = "import torch; x = torch.ones(1, device='cuda'); print(x.item(), flush=True); input()"


def test_large_collectives_are_repeated_on_two_executors(cluster, alice):
    env = alice.env() | {"OMP_NUM_THREADS": "1", "PIDS": str(cluster.keeper.pids), "PYTHONPATH": str(SCRIPTS)} | SIZE

    def run(**more):
        argv = [
            "run",
            "--gpus",
            "1",
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(SCRIPTS / "large_ranks.py"),
            "6",
        ]
        cluster.wait(lambda: [n["state"] for n in cluster.rest("GET", "nodes")["nodes"]] == ["active"] * 2)
        done = forks.run("wooly", *argv, env=env | {"WOOLYAI_CHECKPOINT_S": "1000"} | more, timeout=200)
        assert done.returncode == 0, done.stderr + done.stdout
        return sorted(done.stdout.splitlines()), done.stderr

    expected, _ = run(WOOLYAI_RECOVERY="off")
    wooly = [sys.executable, "-m", "wooly", "run", "--quiet", sys.executable, "-c", OCCUPY]
    other = subprocess.Popen(
        wooly, env=env | {"WOOLYAI_NODE": "b"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "1.0\n"
        found, said = run(LOSE="3")
        assert found == expected
        assert "the 2 ranks of this program share one device" in said
        assert "goes on in the executor a" in said and "goes on in the executor b" in said, said
    finally:
        other.communicate("\n", timeout=60)
