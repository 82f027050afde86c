"""A training step on the tests' fake GPU is replayed as graphs, with the same results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def trained(*options):
    """The calls of the last steps, and a digest of the parameters. In a process of its own, whose GPU is the fake one."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WOOLYAI_", "WOOLY_", "COV_", "PYTEST_"))}
    argv = [sys.executable, "-m", "tests.costs.training", "--json", "--steps", "80", *options]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_training_steps_become_graphs_with_the_same_parameters():
    ours, plain = trained(), trained("--no-graphs")
    assert ours["parameters"] == plain["parameters"]
    calls = ours["calls"]
    assert calls["outside"] < 0.2 * calls["in graphs"], calls  # with inputs that stray, nine tenths were outside
    assert "in graphs" not in plain["calls"]
