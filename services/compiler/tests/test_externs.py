"""Kernels of library operators report arguments that the library rejects, and read nothing beyond their arrays.

The tests in `compiled/` compare their results with the library's, with an executor.
"""

import numpy as np
import pytest
from wooly_compiler.pipeline import compile_program
from wooly_testkit.plan_run import LocalRun
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.plan import KernelStep, LibraryStep

F32, I64 = DType.F32, DType.I64


def test_nll_loss_with_class_out_of_range_raises():
    t = Tape()
    x, y = t.input(F32, 4, 5), t.input(I64, 4)
    t.extern("aten.nll_loss_forward.default", x, y, None, 1, -100, results=[(F32, ()), (F32, ())])
    program, slots = t.program()
    memory = {slots[x.slot]: np.zeros(80, np.uint8), slots[y.slot]: np.array([0, 1, 5, 2]).view(np.uint8)}
    with pytest.raises(IndexError, match="instruction 2"):
        LocalRun(compile_program(program, checks=True)).run(memory)


def test_batch_norm_without_inout_statistics_gets_no_kernel():
    t = Tape()
    x = t.input(F32, 6, 40)
    names = [t.input(F32, 40) for _ in range(4)]
    results = [(F32, (6, 40)), (F32, (40,)), (F32, (40,))]
    t.extern("aten.native_batch_norm.default", x, *names, True, 0.1, 1e-5, results=results)
    assert not compile_program(t.program()[0]).kernels


def test_embedding_with_index_out_of_range_raises():
    t = Tape()
    w, i = t.input(F32, 10, 4), t.input(I64, 3)
    t.op("relu", t.op("embedding", w, i))
    program, slots = t.program()
    plan = compile_program(program, checks=True)
    assert len([s for s in plan.steps if isinstance(s, KernelStep)]) == 1
    for bad in (-1, 10, 1 << 62, -(1 << 63)):
        memory = {slots[w.slot]: np.ones(40, np.float32).view(np.uint8),
                  slots[i.slot]: np.array([0, bad, 9]).view(np.uint8)}  # fmt: skip
        with pytest.raises(IndexError, match="instruction 1, embedding"):
            LocalRun(plan).run(memory)


def test_remainder_by_zero_raises():
    t = Tape()
    a, b = t.input(I64, 5), t.input(I64, 5)
    t.op("remainder", a, b)
    program, slots = t.program()
    memory = {slots[a.slot]: np.arange(5).view(np.uint8), slots[b.slot]: np.array([1, 0, 1, 1, 1]).view(np.uint8)}
    with pytest.raises(ZeroDivisionError, match="remainder"):
        LocalRun(compile_program(program, checks=True)).run(memory)


def test_plan_without_checks_leaves_checked_operators_to_the_library():
    t = Tape()
    w, i = t.input(F32, 10, 4), t.input(I64, 3)
    t.op("embedding", w, i)
    t.op("remainder", i, i)
    t.op("remainder", i, 3)
    program, _ = t.program()
    assert [type(s) for s in compile_program(program, params=t.params).steps if hasattr(s, "lines") or hasattr(s, "why")] == [
        LibraryStep, LibraryStep, KernelStep]  # fmt: skip
