"""Results of a plan never depend on old memory contents: results of kernels, of the library, and unwritten parts."""

import sys
from pathlib import Path

import pytest
import torch
from wooly_executor.runtime.torch_private import zero_fill
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.plan import AllocStep, KernelStep, LibraryStep

HOSTILE = Path(__file__).parents[3] / "executor" / "tests" / "hostile"
sys.path.insert(0, str(HOSTILE))
import patterns  # noqa: E402

sys.path.remove(str(HOSTILE))

F32, BF16, I64, BOOL = DType.F32, DType.BF16, DType.I64, DType.BOOL
#: Not a multiple of a vector or chunk size, and large enough that a kernel is faster than two library calls.
ROWS, COLUMNS = 17, 8209


def chain(t):
    """Temporaries of several dtypes, some freed on the way; only a part of one result is written."""
    x, y = t.input(F32, ROWS, COLUMNS), t.input(F32, COLUMNS)
    a = t.op("mul", t.op("add", x, y), 2.0)
    b = t.copy(t.op("lt", a, y), BF16)
    t.op("concat", (a, x), 1)
    t.op("softmax", a, -1)
    t.free(a)
    t.op("add", b, 1.0, into=b)
    return x, y


def rows(t):
    """Reductions, normalisation, a triangle, rows selected by an index."""
    x, w, k = t.input(F32, ROWS, COLUMNS), t.input(F32, COLUMNS), t.input(I64, 5)
    t.ops("layer_norm", x, (COLUMNS,), w, w, 1e-5)
    t.op("abs", t.op("mul", t.op("add", x, w), 2.0))
    t.op("argmax", x, 1)
    t.op("tril", x, -3)
    t.op("embedding", x, k)
    t.op("sum", t.op("exp", x), (0,), False)
    return x, w, k


def losses(t):
    """A library step between kernels that leaves a part of its second result unwritten."""
    x, y = t.input(F32, 24, 40, 200), t.input(I64, 40, 6)
    lengths = (tuple([24, 7, 3, 24] * 10), tuple([6, 2, 1, 0] * 10))
    p = t.op("log_softmax", t.op("mul", t.op("add", x, 1.0), 0.5), 2)
    _, alpha = t.extern("aten._ctc_loss.default", p, y, *lengths, 0, True, results=[(F32, (40,)), (F32, (40, 24, 13))])
    t.op("mul", t.op("add", alpha, 0.0), 1.0)
    return x, y


def contents(inputs, slots):
    generator = torch.Generator().manual_seed(0)
    made = {}
    for x in inputs:
        n = x.view.numel
        whole = torch.randint(1, 5, (n,), generator=generator)
        made[slots[x.slot]] = whole if x.view.dtype is I64 else torch.randn(n, generator=generator)
    return made


@pytest.mark.parametrize(
    ("write", "mode"),
    [
        *[pytest.param(write, "exact", id=f"{write.__name__}-exact") for write in (chain, rows, losses)],
        pytest.param(chain, "full", id="chain-full"),
        pytest.param(rows, "full", id="rows-full", marks=pytest.mark.slow),
        pytest.param(losses, "full", id="losses-full", marks=pytest.mark.slow),
    ],
)
def test_plan_results_do_not_depend_on_old_memory_contents(compiled, write, mode):
    tape = Tape()
    inputs = write(tape)
    program, slots = tape.program()
    given = contents(inputs, slots)
    prepared, plan = compiled.plan(program, tape.params, mode)
    assert any(isinstance(step, KernelStep) for step in plan.steps)
    if write is losses:
        assert any(isinstance(step, LibraryStep) for step in plan.steps)
    else:
        assert any(isinstance(step, AllocStep) and not step.zero for step in plan.steps)  # the case under test
    for _ in range(3):  # repeated until the library steps are combined
        zero_fill.value = True
        try:
            expected = compiled.run(prepared, given, tape.params)
        finally:
            zero_fill.value = False
        with patterns.junk():
            assert compiled.run(prepared, given, tape.params) == expected
        assert expected[1] is None
