"""Builds: all kinds of kernels for every target whose compiler is installed. A failing compiler is an error for one source."""

import functools
import os
import signal
from dataclasses import replace

import pytest
from wooly_compiler.build.targets import TARGETS, target
from wooly_compiler.build.toolchains import missing
from wooly_compiler.build.worker import MAX_SOURCE, BuildWorker, Limits
from wooly_compiler.errors import BuildError
from wooly_compiler.pipeline import compile_program
from wooly_compiler.render.printer import render
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

F32, BF16, F16 = DType.F32, DType.BF16, DType.F16


@pytest.fixture(scope="module")
def worker():
    with BuildWorker(Limits(seconds=100)) as found:
        yield found


@functools.cache
def kernels():
    """A varied set of kernels: pointwise, folds, mixed types, every function of Wooly's own."""
    t = Tape()
    x, w, b = t.input(F32, 64, 96), t.input(F32, 96), t.input(F32, 96)
    m = t.op("mul", x, w)
    s = t.op("add", m, b)
    y = t.op("gelu", s)
    t.free(m, s)
    n, mean, rstd = t.ops("layer_norm", y, (96,), w, b, 1e-5)
    t.free(mean, rstd)
    t.op("softmax", n, -1)
    h, k = t.input(BF16, 7, 5), t.input(F16, 7, 5)
    hk = t.op("mul", h, k)
    e = t.input(F32, 1000)
    for op in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "sin", "cos", "floor", "sqrt"):
        e = t.op(op, e)
    i = t.input(DType.I64, 33)
    t.op("lt", t.op("abs", i), t.copy(i, DType.I32))
    t.op("any", t.op("isnan", hk), (1,))
    w, i, j = t.input(F32, 50, 32), t.input(DType.I64, 12), t.input(DType.I64, 12)
    picked = t.op("embedding", w, i)
    t.op("argmax", t.op("tril", picked, 1), 1)
    t.op("remainder", i, j)
    t.ops("concat", (picked, t.op("neg", picked)), 1)
    columns = t.input(F32, 300, 32)
    t.op("softmax", columns, 0)
    t.op("argmin", columns, 0)
    t.extern(
        "aten.nll_loss_forward.default", columns, t.input(DType.I64, 300), None, 1, 5, results=[(F32, ()), (F32, ())]
    )
    for n in (5000, 64, 3):
        p, g = t.input(F32, n), t.input(F32, n)
        t.op("add", p, g, -0.1, into=p)
    program, _ = t.program()
    return compile_program(program, checks=True).kernels


def vendors_kernels():
    """Kernels with functions of the vendor's. AMD's are in a library that only the device's machine has."""
    t = Tape()
    t.op("pow", t.input(DType.F64, 9), 2.5)
    t.op("div_floor", t.input(F32, 9), 3.5)
    t.op("atan2", t.input(F32, 7), t.input(F32, 7))
    program, _ = t.program()
    return compile_program(program).kernels


#: Slow targets: PoCL takes seconds for all kernels, and the other compilers treat most of these architectures alike.
SLOW_ARCHS = (
    "opencl:cpu",
    "opencl:gpu",
    "cuda:sm_80",
    "cuda:sm_86",
    "cuda:sm_89",
    "cuda:sm_100",
    "hip:gfx90a",
    "hip:gfx1100",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW_ARCHS else ()) for n in TARGETS])
def test_every_kernel_builds_for_every_target(name, worker):
    where = target(name)
    why = missing(where.toolchain)
    if why:
        pytest.skip(why)
    for kernel in (*kernels(), *(vendors_kernels() if where.toolchain != "hip" else ())):
        artifact = worker.build(render(kernel, where.dialect, where.form), where)
        assert len(artifact) > 100


@pytest.mark.parametrize(("name", "which"), [("opencl:cpu", slice(0, None, 6)), ("opencl:gpu", slice(-1, None))])
def test_opencl_build_of_some_kernels_succeeds(name, which, worker):
    """`test_rendering` and `test_plans` build and run kernels of both forms in this process; `make test-all` builds all here."""
    where = target(name)
    for kernel in kernels()[which]:
        assert len(worker.build(render(kernel, where.dialect, where.form), where)) > 100


def test_build_of_invalid_source_raises_the_compilers_message(worker):
    where = target("opencl:cpu")
    (first, *_) = kernels()
    source = render(first, where.dialect, where.form)
    with pytest.raises(BuildError, match="undeclared"):
        worker.build(replace(source, text="kernel void nonsense(undeclared x) { }"), where)
    assert worker.build(source, where)


def test_build_of_too_large_source_is_refused(worker):
    where = target("opencl:cpu")
    (first, *_) = kernels()
    with pytest.raises(BuildError, match="characters"):
        worker.build(replace(render(first, where.dialect, where.form), text=" " * (MAX_SOURCE + 1)), where)


def test_worker_after_a_crash_builds_the_next_source():
    where = target("opencl:cpu")
    (first, *_) = kernels()
    source = render(first, where.dialect, where.form)
    with BuildWorker() as worker:
        worker.build(source, where)
        os.kill(worker._process.pid, signal.SIGSEGV)
        worker._process.wait()
        assert worker.build(source, where)  # a new process replaces the crashed one


def test_build_over_the_time_limit_is_stopped():
    where = target("opencl:cpu")
    (first, *_) = kernels()
    with BuildWorker(Limits(seconds=0.01)) as worker, pytest.raises(BuildError, match="took more than"):
        worker.build(render(first, where.dialect, where.form), where)


def test_build_without_enough_memory_raises_build_error():
    where = target("opencl:cpu")
    (first, *_) = kernels()
    # The address space is too small to load the compiler.
    with (
        BuildWorker(Limits(memory=200 << 20)) as worker,
        pytest.raises(BuildError, match=r"crashed|missing|more than|no OpenCL"),
    ):
        worker.build(render(first, where.dialect, where.form), where)


def test_target_of_unknown_name_raises():
    with pytest.raises(BuildError, match="cuda:sm_90"):
        target("cuda:sm_1")
