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

from services.compiler.tests.chips.programs import every_kind, vendors_functions


@pytest.fixture(scope="module")
def worker():
    with BuildWorker(Limits(seconds=100)) as found:
        yield found


@functools.cache
def kernels():
    return compile_program(every_kind().program()[0], checks=True).kernels


def vendors_kernels():
    return compile_program(vendors_functions().program()[0]).kernels


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


#: Kernels in the form for GPUs for which PoCL needs more than five minutes: its passes for barriers in loops grow with their
#: number. Executors compile this form with PoCL never; the toolchains of the vendors build these kernels in seconds.
NOT_BY_POCL = {"k_softmax_argmin"}


def parts():
    """Each target; the builds by PoCL, which takes long for the form of GPUs, in parts."""
    for name in TARGETS:
        count = 6 if name == "opencl:gpu" else 1
        for part in range(count):
            marks = pytest.mark.slow if name in SLOW_ARCHS else ()
            yield pytest.param(name, slice(part, None, count), id=f"{name}-{part}" if count > 1 else name, marks=marks)


@pytest.mark.parametrize(("name", "part"), list(parts()))
def test_every_kernel_builds_for_every_target(name, part, worker):
    where = target(name)
    why = missing(where.toolchain)
    if why:
        pytest.skip(why)
    every = (*kernels(), *(vendors_kernels() if where.toolchain != "hip" else ()))
    for kernel in every[part]:
        if name == "opencl:gpu" and kernel.name in NOT_BY_POCL:
            continue
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
