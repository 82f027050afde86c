"""Small products on a CPU are computed on the device thread's core, also within segments."""

from types import SimpleNamespace

import pytest
import torch
from wooly_executor.runtime.adoption import Layout
from wooly_executor.runtime.calls import LibraryCall, library_call
from wooly_executor.runtime.device import HOST, TorchDevice
from wooly_executor.runtime.invocation import ONE_CORE, flagged, settings_of
from wooly_executor.runtime.segments import Invoke, Segment, Write
from wooly_executor.runtime.torch_private import limit_products
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role, View

pytestmark = [
    pytest.mark.skipif(limit_products is None, reason="this build of torch has no MKL"),
    pytest.mark.usefixtures("two_threads"),
]


def matrix(rows, columns):
    return View(DType.F32, (rows, columns), (columns, 1))


def linear(rows, inputs, outputs):
    views = matrix(rows, inputs), matrix(outputs, inputs), matrix(rows, outputs)
    roles = Role.IN, Role.IN, Role.OUT
    operands = tuple(Operand(r, v) for r, v in zip(roles, views, strict=True))
    return Form("linear", operands, attrs=(("args", (OperandRef(0), OperandRef(1))),))


def settings(form, device=HOST):
    return settings_of(form, library_call(form), device)


def test_small_product_is_computed_on_one_core_and_a_large_one_on_all():
    assert settings(linear(4, 64, 192)) == (ONE_CORE,)
    assert settings(linear(64, 1024, 1024)) == ()
    assert ONE_CORE not in (settings(linear(4, 64, 192), TorchDevice(torch.device("cuda"))) or ())


def test_operator_without_product_depends_on_no_setting():
    view = matrix(4, 64)
    form = Form("relu", (Operand(Role.IN, view), Operand(Role.OUT, view)), attrs=(("args", (OperandRef(0),)),))
    assert settings(form) is None


def test_executor_with_one_thread_needs_no_setting():
    torch.set_num_threads(1)
    assert settings(linear(4, 64, 192)) == ()


@pytest.mark.parametrize("fails", [False, True])
def test_limit_holds_during_the_call_only(fails):
    seen = []

    def call(frame):
        seen.append(limit_products(1))  # returns the limit before
        if fails:
            raise ValueError
        return 5

    form = linear(4, 64, 192)
    run = flagged(call, form, library_call(form), HOST)
    if fails:
        with pytest.raises(ValueError):
            run(None)
    else:
        assert run(None) == 5
    assert seen == [1] and limit_products(2) == 2


def test_segment_is_divided_between_small_and_large_products():
    small, large = linear(4, 64, 192), linear(64, 1024, 1024)
    segment = Segment()

    def step(form):
        return Invoke(
            library_call(form), {0: 0, 1: 1}, 0, (), {}, flags=settings(form), trusted=[Layout.SAME], results=(2,)
        )

    segment.add(step(small), 0)
    assert segment.clashes(step(large)) and not segment.clashes(step(small))
    assert not segment.clashes(Write(torch.ops.aten.copy_.default, (0, 1)))


def test_list_of_indices_is_part_of_a_segment():
    """A list of tensors may leave dimensions out."""
    x, at, values = torch.zeros(5, 3), torch.tensor([2, 0]), torch.tensor(7.0)
    op, segment = torch.ops.aten.index_put.default, Segment()
    for step, indices in enumerate([(OperandRef(1),), (None, OperandRef(1))]):
        call = LibraryCall(op, (OperandRef(0), indices, OperandRef(2)), ())
        segment.add(Invoke(call, {0: 0, 1: 1, 2: 2}, 0, (), {}, trusted=[Layout.SAME], results=(3 + step,)), step)
    part, wrong = segment.compile(lambda name: True)
    assert part is not None and not wrong
    frame = SimpleNamespace(registers=[x, at, values, None, None], bases=[], params=[])
    part.step({})(frame)
    assert torch.equal(frame.registers[3], x.index_put((at,), values))
    expected = x.clone()
    expected[:, at] = values
    assert torch.equal(frame.registers[4], expected)
