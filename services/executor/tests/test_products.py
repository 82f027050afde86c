"""Products in plans that may have other bits than the BLAS: which ones oneDNN computes, and that the results agree."""

import pytest
import torch
from wooly_executor.runtime import products
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

F32 = DType.F32


@pytest.fixture(autouse=True)
def quick_chip(monkeypatch):
    """Treat every machine as one on which oneDNN is faster."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)


def form_of(write):
    t = Tape()
    write(t)
    program, _ = t.program()
    return next(program.forms[i.form] for i in program.body if program.forms[i.form].opcode != "alloc")


def product(opcode, rows=300, depth=256, columns=128, dtype=F32, bias=None, strides=None):
    def write(t):
        x, w, c = t.input(dtype, rows, depth), t.input(dtype, columns, depth), t.input(dtype, *(bias or (columns,)))
        x = x if strides is None else x.seen((rows, depth), strides)
        turned = w.seen((depth, columns), (1, depth))
        args = {"linear": (x, w), "linear with a bias": (x, w, c), "mm": (x, turned), "addmm": (c, x, turned)}[opcode]
        t.op(opcode.split(" ", maxsplit=1)[0], *args)

    return form_of(write)


OPCODES = ("linear", "linear with a bias", "mm", "addmm")


@pytest.mark.parametrize("opcode", OPCODES)
def test_onednn_product_differs_only_in_last_bits(opcode):
    form = product(opcode)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(o.view.sizes, generator=generator).as_strided(o.view.sizes, o.view.strides)
             for o in form.operands[:-1]]  # fmt: skip
    call = products.InexactHost().library(library_call(form), form)
    assert call.instead is not None and HOST.library(library_call(form), form).instead is None
    found, expected = call.instead(*given), call.op(*given)
    assert found.stride() == expected.stride() == form.operands[-1].view.strides
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_onednn_bias_is_added_after_rounding():
    """So it does not matter whether a kernel adds the bias."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator) for s in [(300, 256), (128, 256), (128,)])
    together = products.onednn_product(product("linear with a bias"))(x, w, b)
    assert torch.equal(together, products.onednn_product(product("linear"))(x, w) + b)
    assert torch.equal(together, products.onednn_product(product("addmm"))(b, x, w.t()))
    assert torch.equal(together, products.onednn_product(product("addmm"))(b, x, w.t().contiguous()))


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize(
    "other", [{"rows": 255}, {"depth": 255}, {"columns": 127}, {"dtype": DType.F64}, {"strides": (1, 300)}], ids=str
)
def test_onednn_product_without_gain_uses_library(opcode, other):
    assert products.onednn_product(product(opcode)) is not None
    assert products.onednn_product(product(opcode, **other)) is None


def test_onednn_bias_of_other_size_uses_library():
    assert products.onednn_product(product("addmm", bias=(300, 128))) is None


def test_onednn_product_with_factors_uses_library():
    def write(t):
        t.op("addmm", t.input(F32, 256), t.input(F32, 256, 256), t.input(F32, 256, 256), 2, 1)

    assert products.onednn_product(form_of(write)) is None
