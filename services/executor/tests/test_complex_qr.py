"""QR decompositions of complex matrices on a CPU have a real diagonal with any number of threads."""

import pytest
import torch
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.complex_qr import QR, complex_qr
from wooly_executor.runtime.device import HOST
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, OperandRef, Role


def form_of(wis, name, dtype, *sizes):
    operands = (Operand(Role.IN, wis.at(dtype, *sizes)),)
    return Form("extern", operands, (), (("args", (OperandRef(0),)), ("kwargs", ()), ("name", f"aten.{name}.default")))


@pytest.mark.parametrize("name", sorted(QR))
@pytest.mark.parametrize(("rows", "columns"), [(100, 100), (261, 300)])
def test_r_has_real_diagonal_and_the_bits_of_one_thread(wis, two_threads, name, rows, columns):
    form = form_of(wis, name, DType.C128, rows, columns)
    call = HOST.library(library_call(form), form).instead
    a = torch.randn(rows, columns, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    found = call(a)
    assert torch.get_num_threads() == 2
    r = found[1] if name == "linalg_qr" else found[0]
    assert r.diagonal().imag.abs().max() == 0
    torch.set_num_threads(1)
    for one, other in zip(found, getattr(torch.ops.aten, name).default(a), strict=True):
        assert torch.equal(one, other)


def test_real_and_tall_matrices_are_left_to_the_library(wis, two_threads):
    for dtype, rows in ((DType.F64, 100), (DType.C128, 101)):
        form = form_of(wis, "linalg_qr", dtype, rows, 100)
        assert complex_qr(library_call(form), form) is None


@pytest.mark.parametrize("sizes", [(), (100,)])
def test_what_is_no_matrix_is_left_to_the_library_which_refuses_it(wis, two_threads, sizes):
    form = form_of(wis, "linalg_qr", DType.C128, *sizes)
    assert complex_qr(library_call(form), form) is None
