"""LU decompositions of batches on a CPU have the library's bits, also in a process that sets the number of threads."""

import pytest
import torch
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_executor.runtime.lu import LU, UNDIVIDED, lu_of_batch
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role

ROWS = 256
SOLVES = ("_linalg_solve_ex",)


def matrices(*batch):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*batch, ROWS, ROWS, generator=generator) + ROWS * torch.eye(ROWS)


def form_of(wis, name, *batch, rows=ROWS, columns=None):
    args = (OperandRef(0), OperandRef(1)) if name in SOLVES else (OperandRef(0),)
    operands = [Operand(Role.IN, wis.at(DType.F32, *batch, rows, columns or rows)) for _ in args]
    return Form("extern", tuple(operands), (), (("args", args), ("kwargs", ()), ("name", f"aten.{name}.default")))


@pytest.mark.parametrize("name", sorted(LU))
def test_decomposition_of_batch_has_the_bits_of_its_single_matrices(wis, two_threads, name):
    form = form_of(wis, name, 3)
    call = HOST.library(library_call(form), form).instead
    a = matrices(3)
    arguments = [a, a.flip(-1)] if name in SOLVES else [a]
    found = call(*arguments)
    assert torch.get_num_threads() == 2
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


@pytest.mark.parametrize(("rows", "columns"), [(UNDIVIDED, UNDIVIDED), (UNDIVIDED + 1, 8), (8, UNDIVIDED + 1)])
def test_batch_of_matrices_that_mkl_does_not_divide_is_left_to_the_library(wis, two_threads, rows, columns):
    form = form_of(wis, "linalg_lu_factor_ex", 3, rows=rows, columns=columns)
    assert (lu_of_batch(library_call(form), form) is None) == (max(rows, columns) <= UNDIVIDED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_library_writes_all_pivots_of_matrices_that_mkl_does_not_divide(two_threads, dtype):
    for rows, columns in ((UNDIVIDED, UNDIVIDED), (UNDIVIDED, 33), (31, UNDIVIDED)):
        for seed in range(8):
            a = torch.randn(16, rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(seed))
            p, lower, upper = torch.lu_unpack(*torch.linalg.lu_factor(a))
            torch.testing.assert_close(p @ lower @ upper, a)


def test_decomposition_of_tall_matrices_returns(wis, two_threads):
    """MKL in the library's threads sometimes waits for ever here."""
    form = form_of(wis, "linalg_lu_factor_ex", 8, rows=256, columns=128)
    call = HOST.library(library_call(form), form).instead
    for seed in range(examples(3, 8)):
        a = torch.randn(8, 256, 128, generator=torch.Generator().manual_seed(seed))
        p, lower, upper = torch.lu_unpack(*call(a)[:2])
        torch.testing.assert_close(p @ lower @ upper, a, atol=1e-4, rtol=1e-4)
