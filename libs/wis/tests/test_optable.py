"""The op table: rules accept valid forms and name faults; the reference page is current."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.optable import TABLE, canonical_args, check, cost
from wooly_wis.program import Form, Operand, OperandRef, ParamKind, ParamRef, Role, View
from wooly_wis.promotion import NumberKind, promote, result_type
from wooly_wis.scalar_expr import Apply, Const, evaluate, names, walk

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
sys.path.insert(0, str(REFERENCE))
import optable  # noqa: E402


def dense(*sizes, dtype=DType.F32):
    strides, n = [], 1
    for size in reversed(sizes):
        strides.append(n)
        n *= size
    return View(dtype, sizes, tuple(reversed(strides)))


def form(opcode, *args, out=(), params=(), in_place=False):
    """A form: views among `args` become operands, `out` views become results."""
    operands, attrs = [], []

    def attr(a):
        if isinstance(a, View):
            operands.append(Operand(Role.INOUT if in_place and not operands else Role.IN, a))
            return OperandRef(len(operands) - 1)
        return tuple([attr(x) for x in a]) if isinstance(a, tuple) else a

    attrs = tuple([attr(a) for a in args])
    operands += [Operand(Role.OUT, v) for v in out]
    return Form(opcode, tuple(operands), params, (("args", attrs),))


F34, F4, I34 = dense(3, 4), dense(4), dense(3, 4, dtype=DType.I64)

GOOD = {
    "broadcast": form("add", F34, F4, out=(F34,)),
    "number": form("mul", I34, ParamRef(0), out=(F34,), params=(ParamKind.F64,)),
    "integers divide": form("div", I34, I34, out=(F34,)),
    "comparison": form("lt", F34, 1.5, out=(dense(3, 4, dtype=DType.BOOL),)),
    "in place": form("add", F34, F4, in_place=True),
    "in place, converted": form("mul", F34, I34, in_place=True),
    "reduction": form("sum", I34, (1,), out=(dense(3, dtype=DType.I64),)),
    "kept": form("mean", F34, (-1,), True, out=(dense(3, 1),)),
    "product": form("addmm", F4, dense(3, 2), dense(2, 4), out=(F34,)),
    "concat": form("concat", (F34, dense(1, 4)), out=(dense(4, 4),)),
    "rows": form("embedding", F34, dense(5, dtype=DType.I64), out=(dense(5, 4),)),
    "three results": form("layer_norm", F34, (4,), F4, F4, 1e-5, out=(F34, dense(3, 1), dense(3, 1))),
}

BAD = {
    "shape": form("add", F34, dense(3), out=(F34,)),
    "broadcast": form("add", F34, F4, out=(dense(4, 3),)),
    "dtype": form("add", F34, F4, out=(dense(3, 4, dtype=DType.F64),)),
    "in place": form("add", I34, F34, in_place=True),
    "args": form("add", F34, out=(F34,)),
    "too many": form("neg", F34, F34, out=(F34,)),
    "no tensor": form("add", 1.0, 2.0, out=(F34,)),
    "kind": form("sum", F34, "all", out=(dense(),)),
    "no result": form("neg", F34),
    "two results": form("neg", F34, out=(F34, F34)),
    "mask": form("where", F34, F34, F34, out=(F34,)),
    "index": form("embedding", F34, dense(5), out=(dense(5, 4),)),
    "product": form("mm", F34, F34, out=(F34,)),
    "mixed product": form("mm", F34, dense(4, 3, dtype=DType.F64), out=(dense(3, 3),)),
    "dim": form("softmax", F34, 2, out=(F34,)),
    "repeated dims": form("sum", F34, (0, -2), out=(dense(4),)),
    "parts": form("concat", (F34, dense(3, 5)), out=(dense(6, 4),)),
    "result as argument": Form("neg", (Operand(Role.OUT, F34),), (), (("args", (OperandRef(0),)),)),
    "second in place": Form(
        "add", (Operand(Role.IN, F34), Operand(Role.INOUT, F34)), (), (("args", (OperandRef(0), OperandRef(1))),)
    ),
    "lonely": form("add", dense(3, dtype=DType.U16), dense(3, dtype=DType.I32), out=(dense(3, dtype=DType.I32),)),
}


@pytest.mark.parametrize("name", GOOD)
def test_check_valid_form_is_accepted(name):
    check(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_check_invalid_form_is_refused(name):
    with pytest.raises(RuleError):
        check(BAD[name])


def test_canonical_args_omit_trailing_defaults():
    assert canonical_args(TABLE["sum"], (OperandRef(0), None, False, None)) == (OperandRef(0),)
    assert canonical_args(TABLE["add"], (OperandRef(0), OperandRef(1), 1)) == (OperandRef(0), OperandRef(1))
    assert canonical_args(TABLE["add"], (OperandRef(0), OperandRef(1), True))[2] is True
    assert canonical_args(TABLE["sum"], (OperandRef(0), None, True)) == (OperandRef(0), None, True)


def test_cost_counts_bytes_and_operations():
    product = cost(GOOD["product"])
    assert product.flops == 2 * 3 * 4 * 2
    assert (product.bytes_read, product.bytes_written) == (4 * (4 + 6 + 8), 48)
    repeated = View(DType.F32, (3, 4), (0, 1))
    assert cost(form("neg", repeated, out=(F34,))).bytes_read == 16
    assert cost(Form("extern", (Operand(Role.IN, F34),))).flops is None


def test_every_pointwise_row_reads_its_own_arguments():
    for row in TABLE.values():
        if row.expr is not None:
            assert names(row.expr) <= {a.name for a in row.args}, row.opcode


def test_library_call_matches_at_most_one_row():
    seen = {}
    for row in TABLE.values():
        for spelling in row.spellings:
            key = (
                spelling.operator,
                tuple([a for a in spelling.args if isinstance(a, (str, bool))]),
                len(spelling.args),
            )
            fixed = tuple([None if a is None else type(a).__name__ for a in spelling.args])
            assert seen.setdefault((key, fixed), row.opcode) == row.opcode


def test_formula_evaluates():
    values = evaluate(TABLE["add"].expr, {"a": 2, "b": 3, "alpha": 10}, {"add": int.__add__, "mul": int.__mul__}, int)
    assert values == 32
    assert sum(isinstance(n, (Apply, Const)) for n in walk(TABLE["add"].expr)) == 2


dtypes = st.sampled_from([d for d in DType if not d.label.startswith("f8")])


@given(dtypes, dtypes)
@settings(max_examples=examples(60, 300), deadline=None)
def test_promote_is_symmetric_and_represents_both_dtypes(a, b):
    try:
        found = promote(a, b)
    except RuleError:
        with pytest.raises(RuleError):
            promote(b, a)
        return
    assert promote(b, a) is found
    assert promote(found, a) is found and promote(found, b) is found


def test_result_type_tensors_decide_before_numbers():
    assert result_type([dense(3, dtype=DType.I8)], [NumberKind.INT]) is DType.I8
    assert result_type([dense(3, dtype=DType.I8)], [NumberKind.FLOAT]) is DType.F32
    assert result_type([dense(3, dtype=DType.BF16), dense(dtype=DType.F64)]) is DType.BF16
    assert result_type([dense(3, dtype=DType.I64), dense(dtype=DType.F64)]) is DType.F64


def test_reference_page_is_current():
    assert (REFERENCE / "optable.md").read_text() == optable.page(), "run `make docs`"
