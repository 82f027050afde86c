"""Our elementary functions: error bounds over all of f32, and the same bits wherever they are computed."""

import math
import struct

import numpy as np
import pytest
import torch
from wooly_compiler import mathlib
from wooly_compiler.build import opencl
from wooly_wis.dtypes import DType
from wooly_wis.kernel import scalars
from wooly_wis.kernel.builder import KernelBuilder
from wooly_wis.program import Role

F32 = DType.F32
N = 1 << 20


def unary(op, n=N, dtype=F32):
    k = KernelBuilder(f"test_{op}", (n,))
    x, y = k.array("x", dtype, n), k.array("y", dtype, n, Role.OUT)
    (i,) = k.points
    k.store(y, i, k.apply(op, k.load(x, i)))
    return k.finish()


def on_pocl(built, x):
    y = np.empty_like(x)
    device = opencl.default_device()
    built.launch([opencl.wrap(device, x), opencl.wrap(device, y)]).wait()
    return y


EXACT = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10,
    "log1p": torch.log1p, "tanh": torch.tanh, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos,
}  # fmt: skip


def worst(op, bits, built):
    """Greatest error in ulp over these inputs; special results must be exact."""
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        got = on_pocl(built, x).astype(np.float64)
        exact = EXACT[op](torch.from_numpy(x.astype(np.float64))).numpy()
        rounded = exact.astype(np.float32)
    special = ~np.isfinite(rounded)
    near_end = np.abs(exact) > 3.4e38  # one ulp below infinity is as good
    ok = np.where(np.isnan(exact), np.isnan(got), (got == rounded) | near_end)
    assert ok[special].all(), x[special][~ok[special]][:3]
    if op == "exp":  # nothing below the normal numbers
        got, exact = (np.where(exact < 2.0**-126, 0.0, v) for v in (got, exact))
    ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 23)
    with np.errstate(invalid="ignore"):
        error = np.where(special | near_end, 0, np.abs(got - exact) / ulp)
    return error.max()


@pytest.mark.parametrize("op", mathlib.BOUNDS)
def test_function_stays_within_its_bound(op):
    built = opencl.build(unary(op))
    spread = np.linspace(0, (1 << 32) - 1, N, dtype=np.uint64).astype(np.uint32)
    assert worst(op, spread, built) <= mathlib.BOUNDS[op]
    middle = np.linspace(-20, 20, N).astype(np.float32).view(np.uint32)
    assert worst(op, middle, built) <= mathlib.BOUNDS[op]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("op", mathlib.BOUNDS)
def test_function_stays_within_its_bound_for_every_number(op):
    n = 1 << 24
    built = opencl.build(unary(op, n))
    bits = np.arange(n, dtype=np.uint32)
    found = max(worst(op, bits + np.uint32(k * n), built) for k in range(256))
    assert found <= mathlib.BOUNDS[op], found


@pytest.mark.parametrize("op", [*mathlib.BOUNDS, "floor", "ceil", "round", "trunc", "abs", "sqrt"])
def test_function_has_the_same_bits_on_pocl_and_in_the_interpreter(op):
    bits = np.concatenate([
        np.linspace(0, (1 << 32) - 1, 2000, dtype=np.uint64).astype(np.uint32),
        np.linspace(-30, 30, 1000).astype(np.float32).view(np.uint32),
        np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 0.5, 1.5, -2.5, 1.0, 88.7, -87.4], np.float32).view(np.uint32),
    ])  # fmt: skip
    x = bits.view(np.float32)
    got = on_pocl(opencl.build(unary(op, len(x))), x)
    for value, there in zip(x.tolist(), got, strict=True):
        here = mathlib.element(op, F32, [value], [F32])
        assert (math.isnan(here) and math.isnan(there)) or scalars.bits_of(here, F32) == there.view(np.uint32), value


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_16_bit_float_converts_and_back(dtype):
    widen, narrow = mathlib.function("convert", dtype, F32), mathlib.function("convert", F32, dtype)
    for bits in range(0, 1 << 16, 7):
        value = scalars.from_bits(bits, dtype)
        wide = mathlib.call(widen, [value])
        assert wide == value or math.isnan(value)
        again = mathlib.call(narrow, [wide])
        assert again == value or math.isnan(value)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_narrowing_rounds_to_nearest_even(dtype):
    narrow = mathlib.function("convert", F32, dtype)
    for bits in [
        *range(0, 1 << 32, 99991 * 13),
        *struct.unpack("4I", struct.pack("4f", 65519.99, 65520.0, 2.98e-8, 5.97e-8)),
    ]:
        value = scalars.from_bits(bits, F32)
        if not math.isnan(value):
            assert mathlib.call(narrow, [value]) == scalars.rounded(value, dtype), value
