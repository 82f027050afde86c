"""Estimates, limits and pieces: every operator has an estimate, and pieces compute the same bits as the whole instruction."""

import dataclasses
import gc
import re
import weakref

import pytest
import torch
from wooly_executor.bounds import Bounds
from wooly_executor.bounds.division import EXACT, divide
from wooly_executor.bounds.estimate import is_estimated, work_of
from wooly_executor.bounds.limits import Limits, default_limits
from wooly_executor.bounds.work import broadcast
from wooly_executor.errors import OperationError, TooMuchWorkError
from wooly_executor.estimates import Estimate
from wooly_executor.runtime.buffers import WIS_DTYPE, Buffer, as_view
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_testkit.reference import ReferenceRuntime
from wooly_wis.dtypes import DType
from wooly_wis.externs import allowed
from wooly_wis.optable import TABLE, arguments
from wooly_wis.program import Form, Instruction, Operand, OperandRef, ParamKind, ParamRef, Program, Role, View
from wooly_wis.verifier import verify_program

WHOLE = Limits(1 << 62, 1 << 62)


def dense(dtype, *sizes):
    strides, n = [], 1
    for size in reversed(sizes):
        strides.append(n)
        n *= size
    return View(dtype, sizes, tuple(reversed(strides)))


def repeated(*sizes):
    return View(DType.F32, sizes, (0,) * len(sizes))


def extern(name, views, args, outs=()):
    operands = tuple(Operand(Role.IN, v) for v in views) + tuple(Operand(Role.OUT, v) for v in outs)
    return Form("extern", operands, (), (("args", tuple(args)), ("name", name)))


def native(opcode, views, args, out):
    operands = (Operand(Role.OUT, out), *[Operand(Role.IN, v) for v in views])
    return Form(opcode, operands, (), (("args", tuple(args)),))


def ref(k):
    return OperandRef(k)


def heads(b, h, n, d):
    """A view in the layout of projections: [b, n, h, d] in memory."""
    return View(F, (b, h, n, d), (n * h * d, d, h * d, 1))


def rows(b, h, n):
    """A view of one number per row, in the library's layout."""
    return View(F, (b, h, n), (n * h, 1, h))


def attention(b, h, n, m, d, mask=None):
    views = [heads(b, h, n, d), heads(b, h, m, d), heads(b, h, m, d), *([mask] if mask else [])]
    args = (*map(ref, range(3)), 0.0, mask is None)
    outs = [Operand(Role.OUT, heads(b, h, n, d)), Operand(Role.OUT, rows(b, h, n))]
    more = (("kwargs", (("attn_mask", ref(3)),)),) if mask else ()
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    return Form("extern", (*[Operand(Role.IN, v) for v in views], *outs), (), (("args", args), *more, ("name", name)))


def attention_backward(b, h, n, m, d):
    q, k = heads(b, h, n, d), heads(b, h, m, d)
    outs = [q, k, k]
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    return extern(name, [q, q, k, k, q, rows(b, h, n)], [*map(ref, range(6)), 0.0, True], outs)


# -- estimates -----------------------------------------------------------------------------------------------------------


def test_allow_list_every_operator_has_an_estimate():
    assert [name for name in sorted(allowed()) if not is_estimated(name)] == []


def _tensors_of(name):
    """Return, for each tensor argument of an operator, whether it is a list; None if the operator needs an argument of another
    type.
    """
    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    return [] if op is None else [(a, str(a.type)) for a in op._schema.arguments]


@pytest.mark.parametrize("size", [3, 1 << 12])
def test_work_every_operator_counts_its_broadcast_index_space(size):
    """Two operands repeat one element each, in different dimensions: the estimate is at least the size of the broadcast shape."""
    a, b = repeated(size, size, 1), repeated(size, 1, size)
    checked = 0
    for name in sorted(allowed()):
        args, views = [], []
        for argument, kind in _tensors_of(name):
            if argument.kwarg_only:
                break
            if kind in ("Tensor", "Optional[Tensor]"):
                args.append(ref(len(views)))
                views.append((a, b)[len(views) % 2])
            elif argument.has_default_value():
                break
            else:
                args.append({"number": 1, "float": 1.0, "bool": False, "int": 1}.get(kind, ()))
        if not views:
            continue
        checked += 1
        work = work_of(extern(name, views, args))
        shapes = [v.sizes for v in views]
        elementwise = work.flops == 0 and is_elementwise(name)
        least = broadcast(shapes) if elementwise else max(v.numel for v in views)
        assert work.elements + work.flops >= least, name
    assert checked > 800


def is_elementwise(name):
    from wooly_executor.bounds.elementwise import ELEMENTWISE, base_of

    return base_of(name.split(".")[1])[0] in ELEMENTWISE


F = DType.F32


@pytest.mark.parametrize(
    ("form", "least"),
    [
        (extern("aten.mm.default", [dense(F, 100, 200), dense(F, 200, 300)], [ref(0), ref(1)]), 2 * 100 * 200 * 300),
        (
            extern("aten.bmm.default", [repeated(50, 100, 200), repeated(50, 200, 30)], [ref(0), ref(1)]),
            2 * 50 * 100 * 200 * 30,
        ),
        (
            extern(
                "aten._grouped_mm.default",
                [repeated(10**4, 1000), repeated(64, 1000, 500), dense(DType.I32, 64)],
                [ref(0), ref(1), ref(2)],
            ),
            2 * 10**4 * 1000 * 500,
        ),
        (
            extern("aten._grouped_mm.default", [repeated(7, 100, 200), repeated(7, 200, 30)], [ref(0), ref(1)]),
            2 * 7 * 100 * 200 * 30,
        ),
        (
            extern(
                "aten.convolution.default",
                [repeated(2, 3, 64, 64), repeated(8, 3, 5, 5)],
                [ref(0), ref(1), None, (1, 1), (1000, 1000), (1, 1), False, (0, 0), 1],
            ),
            2 * 2 * 8 * 2060 * 2060 * 75,
        ),
        (
            extern(
                "aten._scaled_dot_product_flash_attention_for_cpu.default",
                [repeated(2, 4, 1000, 64)] * 3,
                [ref(0), ref(1), ref(2)],
            ),
            4 * 8 * 1000 * 1000 * 64,
        ),
        (extern("aten._linalg_svd.default", [repeated(7, 500, 500)], [ref(0)]), 20 * 7 * 500**3),
        (
            extern(
                "aten._cdist_forward.default", [repeated(10**5, 64), repeated(10**5, 64)], [ref(0), ref(1), 2.0, None]
            ),
            10**10 * 64,
        ),
        (
            extern("aten.im2col.default", [repeated(1, 1, 2000, 2000)], [ref(0), (999, 999), (1, 1), (0, 0), (1, 1)]),
            999 * 999 * 1002 * 1002,
        ),
        (
            extern("aten.max_pool2d_with_indices.default", [repeated(1, 1, 2000, 2000)], [ref(0), (999, 999), (1, 1)]),
            999 * 999 * 1002 * 1002,
        ),
        (extern("aten.upsample_nearest2d.default", [repeated(1, 1, 2, 2)], [ref(0), (1 << 17, 1 << 17)]), 1 << 34),
        (extern("aten.sort.stable", [repeated(1 << 20)], [ref(0)]), 20 << 20),
        (
            extern("aten.index.Tensor", [dense(F, 1, 1 << 20), View(DType.I64, (1 << 20,), (0,))], [ref(0), (ref(1),)]),
            1 << 40,
        ),
        (
            extern(
                "aten.index_select.default",
                [dense(F, 4, 1 << 20), View(DType.I64, (1 << 16,), (0,))],
                [ref(0), 0, ref(1)],
            ),
            1 << 36,
        ),
        (
            extern(
                "aten.embedding.default", [dense(F, 4, 1 << 20), View(DType.I64, (1 << 16,), (0,))], [ref(0), ref(1)]
            ),
            1 << 36,
        ),
        (extern("aten.reflection_pad1d.default", [dense(F, 1, 4)], [ref(0), (1 << 33, 0)]), 1 << 33),
        (extern("aten.eye.m_out", [dense(F, 1)], [1 << 17, 1 << 17]), 1 << 34),
        (extern("aten.igamma.default", [repeated(1 << 20), repeated(1 << 20)], [ref(0), ref(1)]), 100 << 20),
        (
            extern("aten._foreach_add.List", [repeated(1 << 16, 1), repeated(1, 1 << 16)], [(ref(0),), (ref(1),)]),
            1 << 32,
        ),
    ],
    ids=lambda v: str(v.attr("name")) if isinstance(v, Form) else "",
)
def test_work_of_form_is_at_least_real_work(form, least):
    work = work_of(form)
    assert work.elements + work.flops >= least


def test_work_of_size_param_is_refused():
    form = Form(
        "extern",
        (Operand(Role.IN, dense(F, 1, 1, 8, 8)),),
        (ParamKind.I64,),
        (("args", (ref(0), (ParamRef(0), ParamRef(0)))), ("name", "aten.upsample_nearest2d.default")),
    )
    with pytest.raises(OperationError, match="output_size determines the amount of work, so it must be a constant"):
        work_of(form)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (native("linear", [dense(DType.BF16, 4096, 4096), dense(DType.BF16, 11008, 4096)], [ref(1), ref(2)],
                dense(DType.BF16, 4096, 11008)), "a prefill of a model with 7e9 weights"),
        (native("linear", [dense(F, 8192, 768), dense(F, 50257, 768)], [ref(1), ref(2)], dense(F, 8192, 50257)), "logits"),
        (extern("aten._log_softmax.default", [dense(F, 8192, 50257)], [ref(0), 1, False]), "a loss over them"),
        (extern("aten.sort.stable", [dense(F, 100_000_000)], [ref(0)]), "sorting 100 million numbers"),
        (attention(8, 16, 2048, 2048, 64), "attention"),
        (attention_backward(8, 16, 2048, 2048, 16), "the gradient of attention"),
        (extern("aten.convolution.default", [dense(F, 32, 64, 224, 224), dense(F, 64, 64, 3, 3)],
                [ref(0), ref(1), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1]), "a layer of VGG"),
        (extern("aten._linalg_eigh.default", [dense(F, 2000, 2000)], [ref(0)]), "eigenvectors"),
        (extern("aten._fused_adamw_.default", [dense(F, 1_000_000_000)] * 4 + [dense(F)],
                [*[(ref(k),) for k in range(4)], (), (ref(4),)]), "a step of an optimizer for 1e9 weights"),
        (extern("aten.embedding_dense_backward.default", [dense(F, 8192, 4096), View(DType.I64, (8192,), (1,))],
                [ref(0), ref(1), 128_256, -1, False]), "the gradient of a large vocabulary"),
    ],
)  # fmt: skip
def test_default_limits_allow_work_of_models(form, why):
    outs = [o for o in form.operands if o.role is Role.OUT]
    program = Program((form,), (Instruction(0, tuple(range(len(form.operands)))),))
    assert outs or why
    # compares with half precision as fast as float32
    limits = dataclasses.replace(default_limits(host=True, cores=2), host=False)
    Bounds(limits).pieces(program)


# -- refusals ------------------------------------------------------------------------------------------------------------


def _alone(form):
    return Program((form,), (Instruction(0, tuple(range(len(form.operands)))),))


def test_bounds_large_broadcast_is_refused_with_numbers():
    form = native("sum", [repeated(1 << 16, 1 << 16)], [ref(1)], dense(F))
    with pytest.raises(TooMuchWorkError) as e:
        Bounds(default_limits(host=True, cores=2)).pieces(_alone(form))
    assert e.value.instruction == 0 and e.value.code == "executor.too_much_work"
    assert re.search(
        r"instruction 0 \(sum\).*about [\d,]{13,} elements, but at most 18,000,000,000 are allowed", str(e.value)
    )
    assert "WOOLY_EXECUTOR_MAX_ELEMENTS" in str(e.value) and "in parts" in str(e.value)


def test_bounds_unsplittable_product_is_refused_with_setting():
    form = native("mm", [dense(DType.F64, 1 << 15, 1 << 15)] * 2, [ref(1), ref(2)], dense(DType.F64, 1 << 15, 1 << 15))
    with pytest.raises(TooMuchWorkError, match="WOOLY_EXECUTOR_MAX_FLOPS"):
        Bounds(default_limits(host=True, cores=2)).pieces(_alone(form))


def test_bounds_float32_product_is_split():
    form = native("mm", [dense(F, 1 << 15, 1 << 15)] * 2, [ref(1), ref(2)], dense(F, 1 << 15, 1 << 15))
    assert len(Bounds(default_limits(host=True, cores=2)).pieces(_alone(form))[0]) > 100


def test_reference_runtime_large_instruction_is_refused():
    runtime = ReferenceRuntime()
    runtime.bounds = Bounds(Limits(1000, 1000, 100, 100))
    view = dense(F, 2000)
    program = _alone(native("add", [view, view], [ref(1), ref(2)], view))
    with pytest.raises(TooMuchWorkError):
        runtime.prepare(program, verify_program(program))


def test_bounds_generated_kernel_above_limit_is_refused():
    bounds = Bounds(Limits(1 << 40, 1 << 40, 1000, 1000))
    form = native("add", [dense(F, 900)] * 2, [ref(1), ref(2)], dense(F, 900))
    bounds.check_kernels([[form] * 4])
    with pytest.raises(TooMuchWorkError, match="a kernel for 5 instructions"):
        bounds.check_kernels([[form] * 5])


# -- pieces --------------------------------------------------------------------------------------------------------------


def _program(form):
    out = next(o.view for o in form.operands if o.role is Role.OUT)
    alloc = Form("alloc", (Operand(Role.OUT, View(DType.U8, (out.end,), (1,))),))
    slots = tuple(range(len(form.operands)))
    return Program((alloc, form), (Instruction(0, (0,)), Instruction(1, slots)))


def _run(limits, opcode, tensors, args, edges=None):
    """Return the result of a native instruction on these tensors, and the program."""
    runtime = TorchCpuRuntime()
    runtime.bounds = Bounds(limits)
    views = [View(WIS_DTYPE[t.dtype], tuple(t.shape), t.stride()) for t in tensors]
    given = arguments(native(opcode, views, args, dense(F, 1)))
    row = TABLE[opcode].results[0]
    program = _program(native(opcode, views, args, dense(row.dtype.of(given), *row.shape.of(given))))
    prepared = runtime.prepare(program, verify_program(program))
    buffers = {k: Buffer(v.end, torch.as_strided(t, (v.end // t.element_size(),), (1,))) for k, (v, t) in
               enumerate(zip(views, tensors, strict=True), 1)}  # fmt: skip
    execution = runtime.begin(prepared, buffers, list(range(len(views) + 1)), [])
    times = execution.advance(edges(prepared) if edges else (prepared.end,))
    assert execution.outcome.failed_at is None, execution.outcome.error
    return buffers[0].base, prepared, times


def _same(opcode, tensors, args, limits):
    whole, _, _ = _run(WHOLE, opcode, tensors, args)
    parts, prepared, _ = _run(limits, opcode, tensors, args)
    assert prepared.pieces == {1: prepared.end - 1}, f"{opcode} was not split"
    assert torch.equal(whole.reshape(-1).view(torch.uint8), parts.reshape(-1).view(torch.uint8)), opcode


def _arguments(opcode, dtype, n, make):
    tensors, args = [], []
    for a in TABLE[opcode].args:
        if a.name in TABLE[opcode].truths or a.kind.name in ("TENSOR", "EITHER"):
            tensors.append(torch.rand(n) > 0.5 if a.name in TABLE[opcode].truths else make())
            args.append(ref(len(tensors)))
        elif a.kind.name == "NUMBER":
            args.append(2 if a.default is None else a.default)
    return tensors, args


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_divide_elementwise_pieces_have_bits_of_whole(dtype):
    torch.manual_seed(0)
    n = 36_001

    def make():
        return torch.randint(1, 9, (n,), dtype=dtype) if dtype is torch.int32 else (torch.randn(n) * 3).to(dtype)

    split = 0
    for opcode in sorted(EXACT):
        tensors, args = _arguments(opcode, dtype, n, make)
        try:
            _run(WHOLE, opcode, tensors, args)
        except Exception:  # the operator does not support this dtype
            continue
        split += 1
        _same(opcode, tensors, args, Limits(1 << 62, 1 << 62, 7_001, 1 << 62))
    assert split >= (15 if dtype is torch.int32 else 40)


def test_divide_exact_operators_have_same_bits_alone_and_in_vectors():
    """Elements two apart are computed one by one, and neighbours in SIMD vectors.

    An operator whose bits differ must not be split.
    """
    torch.manual_seed(1)
    n = 20_000
    for opcode in sorted(EXACT):
        tensors, args = _arguments(opcode, F, n, lambda: torch.randn(2 * n) * torch.randint(1, 30, (2 * n,)) / 5)
        strided = [t[::2] if len(t) == 2 * n else t.repeat_interleave(2)[::2] for t in tensors]
        try:
            together, _, _ = _run(WHOLE, opcode, [t.contiguous() for t in strided], args)
        except Exception:  # the operator is for integers
            continue
        alone, _, _ = _run(WHOLE, opcode, strided, args)
        assert torch.equal(together.reshape(-1).view(torch.uint8), alone.reshape(-1).view(torch.uint8)), opcode


def test_divide_broadcast_operands_are_cut_only_in_own_dimensions():
    a, b = torch.randn(57, 1, 33), torch.randn(41, 1)
    _same("mul", [a, b], [ref(1), ref(2)], Limits(1 << 62, 1 << 62, 5_000, 1 << 62))
    _same("add", [torch.randn(3, 1), torch.randn(1, 9001)], [ref(1), ref(2)], Limits(1 << 62, 1 << 62, 5_000, 1 << 62))


@pytest.mark.parametrize(
    "opcode", ["sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "softmax", "log_softmax"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_divide_reduction_pieces_have_bits_of_whole(opcode, dtype):
    torch.manual_seed(2)
    one = opcode in ("argmax", "argmin", "softmax", "log_softmax")
    for shape in ((301, 257), (37, 5, 111), (2049, 33)):
        last = len(shape) - 1
        args = [ref(1), last] if one else [ref(1), (last,)]
        _same(opcode, [torch.randn(shape).to(dtype)], args, Limits(1 << 62, 1 << 62, 3_001, 1 << 62))


def test_divide_repeated_elements_split_max_but_not_sum():
    a = torch.randn(513, 1).expand(513, 777)
    limits = Limits(1 << 62, 1 << 62, 5_000, 1 << 62)
    _same("amax", [a], [ref(1), (1,)], limits)
    _, prepared, _ = _run(limits, "sum", [a], [ref(1), (1,)])
    assert prepared.pieces == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_divide_product_rows_have_bits_of_whole(dtype):
    torch.manual_seed(3)
    limits = Limits(1 << 62, 1 << 62, 1 << 62, 4_000_000)
    for m, k, n in ((1111, 130, 257), (1025, 65, 129)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        _same("mm", [a, b], [ref(1), ref(2)], limits)
        _same("mm", [a, b.t().contiguous().t()], [ref(1), ref(2)], limits)
        _same("addmm", [torch.randn(n).to(dtype), a, b], [ref(1), ref(2), ref(3)], limits)
        _same("linear", [a, b.t().contiguous(), torch.randn(n).to(dtype)], [ref(1), ref(2), ref(3)], limits)
        _same("linear", [a.reshape(1, m, k), b.t().contiguous()], [ref(1), ref(2)], limits)


@pytest.mark.parametrize("opcode", ["sigmoid", "gelu", "silu", "pow"])
def test_divide_position_dependent_operators_are_not_split(opcode):
    args = [ref(1), ref(2)] if opcode == "pow" else [ref(1)]
    _, prepared, _ = _run(Limits(1 << 62, 1 << 62, 100, 100), opcode, [torch.rand(9001)] * len(args), args)
    assert prepared.pieces == {}


@pytest.mark.parametrize(
    "form",
    [
        attention(3, 5, 300, 300, 16),
        attention(1, 7, 33, 900, 24),
        attention(4, 2, 100, 260, 8, dense(F, 100, 260)),
        attention(4, 2, 100, 260, 8, dense(F, 4, 1, 100, 260)),
        attention_backward(3, 5, 300, 300, 16),
        attention_backward(1, 6, 70, 600, 24),
    ],
    ids=["causal", "one sequence", "mask", "mask per sequence", "gradient", "gradient of one sequence"],
)
def test_divide_heads_of_attention_have_bits_of_whole(form):
    torch.manual_seed(4)
    inputs = [torch.randn(o.view.end // 4) for o in form.operands if o.role is Role.IN]
    if form.attr("name").endswith("backward.default"):
        _, q, k, v, out, lse = [as_view(t, o.view) for t, o in zip(inputs, form.operands, strict=False)]
        for to, value in zip((out, lse), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
                             strict=True):  # fmt: skip
            to.copy_(value)
    outs = [o.view for o in form.operands if o.role is Role.OUT]
    allocs = [Form("alloc", (Operand(Role.OUT, View(DType.U8, (v.end,), (1,))),)) for v in outs]
    forms, first, n = tuple(dict.fromkeys((*allocs, form))), len(outs), len(outs) + len(inputs)
    body = [Instruction(forms.index(alloc), (k,)) for k, alloc in enumerate(allocs)]
    body.append(Instruction(len(forms) - 1, (*range(first, n), *range(first))))
    program = Program(forms, tuple(body))
    found = []
    for limits in (WHOLE, Limits(1 << 62, 1 << 62, work_of(form).elements // 4, 1 << 62)):
        runtime = TorchCpuRuntime()
        runtime.bounds = Bounds(limits)
        prepared = runtime.prepare(program, verify_program(program))
        buffers = {first + k: Buffer(t.nbytes, t) for k, t in enumerate(inputs)}
        outcome = runtime.run(prepared, buffers, list(range(n)), [])
        assert outcome.failed_at is None, outcome.error
        found.append([buffers[k].base.reshape(-1).view(torch.uint8) for k in range(first)])
    assert prepared.pieces.get(first, 0) >= 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_divide_overlapping_result_is_not_split():
    view = dense(F, 9001)
    ahead = View(F, (9001,), (1,), 4)
    operands = (Operand(Role.OUT, view), Operand(Role.IN, ahead))
    form = Form("neg", operands, (), (("args", (ref(1),)),))
    assert divide(form, (0, 1), 9) is not None
    assert divide(form, (0, 0), 9) is None


def test_divide_pieces_cover_index_space_once():
    form = native("add", [dense(F, 7, 11, 13)] * 2, [ref(1), ref(2)], dense(F, 7, 11, 13))
    for parts in (2, 3, 8, 50, 1001):
        pieces = divide(form, (0, 1, 2), parts)
        seen = torch.zeros(7, 11, 13)
        for piece in pieces:
            at = seen
            for dim, start, length in piece.cuts[0]:
                at = at.narrow(dim, start, length)
            at += 1
            assert piece.share == at.numel()
        assert bool((seen == 1).all())


def test_run_stops_between_pieces_with_separate_times():
    a = torch.randn(100_000)
    limits = Limits(1 << 62, 1 << 62, 9_000, 1 << 62)

    def each(prepared):
        return tuple(range(1, prepared.end + 1))

    result, prepared, times = _run(limits, "add", [a, a], [ref(1), ref(2)], each)
    assert prepared.pieces == {1: 13} and prepared.end == 14
    assert len(times) == 14 and all(t > 0 for t in times[1:])
    assert torch.equal(result.reshape(-1), a + a)


def test_estimate_split_instruction_has_edge_per_piece():
    form = native("add", [dense(F, 4096)] * 2, [ref(1), ref(2)], dense(F, 4096))
    estimate = Estimate(_program(form), [0, 8_000_000], {1: 8})
    assert estimate.cut.edges[-1] == 9 and sum(estimate.cut.kernels) == 8_000_000
    assert len(estimate.cut.edges) == 8


def test_estimate_long_program_kernels_stay_below_wait_limit():
    form = native("add", [dense(F, 4096)] * 2, [ref(1), ref(2)], dense(F, 4096))
    estimate = Estimate(_program(form), [0, 2_000 * 40_000_000], {1: 2_000})
    assert max(estimate.cut.kernels) <= 50_000_000


def test_divide_in_place_copy_and_fill_are_split():
    view = dense(F, 50_000)
    runtime = TorchCpuRuntime()
    runtime.bounds = Bounds(Limits(1 << 62, 1 << 62, 7_000, 1 << 62))
    add = Form("add", (Operand(Role.INOUT, view), Operand(Role.IN, view)), (ParamKind.F64,),
               (("args", (ref(0), ref(1), ParamRef(0))),))  # fmt: skip
    copy = Form("copy", (Operand(Role.IN, view), Operand(Role.OUT, view)))
    fill = Form("fill", (Operand(Role.OUT, view),), (ParamKind.F64,), (("value", ParamRef(0)),))
    program = Program((fill, add, copy), (Instruction(0, (0,)), Instruction(1, (0, 1)), Instruction(2, (0, 2))))
    prepared = runtime.prepare(program, verify_program(program))
    assert dict(prepared.pieces) == {0: 13, 1: 13, 2: 13}  # pieces end at the end of a SIMD vector
    b = torch.randn(50_000)
    buffers = {k: Buffer(200_000, t) for k, t in enumerate((torch.zeros(50_000), b, torch.zeros(50_000)))}
    outcome = runtime.run(prepared, buffers, [0, 1, 2], [3.0, 2.0])
    assert outcome.failed_at is None
    expected = torch.full((50_000,), 3.0).add_(b, alpha=2.0)
    assert torch.equal(buffers[0].base.reshape(-1), expected) and torch.equal(buffers[2].base.reshape(-1), expected)


def test_run_failing_piece_names_instruction_and_poisons_result():
    a = torch.randint(0, 2, (9000,), dtype=torch.int32)
    a[-1] = 0
    form = native("div_trunc", [dense(DType.I32, 9000)] * 2, [ref(1), ref(2)], dense(DType.I32, 9000))
    runtime = TorchCpuRuntime()
    runtime.bounds = Bounds(Limits(1 << 62, 1 << 62, 1000, 1 << 62))
    program = _program(form)
    prepared = runtime.prepare(program, verify_program(program))
    buffers = {1: Buffer(36_000, a), 2: Buffer(36_000, a)}
    outcome = runtime.run(prepared, buffers, [0, 1, 2], [])
    assert outcome.failed_at == 1 and "ZeroDivision" in outcome.error
    assert buffers[0].poison == outcome.error


def test_bounds_cache_does_not_keep_forms_alive():
    """Clients decide how large forms are, so the cache must not keep them alive."""
    bounds = Bounds(default_limits(host=True, cores=2))
    v = View(DType.F32, (8, 8), (8, 1), 0)
    program = _alone(Form("fill", (Operand(Role.OUT, v),), (), (("value", 1.5),)))
    left = [weakref.ref(form) for form in program.forms]
    assert bounds.pieces(program) == bounds.pieces(program) and len(bounds._large) == len(left)
    del program
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left) and not bounds._large


def test_lu_without_pivoting_counts_the_elimination_of_each_column():
    form = extern("aten.linalg_lu_factor_ex.default", [dense(F, 512, 300)], [ref(0)])
    without = dataclasses.replace(form, attrs=(form.attrs[0], ("kwargs", (("pivot", False),)), form.attrs[1]))
    work = [work_of(f) for f in (form, without)]
    assert work[1].elements - work[0].elements >= 300 * 1000 and work[1].flops == work[0].flops
