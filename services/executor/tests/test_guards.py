"""Guards refuse arguments that do not fit together before an operator that does not check them is called."""

import json
from pathlib import Path

import pytest
import torch
from wooly_executor.runtime import guards
from wooly_executor.runtime.calls import LibraryCall, library_call
from wooly_executor.runtime.guards.writing import works_in_place
from wooly_testkit import forks
from wooly_wis.dtypes import DType
from wooly_wis.externs import is_allowed
from wooly_wis.program import Form, Operand, OperandRef, ParamKind, ParamRef, Role
from wooly_wis.releases import lacks


@pytest.fixture(scope="module")
def outcome():
    done = forks.run("found", like="wooly_executor", cwd=Path(__file__).parent / "hostile", timeout=120)
    assert done.returncode == 0, f"{done.returncode} at {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_guards_hostile_calls_fail_and_process_survives(outcome):
    assert len(outcome) > 80
    wrong = [(name, answers) for name, ok, answers in outcome if [not a for a in answers] != [ok, ok]]
    assert wrong == []


def test_guards_both_runtimes_report_same_errors(outcome):
    assert [(name, *answers) for name, _, answers in outcome if answers[0] != answers[1]] == []


def test_guards_every_law_has_an_allowed_operator():
    for name in guards.LAWS:
        if not lacks(torch.__version__, f"aten.{name}.default"):
            packet = getattr(torch.ops.aten, name)
            assert any(is_allowed(f"aten.{name}.{kind}") for kind in packet.overloads()), name


def _unfold(wis, *rest, params=()):
    attrs = (("args", (OperandRef(0), (5,), *rest)), ("kwargs", ()), ("name", "aten.unfold_backward.default"))
    return Form("extern", (Operand(Role.IN, wis.at(DType.F32, 2, 3)),), params, attrs)


def test_guards_constant_shapes_are_checked_once_and_params_per_run(wis):
    settled = _unfold(wis, 0, 3, 2)
    call = guards.guarded(library_call(settled), settled)
    assert call.instead is None  # no check is left for a run
    refused = _unfold(wis, 0, 3, 1)
    with pytest.raises(RuntimeError, match=r"grad_in must have shape \[3, 3\], but it has \[2, 3\]"):
        guards.guarded(library_call(refused), refused).instead(torch.ones(2, 3), [5], 0, 3, 1)
    asked = _unfold(wis, 0, 3, ParamRef(0), params=(ParamKind.I64,))
    late = guards.guarded(library_call(asked), asked).instead
    assert late(torch.ones(2, 3), [5], 0, 3, 2).tolist() == [1.0, 1.0, 2.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="grad_in must have shape"):
        late(torch.ones(2, 3), [5], 0, 3, 1)


def test_guards_operator_without_law_is_called_unchanged(wis):
    form = Form("extern", (), (), (("args", ()), ("kwargs", ()), ("name", "aten.neg.default")))
    call = LibraryCall(torch.ops.aten.neg.default, (), ())
    assert guards.guarded(call, form) is call and not guards.looks_at_values(call)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (torch.ops.aten.where.self_out, True),  # without the tag of aten.where.self
        (torch.ops.aten.add.out, True),
        (torch.ops.aten.isnan.out, True),
        (torch.ops.aten.max.dim_max, False),
        (torch.ops.aten.max.unary_out, False),
        (torch.ops.aten.mm.out, False),
    ],
    ids=str,
)
def test_results_of_elementwise_operators_may_lie_where_an_argument_lies(op, expected):
    assert works_in_place(op) is expected


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_the_median_of_repeated_elements_reads_only_these(wis, name):
    out = (("indices", OperandRef(2)), ("values", OperandRef(1)))
    attrs = (("args", (OperandRef(0), 1)), ("kwargs", out), ("name", f"aten.{name}.dim_values"))
    results = [Operand(Role.OUT, wis.at(DType.I64, 2))] * 2
    at = wis.at(DType.I64, 2, 3, strides=(3, 0))
    form = Form("extern", (Operand(Role.IN, at), *results), (), attrs)
    call = guards.guarded(library_call(form), form)
    memory = torch.tensor([5, 100, 200, 300, 400, 500])
    values, indices = torch.zeros(2, 2, dtype=torch.int64)
    call.instead(memory.as_strided((2, 3), (3, 0)), 1, values=values, indices=indices)
    assert values.tolist() == [5, 300]
    plain = Form("extern", (Operand(Role.IN, wis.at(DType.I64, 2, 3)), *results), (), attrs)
    assert not guards.looks_at_values(guards.guarded(library_call(plain), plain))
