"""Random programs on the device, compared with the CPU (`programs.py`), and tests of what runs and compares them."""

import importlib
import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
from wooly.kernels.storages import swap_memory
from wooly_testkit import forks
from wooly_testkit.executor import executor_process

FOLDER = Path(__file__).parent
#: Whether the client has its optional native kernels. Environments of other releases (`tests/matrix.py`) do not.
NATIVE = importlib.util.find_spec("wooly_native") is not None
resizes = pytest.mark.skipif(swap_memory is None, reason="the programs resize storages, which needs torch 2.13")


def sweep(seeds, *options, native=True):
    """Run programs in a process of its own. Returns the rows of those that differ, and how many have run."""
    with executor_process(start=forks.Forked) as running:
        where = running.endpoints[0].removeprefix("unix://")
        env = os.environ | {"OMP_NUM_THREADS": "1", "WOOLYAI_NATIVE": "auto" if native else "off"}
        env |= {"WOOLYAI_EXECUTOR_URL": f"unix://{running.token}@{where}"}
        argv = ["--worker", "--seeds", seeds, *options]
        done = forks.run("programs", *argv, like="wooly", cwd=FOLDER, env=env, timeout=570)
        assert done.returncode == 0 and running.process.poll() is None, done.stdout[-500:] + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if "said" in row], sum([row.get("done", 0) for row in rows])


@resizes
@pytest.mark.connected
def test_random_programs_equal_the_cpu():
    """The programs between 20 and 100 are slow, as are those from 1000."""
    differ, done = sweep("0:20", *([] if NATIVE else ["--python"]), native=NATIVE)
    assert not differ and done == 20, differ


@resizes
@pytest.mark.slow
@pytest.mark.connected
@pytest.mark.timeout(600)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("first", [0, *range(1000, 1400, 100)])
def test_many_random_programs_equal_the_cpu(native, first):
    """A hundred at a time: with a load of 14 on two cores, they take 160 seconds, and a process may take ten minutes."""
    if native and not NATIVE:
        pytest.skip("wooly-native is not installed")
    differ, done = sweep(f"{first}:{first + 100}", *([] if native else ["--python"]), native=native)
    assert not differ and done == 100, differ


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("program_runs")


PROGRAM = [
    "t1 = R(1, 3, 4)",
    "t2 = t1[1:]",
    ["for k in range(3):\n    BODY", ["t2.add_(k)", "see(t1.sum().item())"]],
    "t3 = t2 @ t1",
    "t4 = t2.view(torch.int32)",
]


@pytest.mark.parametrize(
    ("at", "other", "said"),
    [
        (0, "t1 = R(2, 3, 4)", "see"),
        (0, "t1 = R(1, 3, 4, dtype=torch.float64)", "t1: float64"),
        (0, "t1 = R(1, 4, 3).mT", "(1, 3)"),
        (0, "t1 = R(1, 3, 4).requires_grad_()", "requires_grad"),
        (1, "t2 = t1[1:].clone()", "t2: float32 (2, 4) (4, 1) 0 t2"),
        (1, "t2 = t1[:2]", "t2: float32 (2, 4) (4, 1) 0 t1"),
        (2, ["for k in range(2):\n    BODY", ["t2.add_(k)", "see(t1.sum().item())"]], "changes 2"),
        (3, "t3 = t2.mT @ t1", "mat1 and mat2 shapes cannot be multiplied (4x2"),
        (4, "t4 = t2.view(torch.int64)", "t4"),
    ],
)
def test_difference_of_two_programs_is_found(runs, at, other, said):
    right = runs.execute(PROGRAM, "cpu", looks=True)
    wrong = runs.execute([*PROGRAM[:at], other, *PROGRAM[at + 1 :]], "cpu", looks=True)
    assert runs.difference(runs.execute(PROGRAM, "cpu", looks=True), right) == ""
    assert said in runs.difference(wrong, right)


def test_program_that_differs_is_made_shorter(runs):
    """It differs if t2 shares memory with t1 and is written twice."""

    def differs(steps):
        found = runs.execute(steps, "cpu", looks=True)[-3:]
        return any("t2: float32 (2, 4) (4, 1) 4 t1 16 changes" in str(entry) for entry in found) and "t2.add_" in str(
            steps
        )

    assert runs.shorter(PROGRAM, differs, time.monotonic() + 60) == ["t1 = R(1, 3, 4)", "t2 = t1[1:]", "t2.add_(k)"]


def test_script_of_a_program_shows_what_the_program_shows(runs, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(runs.script(PROGRAM, "an example"))
    done = forks.run("program", "cpu", like="wooly", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = [entry[2] for entry in runs.execute(PROGRAM, "cpu", looks=False) if entry[1] == "see"]
    assert done.stdout.split("\n")[: len(seen)] == [str(value) for value in seen] and "device='cuda" not in done.stdout


@pytest.mark.parametrize(
    "step", ["t1 = t1[order(5, 3)[:2]]", "t2 //= (2 - k)", "torch._foreach_add_([t1, t2], [t1, t1[k:]])"]
)
def test_step_whose_error_depends_on_the_device_is_removed(runs, step):
    """Each raises in the second or third turn of the loop."""
    steps = ["t1 = R(1, 3)", "t2 = t1.long()", ["for k in range(3):\n    BODY", [step, "see(t1)"]]]
    assert runs.without_loose_errors(steps, runs.execute(steps, "cpu", looks=False))
    assert step not in str(steps) and not runs.without_loose_errors(steps, runs.execute(steps, "cpu", looks=False))
