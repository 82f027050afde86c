"""The check for real GPUs, tested without a GPU: the truth is the CPU, and CUDA's known answers."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.connected
HERE = Path(__file__).parent

#: Python runs this first in every process of a check: the executor multiplies wrongly, and the client crashes at neg(float32).
SABOTAGE = """
import sys

argv = sys.orig_argv
if "wooly_executor" in argv:
    import warnings
    warnings.simplefilter("ignore")
    import torch
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda a, b: ((a[:, :, None] * b).sum(1) * 1.01).to(a.dtype), "CPU")
if any(a.endswith("worker.py") for a in argv) and "ours" in argv:
    import os
    import torch
    neg = torch.neg
    torch.neg = lambda t: os.abort() if t.dtype is torch.float32 else neg(t)
"""


def check(*options, path=(), folder):
    """(exit status, output, the JSON)."""
    file = folder / "found.json"
    paths = [*map(str, path), str(HERE.parent / "conformance"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "check.py"), "--truth", "cpu", "--jobs", "2", "--json", str(file), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)},
    )
    found = json.loads(file.read_text()) if file.exists() else None
    return done.returncode, done.stdout + done.stderr, found


def processes_with(folder):
    """Command lines of the processes that have a folder in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found


def only(*patterns):
    return [word for pattern in patterns for word in ("--only", pattern)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_check_with_equal_cases_passes(tmp_path):
    options = ["operators", "facade", "--samples", "2", *only("add", "softmax*", "linalg.svd")]
    status, said, found = check(*options, *only("device", "memory", "streams", "random", "files"), folder=tmp_path)
    assert status == 0, said
    rows = {row["section"]: row for row in found["rows"]}
    assert rows["operators"]["cases"] > 20 and rows["facade"]["cases"] > 30
    assert all(row["same"] + row["close"] == row["cases"] for row in rows.values()), said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_check_reports_wrong_numbers_and_crashes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    options = ["operators", "--samples", "1", *only("add", "mm", "neg")]
    status, said, found = check(*options, path=[tmp_path], folder=tmp_path)
    assert status == 1, said
    outcomes = {d["case"]: d["outcome"] for d in found["differences"]}
    assert outcomes.pop("mm/float32/0") == "values"
    assert outcomes.pop("neg/float32/0") == "crash"
    assert {case.split("/")[0] for case in outcomes} <= {"mm"}  # other cases are right, even after the crash
    (row,) = found["rows"]
    assert row["different"] == len(found["differences"]) and row["same"] >= 5
    assert "operators:mm/float32/0 values: result: differs by up to" in said
    assert "operators:neg/float32/0 crash: ours: ended by signal 6" in said
    assert said.splitlines()[-2] == "DIFFERENT"
    assert processes_with(tmp_path) == []  # the crashed process's executor does not stay


def test_list_is_sorted_and_every_line_has_a_reason():
    lines = [line for line in (HERE / "differences.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    for line in lines:
        unit, _, reason = line.partition(": ")
        truth, where, outcome = unit.split(" ", 1)[0], *unit.split(" ", 1)[1].rsplit(" ", 1)
        assert truth in ("any", "cpu", "cuda") and ":" in where and outcome and reason.strip(), line


def test_check_script_names_missing_parts(tmp_path):
    def said(*options, **environment):
        done = subprocess.run(
            [str(HERE / "run.sh"), *options], capture_output=True, text=True, env=os.environ | environment
        )
        return done.returncode, done.stderr

    assert said("--wheels", str(tmp_path), "--truth", "cpu") == (
        2,
        f"gpu check: there are no wheels in {tmp_path}: collect them with 'make gpu-wheels' on a machine with a network\n",
    )
    assert said("--python", "/no/such/python")[0] == 2
    status, text = said("--python", sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 2 and "--truth cpu" in text
    assert said("--truth", "tpu") == (2, "gpu check: --truth must be cuda or cpu, not 'tpu'\n")


@pytest.mark.slow
def test_speed_rows_of_kernels_work_without_gpu(tmp_path, monkeypatch):
    """In CUDA C, on the CPU's runtime. Only the runtime and Triton differ on a GPU."""
    pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    for folder in (HERE.parents[1] / "services" / "compiler" / "tests" / "kernels", HERE):
        monkeypatch.syspath_prepend(str(folder))
    import foreign
    import runtime
    import torch
    from wooly_executor.runtime.opencl import OpenClRuntime

    gpu = object.__new__(runtime.Gpu)
    gpu.runtime, gpu.device = OpenClRuntime(tmp_path), torch.device("cpu")
    with torch.inference_mode():
        assert foreign.check(gpu, ("histogram, CUDA C", "reduction, CUDA C")) == []
        foreign.time_limit(gpu)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_check_of_all_cases_has_only_listed_differences(tmp_path):
    status, said, found = check(folder=tmp_path)
    assert status == 0, said
    assert len(found["rows"]) == 7
