"""Every op table row with a generated kernel agrees with its definition: floats within a tolerance, other types exactly."""

import functools
from types import MappingProxyType

import numpy as np
import pytest
import torch
from wooly_compiler.pipeline import compile_program
from wooly_executor.runtime.buffers import TORCH_DTYPE, Buffer
from wooly_testkit.effort import sampled
from wooly_testkit.plan_run import LocalRun, build
from wooly_testkit.reference import ReferenceRuntime
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.oprules import ArgKind
from wooly_wis.optable import TABLE, Family
from wooly_wis.plan import LibraryStep
from wooly_wis.verifier import verify_program

DTYPES = (DType.F32, DType.F64, DType.BF16, DType.F16, DType.I64, DType.I32, DType.U8, DType.BOOL)
#: Data types of the quick tests: of a third of all rows and at least one of each family, and of every twelfth row.
QUICK, QUICK_SOMETIMES = DType.F32, DType.I64
CONSTANTS = {"dims": (-1,), "dim": -1, "keepdim": True, "sizes": (37,)}
SHAPES = {"b": (37,), "mask": (5, 1), "weight": (37,), "bias": (37,), "mean": (5, 1)}
#: Shapes for rows that move or index data, if they differ from the default.
OTHER = {
    "concat": {"dim": 1},
    "tril": {"diagonal": 1},
    "triu": {"diagonal": -2},
    "index_select": {"dim": 0, "index": (11,)},
    "gather": {"dim": 1, "index": (5, 20)},
    "embedding": {"weight": (5, 37), "index": (2, 3), "padding": -1},
}
#: Tolerance relative to the largest result: a few roundings of the dtype, or of f32 for dtypes that are computed in f32.
BOUND = {DType.F32: 4e-6, DType.F64: 1e-12, DType.BF16: 1e-2, DType.F16: 2e-3}


FAMILIES = (Family.POINTWISE, Family.REDUCTION, Family.MOVEMENT, Family.INDEXING)


def values(sizes, dtype, generator):
    found = torch.rand(sizes, generator=generator, dtype=torch.float64) * 1.6 + 0.1
    if dtype is DType.BOOL:
        return found > 0.9
    return (found * 7).to(TORCH_DTYPE[dtype]) if dtype.kind in ("int", "uint") else (found - 0.9).to(TORCH_DTYPE[dtype])


def tape_of(row, dtype, constants=MappingProxyType({}), sizes=(5, 37)):
    """A tape with one call of the row, its inputs and its results."""
    t, inputs, args = Tape(), [], []
    own = OTHER.get(row.opcode, {})
    generator = torch.Generator().manual_seed(0)
    for arg in row.args:
        if arg.kind in (ArgKind.TENSOR, ArgKind.EITHER):
            kind = DType.BOOL if arg.name in row.truths else DType.I64 if arg.name in row.indices else dtype
            x = t.input(kind, *own.get(arg.name, SHAPES.get(arg.name, sizes)))
            made = values(x.view.sizes, kind, generator)
            inputs.append((x, made % 5 if arg.name in row.indices else made))
            args.append(x)
        elif arg.kind is ArgKind.TENSORS:
            parts = [t.input(dtype, 5, n) for n in (37, 3, 8)]
            inputs += [(x, values(x.view.sizes, dtype, generator)) for x in parts]
            args.append(tuple(parts))
        elif arg.kind is ArgKind.NUMBER:
            args.append(2 if dtype.kind in ("int", "uint", "bool") and arg.name != "eps" else 0.5)
        elif arg.kind is ArgKind.DTYPE:
            args.append(dtype if arg.required else None)
        else:
            args.append({**CONSTANTS, **constants, **own}[arg.name])
    return t, inputs, t.ops(row.opcode, *args)


ROWS = [(row, dtype, {}, (5, 37)) for dtype in DTYPES for row in TABLE.values() if row.family in FAMILIES]
#: A reduction over the first dimension: neighbouring rows are contiguous, so a point is a block of columns or a strided row.
FOLDS = [
    (row, DType.F32, {"dims": dims, "dim": 0, "keepdim": False}, sizes)
    for row in TABLE.values()
    if row.family is Family.REDUCTION and row.opcode != "layer_norm"
    for dims in ((0,), (0, 1))
    if dims == (0,) or "dims" in [a.name for a in row.args]
    for sizes in ((300, 24), (5, 37))
]


def kinds_of(opcode):
    """The family of a row, and the kinds of its arguments."""
    return TABLE[opcode].family, tuple([arg.kind for arg in TABLE[opcode].args])


OPCODES = [row.opcode for row in TABLE.values() if row.family in FAMILIES]
QUICK_OPCODES = {QUICK: sampled(OPCODES, 3, kinds_of), QUICK_SOMETIMES: sampled(OPCODES, 12)}


def is_quick(case):
    _, (row, dtype, *_) = case
    return row.opcode in QUICK_OPCODES.get(dtype, ())


#: The quick cases first, so that a quick run builds no others.
CASES = [case for _, case in sorted(enumerate(ROWS + FOLDS), key=lambda case: not is_quick(case))]
QUICK_CASES = sum(map(is_quick, enumerate(ROWS + FOLDS)))
_BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
_FLOATING = {
    *("addcdiv", "gelu", "gelu_backward", "gelu_tanh", "layer_norm", "lerp", "log_softmax", "log_softmax_backward"),
    *("mean", "pow", "silu", "silu_backward", "softmax", "softmax_backward"),
}
_NOT_BOOL = {"div_floor", "div_trunc", "fmod", "neg", "remainder", "rsub", "sigmoid_backward", "sub", "tanh_backward"}
#: Number of cases per program: most of PoCL's build time passes before the first kernel of a program.
TOGETHER = 20


def params():
    for n, (row, dtype, constants, sizes) in enumerate(CASES):
        what = f"{row.opcode}-{dtype.label}" + (f"-{len(constants['dims'])}-{sizes}" if constants else "")
        yield pytest.param(n, id=what, marks=() if n < QUICK_CASES else pytest.mark.slow)


def has_kernel(row, dtype):
    """Whether a kernel computes the row for this dtype. If not, torch refuses the dtype, or an approximation is impossible."""
    if dtype.kind == "float":
        return row.opcode not in _BITWISE
    if row.opcode in _FLOATING or (dtype is DType.BOOL and row.opcode in _NOT_BOOL):
        return False
    return (row.opcode, dtype) != ("sign", DType.U8)


@functools.cache
def planned(n):
    """The tape, inputs, results and plan of a case, or the reason why it has none."""
    try:
        tape, inputs, results = tape_of(CASES[n][0], CASES[n][1], *CASES[n][2:])
    except RuleError:
        return "the row does not support this dtype"
    plan = compile_program(tape.program()[0], checks=True)
    if any(isinstance(s, LibraryStep) for s in plan.steps):
        return "the library's"
    return tape, inputs, results, plan


@functools.cache
def kernels_of(group):
    """The kernels of a group of cases."""
    found = [planned(n) for n in range(group * TOGETHER, min((group + 1) * TOGETHER, len(CASES)))]
    return build([f[-1] for f in found if not isinstance(f, str)])


def by_definition(tape, inputs):
    program, slots = tape.program()
    runtime = ReferenceRuntime()
    buffers = {slots[x.slot]: Buffer(v.nbytes, v.clone()) for x, v in inputs}
    facts = verify_program(program)
    outcome = runtime.run(runtime.prepare(program, facts), buffers, list(range(len(facts.slot_bytes))), tape.params)
    return (buffers, slots) if outcome.failed_at is None else (None, slots)


def raw(t):
    return t.contiguous().view(-1).view(torch.uint8).numpy().copy()


@pytest.mark.parametrize("n", list(params()))
def test_kernel_equals_definition(n):
    found, (row, dtype, *_) = planned(n), CASES[n]
    assert isinstance(found, str) != has_kernel(row, dtype), found
    if isinstance(found, str):
        return
    tape, inputs, results, plan = found
    _, slots = tape.program()
    buffers, _ = by_definition(tape, inputs)
    if buffers is None:
        pytest.skip("the library does not support this dtype")
    memory = {slots[x.slot]: raw(v) for x, v in inputs}
    LocalRun(plan, built=kernels_of(n // TOGETHER)).run(memory, tape.params)
    for x in results:
        want = buffers[slots[x.slot]].base
        want = torch.empty(0, dtype=TORCH_DTYPE[x.view.dtype]).set_(
            want.untyped_storage(), 0, x.view.sizes, x.view.strides
        )
        got = torch.from_numpy(memory[slots[x.slot]][: want.nbytes]).view(want.dtype).view(want.shape)
        if want.is_floating_point():
            scale = want[want.isfinite()].abs().max() if want.isfinite().any() else 1
            limit = BOUND[x.view.dtype]
            torch.testing.assert_close(got, want, rtol=limit, atol=float(scale) * limit, equal_nan=True)
        else:
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_most_rows_have_a_kernel():
    """Counted for f32. Rows without a kernel are listed by name, so that no row loses its kernel unnoticed."""
    missing = set()
    for row in TABLE.values():
        if row.family in FAMILIES:
            try:
                tape, _, _ = tape_of(row, DType.F32)
            except RuleError:
                continue
            if any(isinstance(s, LibraryStep) for s in compile_program(tape.program()[0], checks=True).steps):
                missing.add(row.opcode)
    bits = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}  # not defined for floating point
    assert not missing - bits
