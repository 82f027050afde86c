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
from wooly_wis.plan import KernelStep

FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)
DTYPES = (*FLOATS, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.BOOL)
QUICK = (DType.F32,)  # the others are slow: each builds a kernel
SIZES = (16, 16411)  # many groups and a tail of the library's vectors; small tensors do not get kernels
CONSTANTS = {"dims": (-1,), "dim": -1, "keepdim": True, "sizes": (SIZES[1],)}


def tape_of(row, dtype, numbers, sample):
    """A tape that uses the row twice, so that a kernel is worthwhile."""
    t, contents = Tape(), {}
    args = []
    for k, arg in enumerate(row.args):
        wants_tensor = arg.kind is ArgKind.TENSOR or (arg.kind is ArgKind.EITHER and not (numbers and k))
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


def cases():
    for row in TABLE.values():
        for numbers in (0, 3, 0.1):
            if not numbers or any(a.kind in (ArgKind.NUMBER, ArgKind.EITHER) for a in row.args[1:]):
                name = f"{row.opcode}-{numbers}"
                yield pytest.param(row, numbers, QUICK, id=name, marks=pytest.mark.slow if numbers == 0.1 else ())
                rest = tuple(d for d in DTYPES if d not in QUICK)
                yield pytest.param(row, numbers, rest, id=f"{name}-others", marks=pytest.mark.slow)


@pytest.mark.parametrize(("row", "numbers", "dtypes"), list(cases()))
def test_exact_kernel_equals_library_bitwise(compiled, sample, row, numbers, dtypes):
    run = 0
    for dtype in dtypes:
        try:
            tape, contents = tape_of(row, dtype, numbers, sample)
        except (RuleError, KeyError):
            continue
        run += _same(compiled, tape, contents)
    if not run:
        pytest.skip("never exact")


def _same(compiled, tape, contents):
    program, slots = tape.program()
    contents = {slots[s]: v for s, v in contents.items()}
    values = decided_values(program, decide(program, tape.params))
    if exact.why_not(_line(program), values):
        return 0
    prepared, plan = compiled.plan(program, tape.params, "exact")
    if not any(isinstance(s, KernelStep) for s in plan.steps):
        return 0
    before = compiled.run(compiled.ready(program).prepared, contents, tape.params)
    if before[1] is not None:  # the library does not support this dtype
        return 0
    assert compiled.run(prepared, contents, tape.params) == before
    return 1


def _line(program):
    from wooly_wis.plan import Line

    k, found = next((k, i) for k, i in enumerate(program.body) if program.forms[i.form].opcode not in ("alloc", "free"))
    return Line(program.forms[found.form], found.slots, 0, k)


@pytest.mark.parametrize("exponent", [1, 2, 3, -0.5, -1, -2, 2.0])
def test_exact_powers_equal_library_bitwise(compiled, sample, exponent):
    for dtype in FLOATS:
        t = Tape()
        x = t.input(dtype, *SIZES)
        for _ in range(3):
            t.op("pow", x, exponent)
        _same(compiled, t, {x.slot: sample(dtype, x.view.numel, 1)})


@pytest.mark.parametrize("source", DTYPES)
def test_exact_conversions_equal_library_bitwise(compiled, sample, source):
    for target in DTYPES if source in QUICK else QUICK:
        t = Tape()
        x = t.input(source, *SIZES)
        for _ in range(3):
            t.copy(x, target)
        _same(compiled, t, {x.slot: sample(source, x.view.numel, 2)})


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.label)
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
