"""Kernels of library operators agree with the library: losses, gradients of normalisations, tests, ranges, indexing."""

import math

import numpy as np
import pytest
import torch
from wooly_compiler.pipeline import compile_program
from wooly_executor.runtime.buffers import TORCH_DTYPE, Buffer
from wooly_testkit.plan_run import LocalRun
from wooly_testkit.reference import ReferenceRuntime
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.plan import KernelStep, LibraryStep
from wooly_wis.verifier import verify_program

F32, F64, BF16, I64, BOOL = DType.F32, DType.F64, DType.BF16, DType.I64, DType.BOOL
BOUND = {F32: 1e-5, F64: 1e-12, BF16: 1e-2}


def rand(*sizes, dtype=F32):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64).to(
        TORCH_DTYPE[dtype]
    )


def classes(n, below):
    return torch.randint(0, below, (n,), generator=torch.Generator().manual_seed(n))


def check(tape, inputs, results, *, kernels=None):
    """Check that the program's kernels and the library give the same results."""
    program, slots = tape.program()
    plan = compile_program(program, checks=True, params=tape.params)
    assert not [s for s in plan.steps if isinstance(s, LibraryStep)]
    if kernels is not None:
        assert sum(isinstance(s, KernelStep) for s in plan.steps) == kernels
    runtime, facts = ReferenceRuntime(), verify_program(program)
    buffers = {slots[x.slot]: Buffer(v.nbytes, v.clone()) for x, v in inputs}
    memory = {slots[x.slot]: v.contiguous().view(-1).view(torch.uint8).numpy().copy() for x, v in inputs}
    outcome = runtime.run(runtime.prepare(program, facts), buffers, list(range(len(facts.slot_bytes))), tape.params)
    assert outcome.failed_at is None, outcome
    LocalRun(plan).run(memory, tape.params)
    for x in results:
        dtype = TORCH_DTYPE[x.view.dtype]
        want = torch.empty(0, dtype=dtype).set_(
            buffers[slots[x.slot]].base.untyped_storage(), 0, x.view.sizes, x.view.strides
        )
        got = torch.from_numpy(memory[slots[x.slot]][: want.nbytes]).view(dtype).view(want.shape)
        if want.is_floating_point():
            limit = BOUND[x.view.dtype]
            scale = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=limit, atol=scale * limit, equal_nan=True)
        else:
            np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["mean", "sum"])
def test_cross_entropy_and_its_gradient(weighted, reduction):
    t = Tape()
    x, y = t.input(F32, 33, 50), t.input(I64, 33)
    w = t.input(F32, 50) if weighted else None
    p = t.op("log_softmax", x, 1)
    loss, total = t.extern("aten.nll_loss_forward.default", p, y, w, reduction, 7, results=[(F32, ()), (F32, ())])
    grad = t.input(F32)
    (g,) = t.extern("aten.nll_loss_backward.default", grad, p, y, w, reduction, 7, total, results=[(F32, (33, 50))])
    dx = t.op("log_softmax_backward", g, p, 1, F32)
    t.free(g)
    labels = classes(33, 50)
    labels[3] = labels[20] = 7
    inputs = [(x, rand(33, 50)), (y, labels), (grad, torch.tensor(0.7))]
    inputs += [(w, rand(50).abs())] if weighted else []
    check(t, inputs, [loss, total, dx], kernels=3)


@pytest.mark.parametrize("reduction", [0, 1, pytest.param(2, marks=pytest.mark.slow)], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.label)
def test_squared_error_and_its_gradient(reduction, dtype):
    t = Tape()
    a, b = t.input(dtype, 6, 70), t.input(dtype, 6, 70)
    sizes = (6, 70) if reduction == 0 else ()
    (loss,) = t.extern("aten.mse_loss.default", a, b, reduction, results=[(dtype, sizes)])
    grad = t.input(dtype, *sizes)
    (g,) = t.extern("aten.mse_loss_backward.default", grad, a, b, reduction, results=[(dtype, (6, 70))])
    check(
        t,
        [
            (a, rand(6, 70, dtype=dtype)),
            (b, rand(70, 6, dtype=dtype).T.contiguous()),
            (grad, rand(*sizes, dtype=dtype)),
        ],
        [loss, g],
    )


@pytest.mark.parametrize(
    ("affine", "wanted"),
    [
        (True, (True, True, True)),
        pytest.param(True, (True, False, False), marks=pytest.mark.slow),
        (True, (False, True, True)),
        pytest.param(True, (False, True, False), marks=pytest.mark.slow),
        (False, (True, False, False)),  # the input is the only operand with a gradient
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sizes", [(3, 5, 7), *[pytest.param(s, marks=pytest.mark.slow) for s in ((4, 9, 64), (300, 48))]], ids=str
)
def test_gradients_of_layer_norm(wanted, affine, sizes):
    t = Tape()
    n, stat = sizes[-1], (*sizes[:-1], 1)
    x, g, m, r = t.input(F32, *sizes), t.input(F32, *sizes), t.input(F32, *stat), t.input(F32, *stat)
    w, b = (t.input(F32, n), t.input(F32, n)) if affine else (None, None)
    results = [(F32, s) for s, asked in zip((sizes, (n,), (n,)), wanted, strict=True) if asked]
    outs = t.extern("aten.native_layer_norm_backward.default", g, x, (n,), m, r, w, b, wanted, results=results)
    value = rand(*sizes)
    inputs = [(x, value), (g, rand(math.prod(sizes)).view(sizes)), (m, value.mean(-1, keepdim=True)),
              (r, 1 / (value.var(-1, keepdim=True, correction=0) + 1e-5).sqrt())]  # fmt: skip
    inputs += [(w, rand(n)), (b, rand(n + 1)[1:].contiguous())] if affine else []
    check(t, inputs, outs, kernels=2 if wanted[0] and wanted[1] else 1)


SHAPES = [
    pytest.param(s, marks=pytest.mark.slow if s in ((6, 40), (2, 3, 130)) else ())
    for s in [(6, 40), (64, 8), (3, 5, 4, 11), (2, 3, 130)]
]


def statistics(t, channels):
    """Inputs per channel: weight, bias, running mean, running variance."""
    names = [t.input(F32, channels) for _ in range(4)]
    values = [rand(channels), rand(channels + 1)[1:].contiguous(), rand(channels), rand(channels).abs() + 0.5]
    return names, list(zip(names, values, strict=True))


@pytest.mark.parametrize("affine", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_batch_norm_in_training_updates_running_statistics(sizes, affine):
    t, n = Tape(), sizes[1]
    x = t.input(F32, *sizes)
    (w, b, mean, var), inputs = statistics(t, n)
    if affine:
        args, name = (x, w, b, mean, var), "aten._native_batch_norm_legit.default"
    else:
        args, name, inputs = (x, None, None, None, None), "aten.native_batch_norm.default", []
    results = [(F32, sizes), (F32, (n,)), (F32, (n,))]
    outs = t.extern(name, *args, True, 0.1, 1e-5, results=results, written=(mean, var))
    y = t.op("relu", outs[0])
    check(t, [(x, rand(*sizes) + 1), *inputs], [*outs, y, *((mean, var) if affine else ())], kernels=1)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_batch_norm_in_evaluation_uses_running_statistics(sizes):
    t, n = Tape(), sizes[1]
    x = t.input(F32, *sizes)
    names, inputs = statistics(t, n)
    results = [(F32, sizes), (F32, (0,)), (F32, (0,))]
    out, *_ = t.extern("aten.native_batch_norm.default", x, *names, False, 0.1, 1e-5, results=results)
    check(t, [(x, rand(*sizes)), *inputs], [t.op("relu", out), names[2]], kernels=1)


@pytest.mark.parametrize(
    "wanted",
    [
        (True, True, True),
        *[pytest.param(w, marks=pytest.mark.slow) for w in ((True, False, False), (False, True, True))],
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_gradients_of_batch_norm(sizes, training, wanted):
    t, n = Tape(), sizes[1]
    x, g, m, r = t.input(F32, *sizes), t.input(F32, *sizes), t.input(F32, n), t.input(F32, n)
    (w, _, mean, var), inputs = statistics(t, n)
    value, dims = rand(*sizes), [d for d in range(len(sizes)) if d != 1]
    saved = (m, r) if training else (None, None)
    results = [(F32, s) for s, asked in zip((sizes, (n,), (n,)), wanted, strict=True) if asked]
    name = "aten.native_batch_norm_backward.default"
    outs = t.extern(name, g, x, w, mean, var, *saved, training, 1e-5, wanted, results=results)
    inputs = [i for k, i in enumerate(inputs) if k != 1]
    inputs += [(x, value), (g, rand(math.prod(sizes)).view(sizes))]
    if training:
        inputs += [(m, value.mean(dims)), (r, (value.var(dims, correction=0) + 1e-5).rsqrt())]
    check(t, inputs, outs, kernels=1)


def test_gradient_of_rms_norm_from_single_instructions():
    """d/dx of w * x * rsqrt(mean(x*x) + eps), in the instructions that autograd records."""
    t = Tape()
    x, w, g = t.input(F32, 8, 96), t.input(F32, 96), t.input(F32, 8, 96)
    r = t.op("rsqrt", t.op("add", t.op("mean", t.op("mul", x, x), (-1,), True), 1e-6))
    gw = t.op("mul", g, w)
    inner = t.op("sum", t.op("mul", gw, x), (-1,), True)
    cube = t.op("mul", t.op("mul", r, r), r)
    dx = t.op("sub", t.op("mul", gw, r), t.op("mul", x, t.op("mul", t.op("mul", inner, cube), 1 / 96)))
    dw = t.op("sum", t.op("mul", g, t.op("mul", x, r)), (0,))
    check(t, [(x, rand(8, 96)), (w, rand(96)), (g, rand(96, 8).T.contiguous())], [dx, dw])


@pytest.mark.parametrize(
    ("name", "dtype", "dim"), [("any", BOOL, 0), ("all", BOOL, -1), ("any", F32, -1), ("all", F32, 0)], ids=str
)
def test_any_and_all_along_one_dimension(name, dtype, dim):
    t = Tape()
    a = t.input(dtype, 6, 8)
    (y,) = t.extern(f"aten.{name}.dim", a, dim, results=[(BOOL, (8,) if dim == 0 else (6,))])
    check(t, [(a, (rand(6, 8) > (1 if name == "any" else -1)).to(TORCH_DTYPE[dtype]))], [y])


@pytest.mark.parametrize("among", [(), (1,), (2, 3)], ids=str)
def test_isin_with_several_sizes(among):
    t = Tape()
    a, b = t.input(I64, 4, 9), t.input(I64, *among)
    (y,) = t.extern("aten.isin.Tensor_Tensor", a, b, results=[(BOOL, (4, 9))])
    n = int(torch.tensor(among).prod())
    check(t, [(a, classes(36, 9).view(4, 9)), (b, classes(n, 9).view(among))], [y])


def test_concatenation_parts_are_computed_in_place(agree_on_rotation):
    """The rotation in attention: cat(-x2, x1) * sin + x * cos."""
    check(*agree_on_rotation)


@pytest.fixture
def agree_on_rotation():
    t = Tape()
    x, c, s = t.input(F32, 2, 4, 8, 16), t.input(F32, 8, 16), t.input(F32, 8, 16)
    half = t.op("neg", x.seen((2, 4, 8, 8), (512, 128, 16, 1), 8))
    turned = t.op("concat", (half, x.seen((2, 4, 8, 8), (512, 128, 16, 1))), -1)
    t.free(half)
    y = t.op("add", t.op("mul", x, c), t.op("mul", turned, s))
    return t, [(x, rand(2, 4, 8, 16)), (c, rand(8, 16)), (s, rand(16, 8).view(8, 16))], [y]


def test_concatenation_ignores_empty_part():
    t = Tape()
    a, b = t.input(F32, 0), t.input(F32, 2, 3, 5).seen((2, 3, 4), (15, 5, 1))
    form = t.op("concat", (b, b), 1)
    check(t, [(b, rand(2, 3, 5))], [form])
    assert a.view.sizes == (0,)


@pytest.mark.parametrize(
    "sizes", [(9, 130), *[pytest.param(s, marks=pytest.mark.slow) for s in ((64, 8), (1, 5))]], ids=str
)
@pytest.mark.parametrize("opcode", ["argmax", "argmin"])
def test_argmax_and_argmin_return_first_extreme_and_nan(sizes, opcode):
    t = Tape()
    a = t.input(F32, *sizes)
    places = [t.op(opcode, a, dim) for dim in (0, 1, None)]
    value = (rand(*sizes) * 2).round()
    value[-1, -1] = float("nan")
    check(t, [(a, value)], places)
    check(t, [(a, torch.full(sizes, float("-inf" if opcode == "argmax" else "inf")))], places)


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize(
    ("tokens", "width"), [((7, 40), 300), ((64,), 1), pytest.param((1, 3), 37, marks=pytest.mark.slow)], ids=str
)
def test_gradient_of_embedding_is_summed_by_index(padding, tokens, width):
    t = Tape()
    grad, index = t.input(F32, *tokens, width), t.input(I64, *tokens)
    (g,) = t.extern(
        "aten.embedding_dense_backward.default", grad, index, 11, padding, False, results=[(F32, (11, width))]
    )
    where = classes(math.prod(tokens), 11).view(tokens)
    where.view(-1)[0] = 11  # the padding index is ignored, as in the library
    check(t, [(grad, rand(*tokens, width)), (index, where)], [g], kernels=1)


def test_gradient_of_strided_embedding_is_summed_by_index():
    t = Tape()
    grad = t.input(F32, 6, 5, 40).seen((5, 6, 20), (40, 200, 2))
    index = t.input(I64, 6, 5).seen((5, 6), (1, 5))
    (g,) = t.extern("aten.embedding_dense_backward.default", grad, index, 4, -1, False, results=[(F32, (4, 20))])
    check(t, [(grad, rand(6, 5, 40)), (index, classes(30, 4).view(6, 5))], [g], kernels=1)


def test_index_sum_is_a_separate_kernel():
    t = Tape()
    grad, index = t.input(F32, 64, 32), t.input(I64, 64)
    scaled = t.op("mul", grad, 2.0)
    (g,) = t.extern("aten.embedding_dense_backward.default", scaled, index, 64, -1, False, results=[(F32, (64, 32))])
    y = t.op("add", g, grad)
    check(t, [(grad, rand(64, 32)), (index, classes(64, 64))], [g, y], kernels=3)


def test_remainder_has_sign_of_divisor():
    t = Tape()
    a, b = t.input(I64, 5), t.input(I64, 5)
    y = t.op("remainder", a, b)
    check(t, [(a, torch.tensor([7, -7, 7, -7, -(1 << 63)])), (b, torch.tensor([3, 3, -3, -3, -1]))], [y])
