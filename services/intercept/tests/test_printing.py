"""The text of a tensor: the same as on the CPU, with one read of the device."""

import re

import pytest
import torch
from wooly import api

SHAPES = [(), (5,), (1001,), (40, 30), (3, 2000), (2000, 3), (7, 8, 9, 10), (10, 10, 10), (11, 10, 10), (5,) * 5]


def without_device(text):
    """The text without the name of the device, and without line breaks, which depend on the length of that name."""
    return " ".join(re.sub(r",?\s*device='cuda:0'", "", text).split())


@pytest.mark.parametrize(
    "options", [{}, {"edgeitems": 0}, {"edgeitems": 1}, {"threshold": 10}, {"threshold": 0}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_text_of_numbers_equals_cpu(cuda, shape, options):
    numbers = torch.randn(shape) * 1000
    with torch._tensor_str.printoptions(**options):
        for t in (numbers, numbers.int(), numbers > 0, numbers.half()):
            assert without_device(repr(t.to(cuda))) == without_device(repr(t))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(60, 60, dtype=torch.complex64).conj(),
        lambda: torch.randn(4, 6, dtype=torch.complex128).conj().imag,
        lambda: torch.randn(60, 40).t()[::2],
        lambda: torch.randn(4, 40, 30).to(torch.float8_e4m3fn),
        lambda: torch.empty(0, 3),
        lambda: torch.eye(40).to_sparse(),
        lambda: torch.nn.Parameter(torch.randn(30, 40)),
    ],
)
def test_text_of_kinds_of_tensors_equals_cpu(cuda, make):
    t = make()
    there = torch.nn.Parameter(t.to(cuda)) if isinstance(t, torch.nn.Parameter) else t.to(cuda)
    assert without_device(repr(there)) == without_device(repr(t))


@pytest.mark.parametrize("shape", [(900,), (30, 30), (100, 100, 100)], ids=str)
def test_text_needs_one_read(cuda, shape):
    t = torch.arange(float(torch.Size(shape).numel()), device=cuda).reshape(shape)  # not known to the client
    before = api.session_stats()["syncs"]
    repr(t)
    assert api.session_stats()["syncs"] == before + 1
