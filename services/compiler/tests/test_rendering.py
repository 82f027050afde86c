"""Rendering: reviewed sources do not change by accident, and both forms of a kernel give the same bits.

`WOOLY_WRITE_GOLDEN=1` writes the golden sources again; read the difference before you commit it.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from wooly_compiler.build import opencl
from wooly_compiler.pipeline import compile_program
from wooly_compiler.render.dialects import CUDA, HIP, OPENCL
from wooly_compiler.render.printer import render
from wooly_compiler.render.source import Form, RenderError
from wooly_testkit import kernel_interpreter
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder
from wooly_wis.kernel.laws import KernelError
from wooly_wis.program import Role

F32, I64, I32 = DType.F32, DType.I64, DType.I32
GOLDEN = Path(__file__).parent / "golden"
DIALECTS = [("opencl", OPENCL, Form.LOOPS, "cl"), ("cuda", CUDA, Form.SIMT, "cu"), ("hip", HIP, Form.SIMT, "hip")]


def pointwise():
    t = Tape()
    x, w, b = t.input(F32, 100, 33), t.input(F32, 33), t.input(DType.BF16, 100, 1)
    m = t.op("mul", x, w)
    s = t.op("add", m, b)
    t.free(m)
    t.op("relu", s)
    t.free(s)
    return t


def softmax():
    t = Tape()
    t.op("softmax", t.input(F32, 64, 300), -1)
    return t


def layer_norm():
    t = Tape()
    x, w, b = t.input(F32, 64, 96), t.input(F32, 96), t.input(F32, 96)
    n, mean, rstd = t.ops("layer_norm", x, (96,), w, b, 1e-5)
    t.op("add", n, x)
    t.free(n, mean, rstd)
    return t


def channels():
    """Statistics of channels: the folded runs of indices start and end at any accumulator."""
    t = Tape()
    x = t.input(F32, 3, 5, 4, 11)
    mean = t.op("mean", x, (0, 2, 3), True)
    t.op("sub", x, mean)
    t.free(mean)
    return t


def padded():
    """As `channels`, but rows are not contiguous: one fold needs three loops."""
    t = Tape()
    x = t.input(F32, 3 * 5 * 64).seen((3, 5, 4, 11), (320, 64, 16, 1))
    mean = t.op("mean", x, (0, 2, 3), True)
    t.op("mul", x, mean)
    t.free(mean)
    return t


def kernel_of(tape):
    program, _ = tape.program()
    (kernel,) = compile_program(program).kernels
    return kernel


@pytest.mark.parametrize("make", [pointwise, softmax, layer_norm, channels])
@pytest.mark.parametrize(("name", "dialect", "form", "suffix"), DIALECTS)
def test_render_equals_the_reviewed_source(make, name, dialect, form, suffix):
    text = render(kernel_of(make()), dialect, form).text
    path = GOLDEN / f"{make.__name__}.{suffix}"
    if os.environ.get("WOOLY_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("dialect", [OPENCL, CUDA, HIP])
def test_render_uses_no_fast_mathematics(dialect):
    text = render(kernel_of(layer_norm()), dialect, Form.SIMT).text
    assert "fast" not in text and "__expf" not in text and "native_" not in text


def launch(kernel, arrays, form):
    device = opencl.default_device()
    built = opencl.build(kernel, device, form)
    built.launch([opencl.wrap(device, a) for a in arrays]).wait()


@pytest.mark.parametrize(
    "make", [softmax, padded, *[pytest.param(m, marks=pytest.mark.slow) for m in (layer_norm, channels)]]
)
def test_kernel_in_both_forms_gives_the_same_bits(make):
    kernel = kernel_of(make())
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(a.numel, dtype=np.float32) for a in kernel.arrays]
    scalars = [] if not kernel.scalars else [1e-5]
    found = []
    for form in Form:
        arrays = [a.copy() for a in given]
        device = opencl.default_device()
        built = opencl.build(kernel, device, form)
        built.launch([opencl.wrap(device, a) for a in arrays], scalars).wait()
        found.append(arrays)
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("make", [channels, padded])
def test_fold_over_runs_of_indices_equals_the_interpreter(make):
    kernel = kernel_of(make())
    arrays = [np.random.default_rng(0).standard_normal(a.numel, dtype=np.float32) for a in kernel.arrays]
    expected = {a.name: v.tolist() for a, v in zip(kernel.arrays, arrays, strict=True)}
    kernel_interpreter.run(kernel, expected)
    launch(kernel, arrays, Form.LOOPS)
    for a, v in zip(kernel.arrays, arrays, strict=True):
        np.testing.assert_array_equal(v, np.array(expected[a.name], np.float32))
    assert "high" in render(kernel, OPENCL, Form.LOOPS).text


def histogram(n=1000, bins=8):
    """A hand-written kernel: atomics, a checked access, a condition, a sequential loop, scratch."""
    k = KernelBuilder("histogram", (4,))
    x, y = k.array("x", I32, n), k.array("y", I32, bins, Role.INOUT)
    s = k.scratch("part", I64, 64)
    (p,) = k.points
    zero, quarter = k.const(I64, 0), k.const(I64, n // 4)
    base = k.apply("mul", p, quarter)
    with k.lanes(64) as j:
        with k.loop(j, quarter, 64, [zero]) as loop:
            v = k.load(x, k.apply("add", base, loop.index), checked=True)
            at = k.convert(k.apply("fmod", v, k.const(I32, bins)), I64)
            k.atomic("add", y, at, k.const(I32, 1), checked=True)
            loop.yields = (k.apply("add", loop.args[0], k.convert(v, I64)),)
        k.store(s, j, loop.results[0])
    with k.reduce(64, 32, [zero], k.each("add")) as fold:
        fold.yields = (k.load(s, fold.index),)
    with k.when(k.apply("gt", fold.results[0], zero)):
        k.atomic("max", y, zero, k.const(I32, 0))
    return k.finish()


@pytest.mark.parametrize("form", Form)
def test_kernel_with_atomics_runs_in_both_forms(form):
    kernel = histogram()
    x = np.random.default_rng(1).integers(-100, 100, 1000).astype(np.int32)
    expected = [0] * 8
    kernel_interpreter.run(kernel, {"x": x.tolist(), "y": expected})
    y = np.zeros(8, np.int32)
    launch(kernel, [x, y], form)
    assert y.tolist() == expected


def test_checked_store_out_of_range_writes_nothing():
    k = KernelBuilder("wild", (64,))
    x, y = k.array("x", I64, 64), k.array("y", F32, 8, Role.OUT)
    (i,) = k.points
    k.store(y, k.load(x, i), k.const(F32, 1.0), checked=True)
    kernel = k.finish()
    where = np.array([-1, 8, 1 << 62, -(1 << 63), 3] + [-5] * 59, np.int64)
    room = np.zeros(24, np.float32)
    launch(kernel, [where, room[8:16]], Form.LOOPS)
    assert room.tolist() == [0.0] * 11 + [1.0] + [0.0] * 12


def test_render_of_unchecked_index_from_memory_raises():
    k = KernelBuilder("wild", (64,))
    x, y = k.array("x", I64, 64), k.array("y", F32, 8, Role.OUT)
    (i,) = k.points
    k.store(y, k.load(x, i), k.const(F32, 1.0))
    with pytest.raises(KernelError, match="bounds"):
        render(k.finish(), OPENCL, Form.LOOPS)


def test_render_of_endless_loop_raises():
    k = KernelBuilder("endless", (64,))
    y = k.array("y", F32, 64, Role.OUT)
    (i,) = k.points
    zero, end = k.const(I64, 0), k.const(I64, (1 << 63) - 1)
    with k.loop(zero, end):
        k.store(y, i, k.const(F32, 0.0))
    with pytest.raises(KernelError, match="work"):
        render(k.finish(), OPENCL, Form.LOOPS)


def test_render_of_missing_operation_raises():
    k = KernelBuilder("f64_max", (4,))
    y = k.array("y", DType.F64, 1, Role.INOUT)
    zero = k.const(I64, 0)
    k.atomic("max", y, zero, k.const(DType.F64, 1.0))
    with pytest.raises(RenderError, match="atomic max of f64"):
        render(k.finish(), OPENCL, Form.SIMT)


INTEGERS = ("add", "sub", "mul", "div_floor", "div_trunc", "fmod", "shl", "shr", "and", "xor", "max", "min")


@pytest.mark.parametrize(
    "dtype",
    [DType.I8, pytest.param(DType.U8, marks=pytest.mark.slow), pytest.param(I32, marks=pytest.mark.slow), I64],
    ids=lambda d: d.label,
)
def test_integer_operations_at_limits_equal_the_interpreter(dtype):
    numpy = {DType.I8: np.int8, DType.U8: np.uint8, I32: np.int32, I64: np.int64}[dtype]
    info = np.iinfo(numpy)
    some = np.array(
        [info.min, info.min + 1, 0, 1, 2, 3, 7, info.max // 2, info.max - 1, info.max, numpy(info.max) // 3], numpy
    )
    a, b = (v.ravel().copy() for v in np.meshgrid(some, some))
    k = KernelBuilder("integers", (len(a),))
    x, y = k.array("x", dtype, len(a)), k.array("y", dtype, len(a))
    (i,) = k.points
    for op in INTEGERS:
        k.store(k.array(f"of_{op}", dtype, len(a), Role.OUT), i, k.apply(op, k.load(x, i), k.load(y, i)))
    kernel = k.finish()
    expected = {op: [0] * len(a) for op in INTEGERS}
    kernel_interpreter.run(kernel, {"x": a.tolist(), "y": b.tolist(), **{f"of_{op}": v for op, v in expected.items()}})
    got = {op: np.zeros_like(a) for op in INTEGERS}
    launch(kernel, [a, b, *got.values()], Form.LOOPS)
    assert {op: v.tolist() for op, v in got.items()} == expected


TARGETS = {
    DType.I8: np.int8,
    DType.U8: np.uint8,
    I32: np.int32,
    I64: np.int64,
    DType.U64: np.uint64,
    DType.BOOL: np.uint8,
}


@pytest.mark.parametrize("source", [F32, DType.F64], ids=lambda d: d.label)
def test_float_to_integer_at_limits_equals_the_interpreter(source):
    a = np.array([0.0, -0.0, 0.9, -0.9, 1.5, 127.5, 128.0, 255.9, 256.0, -128.9, 2147483648.0, -2147483649.0, 1e30, -1e30,
                  9.3e18, 1.9e19, np.inf, -np.inf, np.nan], np.float32 if source is F32 else np.float64)  # fmt: skip
    k = KernelBuilder("convert", (len(a),))
    x = k.array("x", source, len(a))
    (i,) = k.points
    for target in TARGETS:
        k.store(k.array(f"to_{target.label}", target, len(a), Role.OUT), i, k.convert(k.load(x, i), target))
    kernel = k.finish()
    expected = {t.label: [0] * len(a) for t in TARGETS}
    kernel_interpreter.run(kernel, {"x": a.tolist(), **{f"to_{t}": v for t, v in expected.items()}})
    got = {t.label: np.zeros(len(a), kind) for t, kind in TARGETS.items()}
    launch(kernel, [a, *got.values()], Form.LOOPS)
    assert {t: v.tolist() for t, v in got.items()} == expected
