"""The text of kernels for NVIDIA runs on the host under sanitizers, and has the interpreter's bits.

AddressSanitizer sees accesses outside of arrays and of shared memory, UndefinedBehaviorSanitizer sees overflow and bad shifts,
ThreadSanitizer sees a missing barrier.
"""

import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from wooly_compiler.pipeline import compile_program
from wooly_testkit import kernel_interpreter
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder
from wooly_wis.kernel.ir import walk
from wooly_wis.plan import LibraryStep
from wooly_wis.program import Role

from services.compiler.tests import test_rendering
from services.compiler.tests.conftest import _is_vendors, interpret, same_bits
from services.compiler.tests.host.host_run import HostProgram
from services.compiler.tests.test_plans import tapes

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ is missing; install it with: apt-get install g++"
)
BOTH = "address,undefined"
OTHERS = (test_rendering.pointwise, test_rendering.layer_norm, test_rendering.channels, test_rendering.softmax)


def same_as_the_interpreter(tape, contents, folder, sanitizers=BOTH):
    """Run a tape's kernels on the host and in the interpreter, on the same bytes by slot."""
    plan = compile_program(tape.program()[0], checks=True)
    host, interpreted = ({s: raw.copy() for s, raw in contents.items()} for _ in range(2))
    HostProgram(list(plan.kernels), folder, sanitizers).run_plan(plan, host, tape.params)
    interpret(plan, interpreted, tape.params)
    assert same_bits(host, interpreted)


def random_contents(tape):
    """Random normal numbers for each input of a tape of f32 and bf16, as bytes by slot."""
    program, _ = tape.program()
    plan = compile_program(program, checks=True)
    rng, found = np.random.default_rng(0), {}
    made = {s.slot for s in plan.steps if hasattr(s, "nbytes")}
    for step in plan.steps:
        for a, slot in zip(step.kernel.arrays, step.slots, strict=True) if hasattr(step, "kernel") else ():
            if slot not in made and slot >= 0:
                raw = rng.standard_normal(a.numel, dtype=np.float32)
                found[slot] = (raw.view(np.uint32) >> 16).astype(np.uint16) if a.dtype is DType.BF16 else raw
    return {slot: raw.view(np.uint8) for slot, raw in found.items()}


@pytest.mark.parametrize("sanitizers", [BOTH, pytest.param("thread", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [test_rendering.padded, *[pytest.param(m, marks=pytest.mark.slow) for m in OTHERS]])
def test_kernels_on_the_host_equal_the_interpreter(make, sanitizers, tmp_path):
    tape = make()
    same_as_the_interpreter(tape, random_contents(tape), tmp_path, sanitizers)


@pytest.mark.parametrize("sanitizers", [BOTH, pytest.param("thread", marks=pytest.mark.slow)])
def test_kernel_with_atomics_on_the_host_equals_the_interpreter(sanitizers, tmp_path):
    kernel = test_rendering.histogram()
    x = np.random.default_rng(1).integers(-100, 100, 1000).astype(np.int32)
    expected, y = [0] * 8, np.zeros(8, np.int32)
    kernel_interpreter.run(kernel, {"x": x.tolist(), "y": expected})
    HostProgram([kernel], tmp_path, sanitizers).run(kernel, [x.view(np.uint8), y.view(np.uint8)], [])
    assert y.tolist() == expected


@pytest.mark.slow
@given(tapes())
@settings(
    max_examples=examples(2, 24),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_random_programs_on_the_host_equal_the_interpreter(tmp_path_factory, made):
    tape, inputs = made
    program, slots = tape.program()
    plan = compile_program(program, checks=True)
    if any(isinstance(s, LibraryStep) for s in plan.steps) or any(
        _is_vendors(s) for k in plan.kernels for s in walk(k.body)
    ):
        return
    contents = {slots[x.slot]: v.reshape(-1).view(np.uint8) for x, v in inputs if x.slot in slots}
    same_as_the_interpreter(tape, contents, tmp_path_factory.mktemp("host"))


def past_the_end():
    """A kernel whose text reads one element too many, because its array is made smaller after the laws were checked."""
    k = KernelBuilder("past", (64,))
    x, y = k.array("x", DType.F32, 64), k.array("y", DType.F32, 64, Role.OUT)
    (i,) = k.points
    k.store(y, i, k.load(x, i))
    return k.finish()


def test_access_past_the_end_is_found(tmp_path, monkeypatch):
    """The sanitizers work: a program whose array is too small ends with a report."""
    from services.compiler.tests.host import host_run

    kernel, main = past_the_end(), host_run._main
    monkeypatch.setattr(
        host_run, "_main", lambda kernels: main(kernels).replace("HostArray a0(256)", "HostArray a0(252)")
    )
    program = HostProgram([kernel], tmp_path, BOTH)
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        program.run(kernel, [np.zeros(256, np.uint8) for _ in range(2)], [])


@pytest.mark.slow
def test_missing_barrier_is_found(tmp_path, monkeypatch):
    from services.compiler.tests.host import host_run

    tape, text = test_rendering.softmax(), host_run._in_namespace
    (kernel,) = compile_program(tape.program()[0]).kernels
    monkeypatch.setattr(host_run, "_in_namespace", lambda n, k: text(n, k).replace("__syncthreads();", "", 1))
    program = HostProgram([kernel], tmp_path, "thread")
    with pytest.raises(AssertionError, match="data race"):
        program.run(kernel, [np.zeros(a.numel * a.dtype.itemsize, np.uint8) for a in kernel.arrays], [])
