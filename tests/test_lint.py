"""`make lint` refuses every construct in our source that executes bytes as code."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFUSED = [
    ("import pickle", ""),
    ("pickle.loads(b'')", "S301"),
    ("pickle.Unpickler(open('x', 'rb')).load()", "S301"),
    ("import marshal", "TID251"),
    ("marshal.loads(b'')", "S302"),
    ("import dill", "TID251"),
    ("import cloudpickle", "TID251"),
    ("import shelve", "TID251"),
    ("eval('1')", "S307"),
    ("exec('1')", "S102"),
    ("import torch", ""),
    ("torch.load('x', weights_only=False)", "TID251"),
]


@pytest.mark.parametrize(
    "folder", ["libs/wis/src", "services/router/src", "deploy/local/src", "bench", "examples", "docs"]
)
def test_lint_refuses_code_that_executes_bytes(folder):
    told = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename", f"{folder}/x.py", "-"],
        input="\n".join(line for line, _ in REFUSED), capture_output=True, text=True, cwd=ROOT,
    ).stdout  # fmt: skip
    for number, (line, rule) in enumerate(REFUSED, 1):
        found = [one for one in told.splitlines() if f"x.py:{number}:" in one]
        assert not rule or any(f" {rule} " in one for one in found), (line, told)


def test_lint_exceptions_give_a_reason():
    listed = subprocess.run(
        ["git", "grep", "-nE", "noqa: (S102|S301|S302|S307|TID251)", "--", "*.py"],
        capture_output=True, text=True, cwd=ROOT,
    ).stdout.splitlines()  # fmt: skip
    outside = [line for line in listed if "tests/" not in line.split(":")[0]]
    assert all("  # weights only" in line for line in outside), outside
    assert all(line.partition("noqa: ")[2].count("#") == 1 for line in listed if "tests/test_lint.py" not in line), (
        listed
    )
