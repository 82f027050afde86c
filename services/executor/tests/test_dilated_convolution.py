"""The gradient of the weight of a dilated convolution in bfloat16 is right on a CPU with any layout."""

import itertools

import pytest
import torch
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role

BACKWARD = torch.ops.aten.convolution_backward.default


def backward_of(wis):
    operands = tuple(Operand(Role.IN, wis.at(DType.BF16, 1)) for _ in range(3))
    args = tuple(OperandRef(k) for k in range(3))
    form = Form("extern", operands, (), (("args", args), ("kwargs", ()), ("name", "aten.convolution_backward.default")))
    return HOST.library(library_call(form), form).instead


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_of_dilated_convolution_are_those_of_float32_in_each_layout(wis, two_threads, transposed, groups):
    backward, chance = backward_of(wis), torch.Generator().manual_seed(1)
    x = torch.randn(3, 33, 31, 29, generator=chance).bfloat16()
    w = torch.randn(33, 33 // groups, 3, 3, generator=chance).bfloat16()
    for dilation, first, second in itertools.product((1, 2), *[(torch.contiguous_format, torch.channels_last)] * 2):
        x, w = x.contiguous(memory_format=first), w.contiguous(memory_format=second)
        how = ([1, 1], [2, 2], [dilation] * 2, transposed, [0, 0], groups)
        y = torch.ops.aten.convolution.default(x, w, None, *how)
        d = torch.randn(y.shape, generator=chance).bfloat16()
        found = backward(d, x, w, [33], *how, [True, True, True])
        good = BACKWARD(d.float(), x.float(), w.float(), [33], *how, [True, True, True])
        for one, other in zip(found, good, strict=True):
            assert one.dtype == torch.bfloat16
            assert (one.float() - other).abs().max() < 0.02 * other.abs().max()
        alone = backward(d, x, w, None, *how, [False, True, False])
        assert alone[0] is None and alone[2] is None and torch.equal(alone[1], found[1])


def test_gradients_of_tensors_with_gaps_have_the_librarys_bits(wis, two_threads):
    backward, chance = backward_of(wis), torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, 4, 4, 4, 2, generator=chance).bfloat16()[..., 0]
    w = torch.randn(2, 2, 4, 5, 6, 2, generator=chance).bfloat16()[..., 0]
    how = ([3, 2, 1], [1, 2, 3], [4, 4, 4], True, [2, 3, 1], 2)
    d = torch.randn(torch.ops.aten.convolution.default(x, w, None, *how).shape, generator=chance).bfloat16()
    good = BACKWARD(d, x, w, [4], *how, [True, True, True])
    for one, other in zip(backward(d, x, w, [4], *how, [True, True, True]), good, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_contiguous_and_undilated_convolutions_have_the_librarys_bits(wis, two_threads):
    backward, chance = backward_of(wis), torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 13, 11, generator=chance).bfloat16()
    w = torch.randn(8, 8, 3, 3, generator=chance).bfloat16()
    for dilation, layout in ((1, torch.channels_last), (2, torch.contiguous_format)):
        x = x.contiguous(memory_format=layout)
        how = (None, [1, 1], [2, 2], [dilation] * 2, False, [0, 0], 1, [True, True, False])
        d = torch.randn(2, 8, 17 - 2 * dilation, 15 - 2 * dilation, generator=chance).bfloat16()
        for one, other in zip(backward(d, x, w, *how)[:2], BACKWARD(d, x, w, *how)[:2], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("asked", [(True, False, True), (False, False, True)])
def test_gradient_of_weight_that_nobody_asks_for_is_left_out(wis, asked):
    x, w, d = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(2, 4, 4, 4)
    how = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    found = backward_of(wis)(d, x, w, *how, list(asked))
    assert [t is not None for t in found] == list(asked)
    assert torch.equal(found[2], BACKWARD(d, x, w, *how, [True, True, True])[2])
