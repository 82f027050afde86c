"""Kernels marked `exact` give the library's bits on numbers of all kinds. Every row of the op table is tested."""

import pytest
import torch
from wooly_compiler import exact
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_testkit.tape import Tape
from wooly_wis.artifact import decide, decided_values
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.oprules import ArgKind
from wooly_wis.optable import TABLE
from wooly_wis.plan import KernelStep, LibraryStep, Line

FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)
DTYPES = (*FLOATS, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.BOOL)
#: Number of rows per program in the quick test: most of the time passes before the first kernel of a program is built.
TOGETHER = 12
SIZES = (16, 16411)  # many groups and a tail of the library's vectors; small tensors do not get kernels
CONSTANTS = {"dims": (-1,), "dim": -1, "keepdim": True, "sizes": (SIZES[1],)}


def tape_of(row, dtype, numbers, sample, onto=None):
    """A tape that uses the row twice, so that a kernel is worthwhile."""
    t, contents = onto or (Tape(), {})
    args = []
    for k, arg in enumerate(row.args):
        wants_tensor = arg.kind is ArgKind.TENSOR or (arg.kind is ArgKind.EITHER and not (numbers and k))
        wants_tensor &= (row.opcode, arg.name) != ("masked_fill", "value")  # torch takes a tensor of one element only
        if wants_tensor and (arg.required or row.opcode not in ("add", "sub", "rsub")):
            kind = DType.BOOL if arg.name in row.truths else dtype
            x = t.input(kind, *SIZES)
            contents[x.slot] = sample(kind, x.view.numel, k)
            args.append(x)
        elif arg.kind in (ArgKind.NUMBER, ArgKind.EITHER):
            if not arg.required:
                break
            args.append(numbers or 0.5)
        elif arg.kind is ArgKind.DTYPE:
            args.append(dtype if arg.required else None)
        else:
            args.append(CONSTANTS[arg.name])
    for _ in range(3):
        t.ops(row.opcode, *args)
    return t, contents


def _line(program):
    k, found = next((k, i) for k, i in enumerate(program.body) if program.forms[i.form].opcode not in ("alloc", "free"))
    return Line(program.forms[found.form], found.slots, 0, k)


def is_exact(row, dtype, numbers):
    """Whether the compiler calls the row's kernel exact. False if torch does not take such operands."""
    if row.opcode.startswith("bitwise_") and dtype.kind == "float":
        return False
    try:
        tape, _ = tape_of(row, dtype, numbers, lambda *_: None)
    except (RuleError, KeyError):
        return False
    return called_exact(tape)


def called_exact(tape):
    """Whether the compiler calls the kernel of a tape's first instruction exact."""
    program, _ = tape.program()
    return not exact.why_not(_line(program), decided_values(program, decide(program, tape.params)))


#: The rows of the quick test. The slow test has each row with numbers for operands, and in all data types.
QUICK = [row for row in TABLE.values() if is_exact(row, DType.F32, 0)]


@pytest.mark.parametrize("first", range(0, len(QUICK), TOGETHER))
def test_exact_kernels_of_a_program_equal_library_bitwise(compiled, sample, first):
    made = Tape(), {}
    for row in QUICK[first : first + TOGETHER]:
        tape_of(row, DType.F32, 0, sample, made)
    assert _same(compiled, *made)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_exact_kernels_of_a_row_equal_library_bitwise(compiled, sample, row):
    tried = compared = 0
    for numbers in (0, 3, 0.1):
        if not numbers or any(a.kind in (ArgKind.NUMBER, ArgKind.EITHER) for a in row.args[1:]):
            for dtype in DTYPES:
                if is_exact(row, dtype, numbers):
                    tried += 1
                    compared += _same(compiled, *tape_of(row, dtype, numbers, sample))
    assert compared or not tried


def _same(compiled, tape, contents):
    """Compare a plan with the library. Returns 0 if there is no kernel for this data type, or the library does not take it."""
    program, slots = tape.program()
    contents = {slots[s]: v for s, v in contents.items()}
    prepared, plan = compiled.plan(program, tape.params, "exact")
    if any(isinstance(s, LibraryStep) for s in plan.steps):
        return 0
    before = compiled.run(compiled.ready(program).prepared, contents, tape.params)
    if before[1] is not None:  # the library does not support this dtype
        return 0
    assert compiled.run(prepared, contents, tape.params) == before
    return 1


def powers(dtype, exponent, onto):
    x = onto.input(dtype, *SIZES)
    for _ in range(3):
        onto.op("pow", x, exponent)
    return x


def conversions(source, target, onto):
    x = onto.input(source, *SIZES)
    for _ in range(3):
        onto.copy(x, target)
    return x


def is_called_exact(recorded, *args):
    recorded(*args, tape := Tape())
    return called_exact(tape)


POWERS = {
    exponent: [d for d in FLOATS if is_called_exact(powers, d, exponent)] for exponent in (1, 2, 3, -0.5, -1, -2, 2.0)
}


@pytest.mark.parametrize(
    "exponent",
    [pytest.param(e, marks=() if e == -0.5 else pytest.mark.slow) for e, dtypes in POWERS.items() if dtypes],
)
def test_exact_powers_equal_library_bitwise(compiled, sample, exponent):
    t, contents = Tape(), {}
    for dtype in POWERS[exponent]:
        x = powers(dtype, exponent, t)
        contents[x.slot] = sample(dtype, x.view.numel, 1)
    assert _same(compiled, t, contents)


@pytest.mark.parametrize(
    "source", [pytest.param(d, marks=() if d in (DType.F32, DType.I64) else pytest.mark.slow) for d in DTYPES]
)
def test_exact_conversions_equal_library_bitwise(compiled, sample, source):
    t, contents = Tape(), {}
    for target in DTYPES if source is DType.F32 else (DType.F32,):
        if is_called_exact(conversions, source, target):
            x = conversions(source, target, t)
            contents[x.slot] = sample(source, x.view.numel, 2)
    assert _same(compiled, t, contents)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=() if d is DType.F32 else pytest.mark.slow) for d in FLOATS],
    ids=lambda d: d.label,
)
def test_index_sums_equal_library_bitwise(compiled, sample, dtype):
    """The gradient of an embedding: with repeated rows, ignored rows and missing rows."""
    rows, width, tokens = 5600, 96, (5, 200)  # large enough for a kernel
    for padding, kind in ((-1, DType.I64), (3, DType.I64), (3, DType.I32)):
        t = Tape()
        grad, index = t.input(dtype, *tokens, width), t.input(kind, *tokens)
        (g,) = t.extern(
            "aten.embedding_dense_backward.default", grad, index, rows, padding, False, results=[(dtype, (rows, width))]
        )
        t.op("abs", g)
        where = torch.randint(-2, 40, tokens, generator=torch.Generator().manual_seed(1))
        where[1], where[2, :9] = 7, rows
        contents = {grad.slot: sample(dtype, grad.view.numel, 1), index.slot: where.to(TORCH_DTYPE[kind]).view(-1)}
        program, slots = t.program()
        prepared, plan = compiled.plan(program, t.params, "exact")
        assert any("extern" in s.kernel.name for s in plan.steps if isinstance(s, KernelStep))
        contents = {slots[s]: v for s, v in contents.items()}
        assert compiled.run(prepared, contents, t.params) == compiled.run(
            compiled.ready(program).prepared, contents, t.params
        )
