"""Products that are not computed by one call of the BLAS: which ones, and that the results agree."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_executor.runtime import products
from wooly_executor.runtime.adoption import Layout
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import HOST, InexactHost
from wooly_executor.runtime.segments import Invoke, Segment
from wooly_testkit.tape import Tape
from wooly_wis.assembly import row_major
from wooly_wis.dtypes import DType
from wooly_wis.program import View

F32 = DType.F32
is_measured_chip = products._mkl_is_slow()
splits_exactly = products._splits_exactly.__wrapped__  # without what earlier calls found


@pytest.fixture(autouse=True)
def measured_chip(monkeypatch):
    """Treat every machine as one on which MKL is slow. On others than those, parts are not compared with its bits."""
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: True)
    if not is_measured_chip:
        monkeypatch.setattr(products, "_splits_exactly", functools.cache(lambda rows, threads: True))


@pytest.fixture
def threads():
    """Returns a function that sets the number of threads for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def form_of(write):
    t = Tape()
    write(t)
    program, _ = t.program()
    return next(program.forms[i.form] for i in program.body if program.forms[i.form].opcode != "alloc")


def product(opcode, rows=300, depth=256, columns=128, dtype=F32, bias=None, strides=None, in_rows=False, sizes=None):
    """An instruction. The second factor of `mm` and `addmm` is a transposed weight, or one with its own rows (`in_rows`).

    `sizes` and `strides` are those of the first factor.
    """

    def write(t):
        x, w, c = t.input(dtype, rows, depth), t.input(dtype, columns, depth), t.input(dtype, *(bias or (columns,)))
        x = x if strides is None else x.seen(sizes or (rows, depth), strides)
        turned = w.seen((depth, columns), (columns, 1) if in_rows else (1, depth))
        args = {"linear": (x, w), "linear with a bias": (x, w, c), "mm": (x, turned), "addmm": (c, x, turned)}[opcode]
        t.op(opcode.split(" ", maxsplit=1)[0], *args)

    return form_of(write)


def operands(form):
    """Random contents of the operands."""
    generator = torch.Generator().manual_seed(0)
    views = [o.view for o in form.operands[:-1]]
    return [torch.randn(v.numel, generator=generator).as_strided(v.sizes, v.strides) for v in views]


OPCODES = ("linear", "linear with a bias", "mm", "addmm")


@pytest.mark.parametrize("opcode", OPCODES)
def test_onednn_product_differs_only_in_last_bits(opcode):
    form = product(opcode)
    given = operands(form)
    call = InexactHost().library(library_call(form), form)
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


def split(form):
    return HOST.library(library_call(form), form)


def in_segment(call, given):
    """The result of a call within a segment, which is worth it for three calls and more."""
    inputs, segment = len(given), Segment()
    for k in range(3):
        named = {i: i for i in range(inputs)}
        segment.add(Invoke(call, named, 0, (), {}, trusted=[Layout.SAME], results=(inputs + k,)), k)
    part, wrong = segment.compile(lambda name: True)
    assert part is not None and not wrong
    frame = SimpleNamespace(registers=[*given, None, None, None], bases=[], params=[])
    part.step({})(frame)
    return frame.registers[-1]


@pytest.mark.skipif(not is_measured_chip, reason="MKL may have other bits on this chip")
@settings(deadline=None, max_examples=60)
@given(
    opcode=st.sampled_from(OPCODES),
    rows=st.one_of(st.just(1), st.integers(1, 128)),
    odd=st.integers(0, 40),
    depth=st.integers(256, 1500),
    width=st.integers(16, 80),
    threads=st.sampled_from([2, 3, 4, 8]),
    in_rows=st.booleans(),
)
def test_split_product_has_the_bits_of_the_library(opcode, rows, odd, depth, width, threads, in_rows):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        columns = 4 * width * threads if rows > 1 else 32 * width * threads + odd
        form = product(opcode, rows=rows, depth=depth, columns=columns, in_rows=in_rows)
        call, given = split(form), operands(form)
        small = 2 * rows * depth * columns <= products.SMALL_PRODUCT
        if small or depth * columns < products.LARGE_FACTOR or not products._splits_exactly(rows, threads):
            assert call.instead is None
            return
        found, expected = call.instead(*given), call.op(*given)
        assert torch.equal(found, expected) and found.stride() == expected.stride()
        assert torch.equal(in_segment(call, given), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not is_measured_chip, reason="MKL may have other bits on this chip")
@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("in_rows", [False, True])
def test_columns_that_are_left_over_are_computed_for_one_row(opcode, in_rows, threads):
    """A vocabulary is often no multiple of the parts."""
    threads(2)
    form = product(opcode, rows=1, depth=512, columns=5003, in_rows=in_rows)
    call, given = split(form), operands(form)
    assert call.instead.rest is not None
    expected = call.op(*given)
    assert torch.equal(call.instead(*given), expected) and torch.equal(in_segment(call, given), expected)


@pytest.mark.skipif(not is_measured_chip, reason="MKL may have other bits on this chip")
@pytest.mark.parametrize("opcode", ["linear", "linear with a bias"])
@pytest.mark.parametrize("rows", [1, 2, 4, 33])
@pytest.mark.parametrize(
    "seen",
    [
        lambda rows, depth: ((rows, 1, depth), (depth, depth, 1)),
        lambda rows, depth: ((rows, 1, depth), (depth, rows * depth, 1)),  # (1, rows, depth), transposed
        lambda rows, depth: ((1, rows, depth), (7 * depth, depth, 1)),  # from a longer sequence
        lambda rows, depth: ((1, rows, 1, depth), (depth, depth, 1, 1)),
    ],
    ids=["rows", "transposed rows", "longer", "four dimensions"],
)
def test_split_product_of_a_sequence_has_the_bits_of_the_library(opcode, rows, seen, threads):
    """The library computes each row of some views as its own product. The strides of a dimension with one element decide it."""
    threads(2)
    sizes, strides = seen(rows, 512)
    form = product(opcode, rows=rows, depth=512, columns=1024, sizes=sizes, strides=strides)
    call, given = split(form), operands(form)
    expected = call.op(*given)
    assert torch.equal((call.instead or call.op)(*given), expected)
    assert torch.equal(in_segment(call, given), expected)


def test_split_product_computes_each_part_as_its_own_product(monkeypatch, threads):
    """Two threads get four parts, whose products are one call."""
    threads(2)
    form = product("linear with a bias", rows=4, depth=512, columns=1024)
    call, given = split(form), operands(form)
    seen = []
    batch = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *a: seen.append([t.shape for t in a]) or batch(*a))
    torch.testing.assert_close(call.instead(*given), call.op(*given))
    assert seen == [[(4, 4, 256), (4, 4, 512), (4, 512, 256)]]


def test_piece_of_a_split_product_uses_library(threads):
    """The instruction is split into pieces with other shapes, for work that gives way to other work."""
    threads(2)
    form = product("linear", rows=4, depth=512, columns=1024)
    x, w = operands(form)
    call = split(form)
    assert torch.equal(call.instead(x[:1], w), call.op(x[:1], w))
    assert torch.equal(call.instead(x, w[:100]), call.op(x, w[:100]))


SPLIT = {"rows": 4, "depth": 512, "columns": 1024}


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize(
    "other",
    [
        {"rows": 129},
        {"depth": 255},
        {"columns": 1026},  # not a multiple of four in each part
        {"depth": 256, "columns": 1000},  # a small factor
        {"rows": 2},  # a small product
        {"dtype": DType.F64},
        {"strides": (1, 4)},
    ],
    ids=str,
)
def test_product_that_gains_nothing_is_not_split(opcode, other, threads):
    threads(2)
    assert split(product(opcode, **SPLIT)).instead is not None
    assert split(product(opcode, **SPLIT | other)).instead is None


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("way", ["parts", "oneDNN"])
def test_product_whose_views_do_not_fit_is_left_to_the_library(opcode, way, threads):
    """The library refuses such instructions of hostile clients.

    Parts of the second factor would be a product of something. oneDNN ends the process for a second factor with three dimensions.
    """
    threads(2)
    fitting = product(opcode, rows=4 if way == "parts" else 300, depth=512, columns=1024)
    position = products._PRODUCTS[fitting.opcode][1]
    first, out = position - 1, len(fitting.operands) - 1
    others = {
        "depth": (position, (1024, 500)),
        "turned": (position, tuple(reversed(fitting.operands[position].view.sizes))),
        "three dimensions": (position, (1, *fitting.operands[position].view.sizes)),
    }
    if way == "parts":
        others["result"] = (out, (1024, 4))
    if fitting.opcode != "linear":
        others["batch"] = (first, (1, *fitting.operands[first].view.sizes))
    find = {
        "parts": lambda form: products.split_product(form, torch.ops.aten.mm.default),
        "oneDNN": products.onednn_product,
    }[way]
    assert find(fitting) is not None
    for name, (k, sizes) in others.items():
        changed = list(fitting.operands)
        changed[k] = replace(changed[k], view=View(F32, sizes, row_major(sizes)))
        assert find(replace(fitting, operands=tuple(changed))) is None, name


@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("strides", [(1, 7), (7, 1), (0, 1), (1, 0), (0, 0), (2, 1024), (512, 2)], ids=str)
def test_product_with_a_factor_that_is_no_matrix_is_left_to_the_library(opcode, strides, threads):
    """oneDNN refuses most of these views, which the library copies."""
    threads(2)
    for rows, find in ((300, products.onednn_product), (4, split_by_columns)):
        fitting = product(opcode, rows=rows, depth=512, columns=1024)
        position = products._PRODUCTS[fitting.opcode][1]
        assert find(fitting) is not None
        changed = list(fitting.operands)
        changed[position] = replace(changed[position], view=replace(changed[position].view, strides=strides))
        form = replace(fitting, operands=tuple(changed))
        assert find(form) is None
        given = operands_of(form)
        call = InexactHost().library(library_call(form), form)
        assert torch.isfinite((call.instead or call.op)(*given)).all()


def split_by_columns(form):
    return products.split_product(form, torch.ops.aten.mm.default)


def operands_of(form):
    """Operands on memory that has all elements of their views."""
    views = [o.view for o in form.operands[:-1]]
    return [torch.ones(v.end // 4).as_strided(v.sizes, v.strides) for v in views]


def test_product_on_one_thread_is_not_split(threads):
    threads(1)
    assert split(product("linear", **SPLIT)).instead is None


def test_product_whose_parts_have_other_bits_is_not_split(monkeypatch, threads):
    threads(2)
    monkeypatch.setattr(products, "_splits_exactly", lambda rows, threads: rows != 4)
    assert split(product("linear", **SPLIT)).instead is None
    assert split(product("linear", **SPLIT | {"rows": 8})).instead is not None


def test_exactness_is_found_by_comparison(monkeypatch, threads):
    """A library that computes few rows in another order is noticed."""
    threads(2)
    monkeypatch.setattr(products.SplitProduct, "__call__", lambda self, x, w: (x.double() @ w.double()).float())
    assert not splits_exactly(4, 2)
