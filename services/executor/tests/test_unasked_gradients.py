"""The gradient of a group norm of channels-last memory is made without that of its input, and the process goes on."""

import itertools

import pytest
import torch
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role

NAME = "aten.native_group_norm_backward.default"


@pytest.mark.parametrize("asked", list(itertools.product((False, True), repeat=3)))
def test_gradients_that_are_asked_for_are_those_of_all(wis, asked):
    operands = tuple(Operand(Role.IN, wis.at(DType.F32, 1)) for _ in range(5))
    args = tuple(OperandRef(k) for k in range(5))
    form = Form("extern", operands, (), (("args", args), ("kwargs", ()), ("name", NAME)))
    backward = HOST.library(library_call(form), form).instead
    n, channels, size, groups = 2, 16, 30, 8
    x, d = [torch.randn(n, channels, 6, 5).contiguous(memory_format=torch.channels_last) for _ in range(2)]
    w = torch.randn(channels)
    _, mean, rstd = torch.native_group_norm(x, w, w, n, channels, size, groups, 1e-5)
    found = backward(d, x, mean, rstd, w, n, channels, size, groups, list(asked))
    good = torch.ops.aten.native_group_norm_backward(d, x, mean, rstd, w, n, channels, size, groups, [True] * 3)
    for one, all_, yes in zip(found, good, asked, strict=True):
        assert torch.equal(one, all_) if yes else one is None
