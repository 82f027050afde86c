"""Operators that are recorded with native opcodes, and that their results equal the CPU's bit for bit."""

import pytest
import torch
from wooly.kernels.opcodes import native_form
from wooly_wis.dtypes import DType
from wooly_wis.program import Operand, OperandRef, ParamKind, ParamRef, Role, View

aten = torch.ops.aten
V = View(DType.F32, (3, 4), (4, 1))
IN, INOUT, OUT = [Operand(role, V) for role in (Role.IN, Role.INOUT, Role.OUT)]
A, B, P = OperandRef(0), OperandRef(1), ParamRef(0)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "operands", "params", "expected"),
    [
        (aten.add.Tensor, (A, B), (), (IN, IN, OUT), (), ("add", (A, B))),
        (aten.add_.Tensor, (A, P), (), (INOUT,), (ParamKind.F64,), ("add", (A, P))),
        (aten.add.Tensor, (A, B), (("alpha", P),), (IN, IN, OUT), (ParamKind.I64,), ("add", (A, B, P))),
        (aten.gelu.default, (A,), (("approximate", "tanh"),), (IN, OUT), (), ("gelu_tanh", (A,))),
        (aten.gelu.default, (A,), (), (IN, OUT), (), ("gelu", (A,))),
        (aten.clamp.default, (A, P), (), (IN, OUT), (ParamKind.F64,), ("clamp_min", (A, P))),
        (aten._softmax.default, (A, 1, False), (), (IN, OUT), (), ("softmax", (A, 1))),
        (aten.mean.dim, (A, (0,), True), (), (IN, Operand(Role.OUT, View(DType.F32, (1, 4), (4, 1)))), (),
         ("mean", (A, (0,), True))),
    ],
)  # fmt: skip
def test_operator_has_an_opcode(op, args, kwargs, operands, params, expected):
    form = native_form(op, args, kwargs, operands, params)
    assert form is not None
    assert (form.opcode, form.attr("args")) == expected


def test_fill_has_own_opcode():
    form = native_form(aten.fill_.Scalar, (A, P), (), (INOUT,), (ParamKind.F64,))
    assert form is not None
    assert (form.opcode, form.operands, form.attr("value")) == ("fill", (OUT,), P)


@pytest.mark.parametrize(
    ("op", "args", "operands"),
    [
        (aten.cholesky_inverse.default, (A,), (IN, OUT)),
        (aten.div.Tensor_mode, (A, B), (IN, IN, OUT)),
        (aten._softmax.default, (A, 1, True), (IN, OUT)),
        (aten.add.Tensor, (A, B), (IN, IN, Operand(Role.OUT, View(DType.F64, (3, 4), (4, 1))))),
    ],
    ids=["no row", "no rounding mode", "another meaning", "another dtype"],
)
def test_operator_without_opcode_is_extern(op, args, operands):
    assert native_form(op, args, (), operands, ()) is None


def test_training_step_uses_native_opcodes(cuda):
    """Lists the instructions of a small training step that are `extern`, which the compiler cannot optimize."""
    from wooly import api

    recorder = api._attached.device.recorder
    before = len(recorder._forms)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    loss = torch.nn.functional.cross_entropy(
        model(torch.ones(4, 5, device="cuda")), torch.zeros(4, dtype=torch.long, device="cuda")
    )
    loss.backward()
    optimizer.step()
    loss.item()
    names = {f.name for f in recorder._forms[before:]}
    assert {"addmm", "mm", "gelu", "gelu_backward", "log_softmax", "sum", "addcdiv", "lerp"} <= names
    assert {n for n in names if n.startswith("aten.")} <= {
        "aten.nll_loss_forward.default",
        "aten.nll_loss_backward.default",
    }
