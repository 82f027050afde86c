"""Guards refuse arguments that do not fit together before an operator that does not check them is called."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wooly_executor.runtime import guards
from wooly_executor.runtime.calls import LibraryCall, library_call
from wooly_executor.runtime.guards import writing
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


@pytest.mark.parametrize("dims", [2, 3])
def test_gradient_of_sampling_with_another_shape_is_refused(dims):
    law = guards.LAWS[f"grid_sampler_{dims}d_backward"]
    image, grid, grad = torch.ones(2, 3, *[4] * dims), torch.zeros(2, *[5] * dims, dims), torch.ones(2, 3, *[5] * dims)
    fitting = {"input": image, "grid": grid, "grad_output": grad}
    law.shapes(fitting)
    wrong = [
        ("grad_output", grad[:, :, 1:]),
        ("grad_output", grad[:, 1:]),
        ("grid", grid[1:]),
        ("grid", grid[..., 1:]),
        ("grid", grid[0]),
        ("input", image[0]),
        ("input", image[:, :, :0]),
    ]
    for name, t in wrong:
        with pytest.raises(RuntimeError, match=" must "):
            law.shapes(fitting | {name: t})


def test_strided_weight_of_group_norm_is_refused_where_the_library_would_read_it():
    op, law, weight = torch.ops.aten.native_group_norm.default, guards.LAWS["native_group_norm"], torch.ones(8)[::2]
    names = [a.name for a in op._schema.arguments]
    for shape, layout in (((2, 4, 3), torch.contiguous_format), ((2, 4, 3, 3), torch.channels_last)):
        whole = torch.ones(shape).to(memory_format=layout)
        for other in ((weight, None), (None, weight)):
            with pytest.raises(RuntimeError, match="must be contiguous"):
                law.shapes(dict(zip(names, (whole, *other), strict=False)))
    x, weight = torch.arange(24.0).view(3, 4, 2).permute(2, 1, 0), torch.arange(8.0)[::2]
    given = x, weight, None, 2, 4, 3, 2, 1e-5
    law.shapes(dict(zip(names, given, strict=True)))
    try:
        found = op(*given)[0]
    except RuntimeError as refused:
        assert "Expected X.is_contiguous(memory_format)" in str(refused)
    else:  # PyTorch 2.14 takes such an input, and reads the weight with its strides
        assert torch.equal(found, op(x, weight.contiguous(), *given[2:])[0])
    given = torch.ones(0, 4, 3), weight, None, 0, 4, 3, 2, 1e-5
    law.shapes(dict(zip(names, given, strict=True)))
    assert op(*given)[0].shape == (0, 4, 3)


@pytest.mark.parametrize(
    ("op", "values", "gradient"),
    [
        (torch.ops.aten._cdist_backward.default, [torch.ones(4, 3), torch.ones(5, 3), 2.0, torch.ones(4, 5)], (4, 5)),
        (torch.ops.aten._pdist_backward.default, [torch.ones(4, 3), 2.0, torch.ones(6)], (6,)),
    ],
)
def test_gradients_of_distances_have_the_names_of_this_torch(op, values, gradient):
    names = [a.name for a in op._schema.arguments]
    law = guards.LAWS[op.overloadpacket.__name__]
    law.shapes(dict(zip(names, [torch.ones(gradient), *values], strict=True)))
    with pytest.raises(RuntimeError, match="must have shape"):
        law.shapes(dict(zip(names, [torch.ones(7, 2), *values], strict=True)))


def test_laws_of_gradients_do_not_import_dynamo():
    """The import takes a second, in which the executor serves no session."""
    calls = [
        "grid_sampler_2d_backward={'input': i, 'grid': i[:, :, :, :2], 'grad_output': i}",
        "avg_pool2d_backward={'self': i, 'grad_output': i, 'kernel_size': [1, 1], 'stride': [1, 1], 'padding': [0, 0], "
        "'ceil_mode': False, 'count_include_pad': True, 'divisor_override': None}",
        "reflection_pad2d_backward={'self': i, 'padding': [0, 0, 0, 0], 'grad_output': i}",
        "replication_pad2d_backward={'self': i, 'padding': [0, 0, 0, 0], 'grad_output': i}",
        "_cdist_backward={**dict.fromkeys(('x1', 'x2', 'grad', 'grad_output', 'cdist'), i), 'p': 2.0}",
    ]
    script = f"""
import sys, torch
from wooly_executor.runtime import guards
i = torch.ones(2, 2, 2, 2)
for name, given in dict({", ".join(calls)}).items():
    guards.LAWS[name].shapes(given)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


def _out(wis, name, args, kwargs, results):
    """A guarded call whose operand 0 is the argument, and whose results have these dtypes. All have 3 x 4 numbers."""
    attrs = (("args", args), ("kwargs", kwargs), ("name", name))
    roles = [(Role.IN, DType.F32), *[(Role.OUT, dtype) for dtype in results]]
    form = Form("extern", tuple([Operand(role, wis.at(dtype, 3, 4)) for role, dtype in roles]), (), attrs)
    return guards.guarded(library_call(form), form).instead


@pytest.mark.parametrize(("name", "other"), [("div", OperandRef(0)), ("tril", 1)])
def test_result_may_lie_where_the_argument_lies_after_a_law_was_checked(wis, monkeypatch, name, other):
    call = _out(wis, f"aten.{name}.out", (OperandRef(0), other), (("out", OperandRef(1)),), [DType.F32])
    monkeypatch.setattr(writing.Layout, "apart", None)  # no other memory
    t = torch.arange(12.0).reshape(3, 4) + 1
    expected = t / t if name == "div" else t.tril(1)
    assert call(t, t if name == "div" else 1, out=t) is t and torch.equal(t, expected)


def test_result_that_lies_over_an_argument_is_computed_apart(wis):
    call = _out(wis, "aten.cumsum.out", (OperandRef(0), 1), (("out", OperandRef(1)),), [DType.F32])
    memory = torch.arange(16.0)
    x, out = memory[:12].view(3, 4), memory[4:].view(3, 4)
    expected = x.cumsum(1)
    assert call(x, 1, out=out) is out and torch.equal(out, expected) and memory[:4].tolist() == [0, 1, 2, 3]


def test_results_of_which_one_lies_over_an_argument_are_returned_in_order(wis):
    results = (("indices", OperandRef(2)), ("values", OperandRef(1)))
    call = _out(wis, "aten.topk.values", (OperandRef(0), 4, 1), results, [DType.F32, DType.I64])
    x, indices = torch.tensor([[3.0, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]]), torch.zeros(3, 4, dtype=torch.int64)
    expected = x.topk(4, 1)
    values, places = call(x, 4, 1, indices=indices, values=x)
    assert values is x and places is indices
    assert torch.equal(x, expected.values) and torch.equal(indices, expected.indices)
    with pytest.raises(RuntimeError, match="must not overlap each other"):
        call(x, 4, 1, indices=indices, values=indices)


def test_element_that_the_operator_does_not_write_keeps_its_value(wis):
    x = torch.arange(12.0).reshape(3, 4)
    layout = writing.Layout("out", x.T)
    apart = writing.shared_results(torch.ops.aten.mm.out, [layout], [x], exact=False)[id(layout.tensor)]
    assert apart.tensor.data_ptr() != x.data_ptr()
    assert torch.equal(apart.tensor, x.T) and apart.tensor.stride() == (1, 4)


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


def test_triangular_factors_of_a_batch_into_results_with_gaps_are_refused(wis):
    """The library steps through such a result as if its matrices were adjacent, and writes beyond it."""
    names, lu = ("P", "L", "U"), torch.linalg.lu_factor(torch.rand(2, 3, 3) + torch.eye(3))
    out = tuple([(name, OperandRef(2 + k)) for k, name in enumerate(names)])
    attrs = (("args", (OperandRef(0), OperandRef(1))), ("kwargs", out), ("name", "aten.lu_unpack.out"))
    batch, pivots = wis.at(DType.F32, 2, 3, 3), wis.at(DType.I32, 2, 3)

    def unpack(upper, u):
        views = [(Role.IN, batch), (Role.IN, pivots), (Role.OUT, batch), (Role.OUT, batch), (Role.OUT, upper)]
        form = Form("extern", tuple([Operand(role, v) for role, v in views]), (), attrs)
        call = guards.guarded(library_call(form), form).instead
        call(*lu, **dict(zip(names, (torch.zeros(2, 3, 3), torch.zeros(2, 3, 3), u), strict=True)))
        return u

    assert torch.equal(unpack(batch, torch.zeros(2, 3, 3)), torch.lu_unpack(*lu)[2])
    with pytest.raises(RuntimeError, match="U must be contiguous"):
        unpack(wis.at(DType.F32, 2, 3, 3, strides=(1, 6, 2)), torch.zeros(3, 3, 2).permute(2, 0, 1))
