"""Each row of the op table: the library's result agrees with the row's definition, and its rules agree with the library."""

import pytest
import torch
from wooly_executor.runtime.buffers import TORCH_DTYPE, WIS_DTYPE, Buffer
from wooly_executor.runtime.calls import library_call, typed_params
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_testkit.reference import ReferenceRuntime
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.oprules import ArgKind
from wooly_wis.optable import TABLE, Family, arguments, check
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, View
from wooly_wis.verifier import verify_program

SHAPES = {"value": (), "b": (4,), "mask": (3, 1), "weight": (4,), "bias": (4,)}
#: Rows whose operands need other sizes or values.
SPECIAL = {
    "mm": {"b": (4, 2)},
    "bmm": {"a": (2, 3, 4), "b": (2, 4, 5)},
    "addmm": {"b": (4, 2), "bias": (2,)},
    "baddbmm": {"a": (2, 3, 4), "b": (2, 4, 5), "bias": (1, 5)},
    "linear": {"weight": (5, 4), "bias": (5,)},
    "embedding": {"weight": (6, 4), "index": (2, 3)},
    "index_select": {"index": (2,)},
    "gather": {"index": (3, 2)},
}
CONSTANTS = {"dims": (1,), "dim": 1, "keepdim": True, "sizes": (4,), "diagonal": 1, "padding": 0}
NUMBERS = {
    "a": -1.0,
    "alpha": 2.0,
    "beta": 0.5,
    "value": 1.5,
    "weight": 0.25,
    "threshold": 0.1,
    "lo": -0.5,
    "hi": 0.5,
    "b": 2.0,
    "eps": 1e-5,
}


def values_of(shape, dtype, name):
    n = torch.Size(shape).numel()
    if name == "index":
        return (torch.arange(n) % 3).reshape(shape)
    if dtype is torch.bool or name == "mask":
        return (torch.arange(n) % 3 == 0).reshape(shape)
    found = torch.linspace(0.15, 0.9, n).reshape(shape)
    return (found * 9 + 1).to(dtype) if not (dtype.is_floating_point or dtype.is_complex) else found.to(dtype)


def build(row, dtype, numbers, in_place=False):
    """Return (form, input tensors, params) of a row. With `numbers`, arguments that may be numbers are numbers."""
    tensors, operands, params, args, kinds = [], [], [], [], []

    def operand(name):
        shape = SPECIAL.get(row.opcode, {}).get(name, SHAPES.get(name, (3, 4)))
        t = values_of(shape, dtype, name)
        tensors.append(t)
        role = Role.INOUT if in_place and not operands else Role.IN
        operands.append(Operand(role, View(WIS_DTYPE[t.dtype], tuple(t.shape), t.stride())))
        return OperandRef(len(operands) - 1)

    for arg in row.args:
        number = arg.kind is ArgKind.NUMBER or (arg.kind is ArgKind.EITHER and numbers and operands)
        if arg.kind is ArgKind.TENSORS:
            args.append((operand("a"), operand("a")))
        elif arg.kind is ArgKind.DTYPE:
            args.append(WIS_DTYPE[dtype] if arg.required else None)
        elif arg.name in CONSTANTS and arg.kind in (ArgKind.INT, ArgKind.INTS, ArgKind.BOOL):
            args.append(CONSTANTS[arg.name])
        elif number:
            value = NUMBERS[arg.name] if dtype.is_floating_point or dtype.is_complex or arg.name == "eps" else 2
            params.append(value)
            kinds.append(ParamKind.F64 if isinstance(value, float) else ParamKind.I64)
            args.append(ParamRef(len(params) - 1))
        else:
            args.append(operand(arg.name))
    attrs = (("args", tuple(args)),)
    form = Form(row.opcode, tuple(operands), tuple(kinds), attrs)
    found = arguments(form)
    if not in_place:
        for result in row.results:
            sizes = result.shape.of(found)
            operands.append(Operand(Role.OUT, _dense(result.dtype.of(found), sizes)))
    return Form(row.opcode, tuple(operands), tuple(kinds), attrs), tensors, params


def _dense(dtype, sizes):
    return View(dtype, tuple(sizes), torch.empty(sizes, device="meta").stride())


def execute(runtime, form, tensors, params):
    """Return the results of one instruction on a runtime."""
    forms, body = [], []

    def add(f, *slots):
        if f not in forms:
            forms.append(f)
        body.append(Instruction(forms.index(f), slots))

    for k, operand in enumerate(form.operands):
        if k < len(tensors):  # copies onto itself, so that the slot is bound from outside
            add(Form("copy", (Operand(Role.IN, operand.view), Operand(Role.OUT, operand.view))), k, k)
        else:
            add(Form("alloc", (Operand(Role.OUT, View(DType.U8, (operand.view.end,), (1,))),)), k)
    add(form, *range(len(form.operands)))
    program = Program(tuple(forms), tuple(body))
    facts = verify_program(program)
    buffers = {k: Buffer(t.nbytes, t.clone()) for k, t in enumerate(tensors)}
    outcome = runtime.run(runtime.prepare(program, facts), buffers, list(range(len(form.operands))), params)
    assert outcome.failed_at is None, outcome.error
    results = [k for k, o in enumerate(form.operands) if o.role is not Role.IN]
    found = []
    for k in results:
        view, base = form.operands[k].view, buffers[k].base
        flat = torch.empty(0, dtype=TORCH_DTYPE[view.dtype]).set_(base.untyped_storage(), 0, view.sizes, view.strides)
        found.append(flat.clone())
    return found


def library_takes(form, tensors, params):
    """Whether the library accepts such operands. A client never records a call that the library refuses."""
    call = library_call(form)
    typed = typed_params(form, call)

    def value(a):
        if isinstance(a, OperandRef):
            return tensors[a.index].clone()
        if isinstance(a, ParamRef):
            number = params[a.index]
            return torch.tensor(number, dtype=typed[a.index]) if a.index in typed else number
        if isinstance(a, DType):
            return TORCH_DTYPE[a]
        return [value(x) for x in a] if isinstance(a, tuple) else a

    try:
        call.op(*[value(a) for a in call.args], **{k: value(v) for k, v in call.kwargs})
    except (RuntimeError, TypeError):
        return False
    return True


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def cases():
    for row in TABLE.values():
        either = any(a.kind is ArgKind.EITHER for a in row.args)
        for numbers in (False, True) if either else (False,):
            for in_place in (False, True):
                if not in_place or any(s.in_place for s in row.spellings):
                    yield pytest.param(
                        row, numbers, in_place, id=f"{row.opcode}-{'n' if numbers else 't'}-{int(in_place)}"
                    )


@pytest.mark.parametrize(("row", "numbers", "in_place"), list(cases()))
def test_op_table_library_matches_definition(row, numbers, in_place):
    tried = 0
    for dtype in DTYPES:
        try:
            form, tensors, params = build(row, dtype, numbers, in_place)
            check(form)
        except RuleError:
            continue
        if not library_takes(form, tensors, params):
            continue
        tried += 1
        ours = execute(TorchCpuRuntime(), form, tensors, params)
        meant = execute(ReferenceRuntime(), form, tensors, params)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        for a, b in zip(ours, meant, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
    assert tried, "no dtype fits this row"


def test_op_table_every_spelling_exists_in_library():
    for row in TABLE.values():
        for spelling in row.spellings:
            _, packet, overload = spelling.operator.split(".")
            op = getattr(getattr(torch.ops.aten, packet), overload)
            assert len(spelling.args) <= len(op._schema.arguments), spelling.operator
            assert op._schema.is_mutable is spelling.in_place, spelling.operator
            assert row.family is not Family.MEMORY


@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", [*DTYPES, torch.uint8, torch.int8, torch.float16, 2, 2.5, 2j, True])
def test_promotion_matches_library(a, b):
    from wooly_wis.promotion import NumberKind, result_type

    kinds = {int: NumberKind.INT, float: NumberKind.FLOAT, complex: NumberKind.COMPLEX, bool: NumberKind.BOOL}
    x = torch.empty(2, dtype=a)
    for sizes in ((2,), ()):
        view = View(WIS_DTYPE[a], (2,), (1,))
        if isinstance(b, torch.dtype):
            ours = result_type([view, View(WIS_DTYPE[b], sizes, (1,) * len(sizes))])
            theirs = torch.result_type(x, torch.empty(sizes, dtype=b))
        else:
            ours, theirs = result_type([view], [kinds[type(b)]]), torch.result_type(x, b)
        if theirs in TORCH_DTYPE.values():  # torch 2.14 has complex numbers of two bfloat16, which WIS has not
            assert TORCH_DTYPE[ours] is theirs
