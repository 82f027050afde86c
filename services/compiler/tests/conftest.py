"""Runs plans in several ways: on PoCL and in the kernel interpreter, fused and not fused."""

import numpy as np
import pytest
from wooly_compiler import mathlib
from wooly_compiler.pipeline import compile_program
from wooly_testkit import elementary, kernel_interpreter, kernel_scalars
from wooly_testkit.plan_run import LocalRun, run_kernels
from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Apply, walk
from wooly_wis.kernel.ops import FLOATS
from wooly_wis.plan import STATUS
from wooly_wis.program import Role

_NUMPY = {
    DType.BOOL: np.bool_, DType.U8: np.uint8, DType.I8: np.int8, DType.I16: np.int16, DType.I32: np.int32,
    DType.I64: np.int64, DType.F32: np.float32, DType.F64: np.float64, DType.F16: np.float16, DType.BF16: np.uint16,
}  # fmt: skip


def elements(raw, dtype):
    """Read bytes as Python numbers, 16-bit floats as floats."""
    found = raw[: len(raw) - len(raw) % dtype.itemsize].view(_NUMPY[dtype])
    if dtype is DType.BF16:
        return [kernel_scalars.from_bits(int(b), dtype) for b in found]
    return [v.item() for v in found]


def raw_of(values, dtype):
    if dtype is DType.BF16:
        return np.array([kernel_scalars.bits_of(v, dtype) for v in values], np.uint16).view(np.uint8)
    with np.errstate(all="ignore"):
        return np.array(values, _NUMPY[dtype]).view(np.uint8)


def interpret(plan, memory, params):
    """Run the kernels of a plan in the interpreter, with the elementary functions of generated kernels."""

    def run(step):
        arrays = {
            a.name: [0] if s == STATUS else elements(memory[s], a.dtype)
            for a, s in zip(step.kernel.arrays, step.slots, strict=True)
        }
        values = {s.name: params[p] for s, p in zip(step.kernel.scalars, step.params, strict=True)}
        kernel_interpreter.run(step.kernel, arrays, values, elementary.element)
        for a, slot in zip(step.kernel.arrays, step.slots, strict=True):
            if a.role is not Role.IN and slot != STATUS:
                new = raw_of(arrays[a.name], a.dtype)
                memory[slot][: len(new)] = new

    run_kernels(plan, memory, run)


class Ways:
    """One tape, run in several ways on the same inputs."""

    def __init__(self, tape, inputs):
        self.program, self.slots = tape.program()
        self.params = tape.params
        self.inputs = inputs
        self.fused = compile_program(self.program, checks=True)
        self.single = compile_program(self.program, fusing=False, checks=True)

    def memory(self):
        return {self.slots[t.slot]: v.reshape(-1).view(np.uint8).copy() for t, v in self.inputs}

    def pocl(self, plan):
        memory = self.memory()
        LocalRun(plan).run(memory, self.params)
        return memory

    def interpreted(self, plan):
        memory = self.memory()
        interpret(plan, memory, self.params)
        return memory

    def value(self, memory, tensor):
        """Return a dense tensor of the tape as a NumPy array (bf16 as bits)."""
        view = tensor.view
        return memory[self.slots[tensor.slot]][: view.end].view(_NUMPY[view.dtype]).reshape(view.sizes)


def same_bits(one, other):
    """Whether two memories hold the same bytes; NaNs may have different bits."""
    assert one.keys() == other.keys()
    for slot in one:
        a, b = one[slot], other[slot]
        if not np.array_equal(a, b):
            for kind in (np.float32, np.float64, np.float16):
                x, y = (v[: len(v) - len(v) % kind().itemsize].view(kind) for v in (a, b))
                if np.array_equal(x, y, equal_nan=True):
                    break
            else:
                return False
    return True


def _is_vendors(statement):
    """Whether an operation is a function of the vendor's library, whose bits differ."""
    return (
        isinstance(statement, Apply)
        and statement.dtype in FLOATS
        and mathlib.function(statement.op, statement.dtype, statement.dtype) is None
        and statement.op
        not in ("add", "sub", "mul", "div", "neg", "max", "min", "sqrt", "select", "convert", "bitcast")
        and (statement.dtype is DType.F64 or statement.op not in mathlib.BOUNDS)
    )


def _agree(tape, inputs):
    """Assert that all ways give the same bits; return the runs and the memory of the fused one."""
    ways = Ways(tape, inputs)
    fused = ways.pocl(ways.fused)
    assert same_bits(fused, ways.pocl(ways.single)), "fused and single kernels differ"
    if not any(_is_vendors(s) for k in ways.fused.kernels for s in walk(k.body)):
        assert same_bits(fused, ways.interpreted(ways.fused)), "PoCL and the interpreter differ"
    return ways, fused


@pytest.fixture(scope="session")
def agree():
    return _agree
