"""The tool that searches for harmful calls: what it detects, and a small sample of the calls that it tries."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wooly_executor.runtime import lowering, prepared
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.runtime.torch_private import zero_fill

HERE = Path(__file__).parent / "hostile"
sys.path.insert(0, str(HERE))
import guarded  # noqa: E402
import programs  # noqa: E402
import repeated  # noqa: E402
import unwritten  # noqa: E402
from lawful import Lawful, by_hand  # noqa: E402
from patterns import junk  # noqa: E402
from trial import Trials  # noqa: E402

sys.path.remove(str(HERE))

guards = pytest.mark.skipif(
    guarded.compiler() is None or os.uname().machine != "x86_64" or sys.platform != "linux",
    reason="guarded memory needs a C compiler, and Linux on x86-64",
)
#: Code that touches a block of 12 bytes, the exit status of its process, and the report.
DEEDS = {
    "ctypes.string_at(at, 13)": (guarded.FAULT, "reads byte 12 of a block of 12 bytes"),
    "ctypes.memset(at + 12, 0, 1)": (guarded.FAULT, "writes byte 12 of a block of 12 bytes"),
    "guard.read_only(at); ctypes.memset(at, 0, 1)": (guarded.FAULT, "writes byte 0 of a locked block of 12 bytes"),
    "del t; ctypes.string_at(at, 1)": (guarded.FAULT, "reads byte 0 of a freed block of 12 bytes"),
    "ctypes.string_at(8, 1)": (guarded.FAULT, "reads at a null pointer"),
}
#: Code whose access is allowed, and code whose access is only detected when the block is freed. The status is the number of
#: changed bytes.
FINE = "ctypes.memset(at, 0, 12); del t; os._exit(guard.take_spoilt())"
BESIDE = "ctypes.memset(at - 3, 0, 15); del t; os._exit(guard.take_spoilt())"
SCRIPT = """
import ctypes, json, mmap, os, sys
sys.path.insert(0, {folder!r})
import torch
from guarded import Guard
found = {{}}
for deed in {deeds!r}:
    report = mmap.mmap(-1, 4096)
    if not os.fork():
        guard = Guard(memoryview(report)[:512])
        with guard.armed(4):
            t = torch.empty(12, dtype=torch.uint8)
        at = t.data_ptr()
        exec(deed)
        os._exit(0)
    found[deed] = os.waitstatus_to_exitcode(os.wait()[1]), report[:512].rstrip(bytes(1)).decode()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return guarded.build(tmp_path_factory.mktemp("guarded"))


@pytest.fixture(scope="module")
def outcomes(library):
    """Status and report of each piece of code, run in a fork of one process with guarded memory."""
    script = SCRIPT.format(folder=str(HERE), deeds=[*DEEDS, FINE, BESIDE])
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return {deed: tuple(found) for deed, found in json.loads(done.stdout).items()}


@guards
def test_guarded_memory_illegal_access_is_reported(outcomes):
    assert {deed: outcomes[deed] for deed in DEEDS} == DEEDS


@guards
def test_guarded_memory_block_in_bounds_passes_and_changed_neighbour_bytes_are_counted(outcomes):
    assert outcomes[FINE] == (0, "") and outcomes[BESIDE] == (3, "")


@guards
@pytest.mark.slow
def test_fuzz_small_sample_does_no_harm(tmp_path):
    names = ("_embedding_bag", "segment_reduce", "_fused_sgd", "lstm", "_foreach_norm", "nll_loss", "lcm", "gather")
    command = [
        sys.executable,
        str(HERE / "fuzz.py"),
        "--quick",
        "--out",
        str(tmp_path),
        "--calls",
        "150",
        "--workers",
        "2",
    ]
    done = subprocess.run([*command, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 operators did harm" in done.stdout


@guards
@pytest.mark.slow
def test_fuzz_programs_on_two_threads_do_no_harm(tmp_path):
    command = [
        sys.executable,
        str(HERE / "fuzz.py"),
        "--out",
        str(tmp_path),
        "--programs",
        "30",
        "--threads",
        "2",
        "--workers",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 jobs of programs did harm" in done.stdout


# -- programs that run again and again ---------------------------------------------------------------------------------------


@pytest.fixture
def trials(tmp_path):
    before = torch.get_num_threads(), prepared.STRETCH_OFTEN
    torch.set_num_threads(2)
    yield repeated.Repeated(None, "", tmp_path)
    torch.set_num_threads(before[0])
    prepared.STRETCH_OFTEN = before[1]


def test_programs_have_the_same_results_when_they_are_hot(trials):
    fine = sum(not trials.said(programs.case("test", k)) for k in range(12))
    assert fine > 4


def test_program_with_another_result_when_it_is_hot_is_found(trials, monkeypatch):
    case = next(c for c in (programs.case("test", k) for k in range(100)) if c.repeatable and not trials.said(c))
    run = trials._run

    def wrong(*args):
        failed, error, left = run(*args)
        slot, (content, dtype) = next((s, v) for s, v in left.items() if v[0])
        return failed, error, left | ({slot: (bytes([content[0] ^ 1]) + content[1:], dtype)} if args[-1] == 4 else {})

    monkeypatch.setattr(trials, "_run", wrong)
    with pytest.raises(AssertionError, match="run 5 differs from run 1: slot"):
        trials.said(case)


def test_programs_are_the_same_for_the_same_seed():
    assert programs.text(programs.case("test", 3)) == programs.text(programs.case("test", 3))
    assert programs.text(programs.case("test", 3)) != programs.text(programs.case("other", 3))


# -- results that show the previous content of memory ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers():
    """Lawful calls of layers, optimisers and other operators with several results."""
    lawful = Lawful()
    by_hand(lawful)
    return [(name, call) for name, calls in lawful.calls.items() for call in calls]


def dependent(layers):
    """Operators whose results differ between memory of zeros and memory of junk."""
    runtime, found = TorchCpuRuntime(), []
    for fill in (zeros, junk):
        with fill():
            left = []
            trials = Trials(runtime, left=left.append)
            each = []
            for _, call in layers:
                torch.manual_seed(0)
                left.clear()
                each.append((trials.said(call), b"".join(left)))
            found.append(each)
    assert sum(not said for said, _ in found[0]) > len(layers) // 2
    return {name for (name, _), one, other in zip(layers, *found, strict=True) if one != other}


@contextlib.contextmanager
def zeros():
    zero_fill.value = True
    try:
        yield
    finally:
        zero_fill.value = False


def test_layers_results_do_not_depend_on_new_memory(layers):
    assert dependent(layers) == set()


def test_unwritten_without_zeroing_finds_dependent_results(layers, monkeypatch):
    monkeypatch.setattr(lowering, "fills_results", lambda *_, **__: True)  # turns the zeroing off
    assert dependent(layers) >= {"aten._ctc_loss.default", "aten.mkldnn_rnn_layer.default"}


def test_unwritten_compares_errors_and_bytes():
    same, other, ended = ["", "a"], ["", "b"], [unwritten.ENDED, ""]
    assert unwritten.compared([[same, same, ["no", ""]], [same, other, ["no", ""]]]) == (2, [1])
    assert unwritten.compared([[same, ended], [ended, ended]]) == (
        0,
        [],
    )  # the other pass examines calls that end a process


@pytest.mark.slow
def test_unwritten_processes_with_different_patterns_are_compared(tmp_path):
    command = [sys.executable, str(HERE / "unwritten.py"), "--quick", "--out", str(tmp_path), "--calls", "4"]
    names = ("_ctc_loss.default", "_embedding_bag.default")
    done = subprocess.run([*command, "--trusting", *names], capture_output=True, text=True)
    assert done.returncode == 1 and "results of 1 operators depend" in done.stdout, done.stdout + done.stderr
