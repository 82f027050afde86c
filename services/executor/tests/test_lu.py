"""LU decompositions of batches on a CPU have the library's bits, also in a process that sets the number of threads."""

import pytest
import torch
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_executor.runtime.lu import LU, lu_of_batch
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role

ROWS = 256
SOLVES = ("_linalg_solve_ex",)


def matrices(*batch):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*batch, ROWS, ROWS, generator=generator) + ROWS * torch.eye(ROWS)


def form_of(wis, name, *batch):
    args = (OperandRef(0), OperandRef(1)) if name in SOLVES else (OperandRef(0),)
    operands = [Operand(Role.IN, wis.at(DType.F32, *batch, ROWS, ROWS)) for _ in args]
    return Form("extern", tuple(operands), (), (("args", args), ("kwargs", ()), ("name", f"aten.{name}.default")))


@pytest.mark.parametrize("name", sorted(LU))
def test_decomposition_of_batch_has_the_bits_of_one_matrix_after_another_on_one_core(wis, two_threads, name):
    form = form_of(wis, name, 3)
    call = HOST.library(library_call(form), form).instead
    a = matrices(3)
    arguments = [a, a.flip(-1)] if name in SOLVES else [a]
    found = call(*arguments)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    each = [getattr(torch.ops.aten, name).default(*[t[k] for t in arguments]) for k in range(3)]
    for k in range(3):
        for one, two in zip(found, each[k], strict=True):
            assert torch.equal(one[k], two)


def test_decomposition_of_one_matrix_is_left_to_the_library(wis, two_threads):
    for batch in ((), (1,)):
        form = form_of(wis, "linalg_lu_factor_ex", *batch)
        assert lu_of_batch(library_call(form), form) is None
    form = form_of(wis, "linalg_lu_factor_ex", 3)
    torch.set_num_threads(1)
    assert lu_of_batch(library_call(form), form) is None
