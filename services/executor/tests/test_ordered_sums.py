"""Sums at repeated indices on a CPU have the same bits in each run, with any number of threads."""

import pytest
import torch
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_executor.runtime.ordered_sums import ordered_sum
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role

NUMBERS = 200_000
TARGETS = 7


def form_of(wis, name, accumulate, dtype=DType.F32):
    index = (OperandRef(1),) if "index" in name else OperandRef(1)
    operands = (
        Operand(Role.IN, wis.at(dtype, TARGETS)),
        Operand(Role.IN, wis.at(DType.I64, NUMBERS)),
        Operand(Role.IN, wis.at(dtype, NUMBERS)),
    )
    args = (OperandRef(0), index, OperandRef(2), accumulate)
    return Form("extern", operands, (), (("args", args), ("kwargs", ()), ("name", f"aten.{name}.default")))


@pytest.mark.parametrize("name", ["_index_put_impl_", "put_"])
def test_sum_at_repeated_indices_has_the_bits_of_one_thread(wis, two_threads, name):
    form = form_of(wis, name, True)
    call = HOST.library(library_call(form), form).instead
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, TARGETS, (NUMBERS,), generator=generator)
    values = torch.randn(NUMBERS, generator=generator)
    arguments = ([index] if "index" in name else index, values, True)
    found = [call(torch.zeros(TARGETS), *arguments) for _ in range(8)]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    expected = getattr(torch.ops.aten, name).default(torch.zeros(TARGETS), *arguments)
    assert all(torch.equal(t, expected) for t in found)


def test_operator_with_one_order_is_left_to_the_library(wis, two_threads):
    for form in (form_of(wis, "_index_put_impl_", False), form_of(wis, "_index_put_impl_", True, DType.F64)):
        assert ordered_sum(library_call(form), form) is None
    form = form_of(wis, "_index_put_impl_", True)
    torch.set_num_threads(1)
    assert ordered_sum(library_call(form), form) is None
