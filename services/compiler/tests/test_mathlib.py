"""Wooly's elementary functions: their error bounds over all of f32, and equal bits on PoCL and in the interpreter."""

import math
import os
import struct

import numpy as np
import pytest
import torch
from wooly_compiler import mathlib
from wooly_compiler.build import opencl
from wooly_testkit import elementary, kernel_scalars
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder
from wooly_wis.kernel.ops import rounded
from wooly_wis.program import Role

F32 = DType.F32
#: Numbers of one launch.
N = examples(1 << 18, 1 << 20)


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


EXPONENT = 0x7FF << 52


def worst(op, x, built):
    """Return the maximum error in ulp over these inputs; special results must be exact.

    An ulp is read off the exponent of the exact result in f64, which avoids a logarithm for each of four billion numbers.
    """
    got = torch.from_numpy(on_pocl(built, x))
    exact = EXACT[op](torch.from_numpy(x).double())
    rounded = exact.float()
    # A result one ulp below infinity is also accepted.
    special = rounded.isfinite().logical_not_() | (exact.abs() > 3.4e38)
    if special.any():
        mine, theirs, near = got[special], rounded[special], exact[special].abs()
        same = (mine == theirs) | (mine.isnan() & theirs.isnan()) | ((near > 3.4e38) & near.isfinite())
        assert same.all(), (op, x[special.numpy()][~same.numpy()][:3])
    mine = got.double()
    if op == "exp":  # exp gives 0 below the normal numbers
        low = exact < 2.0**-126
        mine.masked_fill_(low & (got == 0), 0.0)
        exact.masked_fill_(low, 0.0)
    ulp = (
        exact.view(torch.int64).bitwise_and(EXPONENT).clamp_(min=(1023 - 126) << 52).sub_(23 << 52).view(torch.float64)
    )
    return float(mine.sub_(exact).abs_().div_(ulp).masked_fill_(special, 0.0).max())


def numbers(first, n, step):
    """Return `n` numbers whose bits are `first`, `first + step` and so on."""
    return np.arange(first, first + n * step, step, dtype=np.uint64).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("op", mathlib.BOUNDS)
def test_function_on_sampled_numbers_stays_within_its_bound(op):
    built = opencl.build(unary(op))
    assert worst(op, numbers(0, N, (1 << 32) // N), built) <= mathlib.BOUNDS[op]
    assert worst(op, np.linspace(-20, 20, N).astype(np.float32), built) <= mathlib.BOUNDS[op]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("op", mathlib.BOUNDS)
def test_function_on_many_numbers_stays_within_its_bound(op):
    """Every 61st number; with WOOLY_EVERY_FLOAT=1 (`make every-float`) all numbers."""
    built = opencl.build(unary(op))
    step = 1 if os.environ.get("WOOLY_EVERY_FLOAT") else 61
    found = max(worst(op, numbers(k * N * step, N, step), built) for k in range((1 << 32) // (N * step)))
    print(f"{op}: {found:.4f} ulp, bound {mathlib.BOUNDS[op]}")
    assert found <= mathlib.BOUNDS[op]


@pytest.mark.parametrize(
    "op",
    [
        *mathlib.BOUNDS,
        "round",
        *[pytest.param(op, marks=pytest.mark.slow) for op in ("floor", "ceil", "trunc", "abs", "sqrt")],
    ],
)
def test_function_on_pocl_and_interpreter_has_the_same_bits(op):
    bits = np.concatenate([
        np.linspace(0, (1 << 32) - 1, examples(400, 2000), dtype=np.uint64).astype(np.uint32),
        np.linspace(-30, 30, examples(200, 1000)).astype(np.float32).view(np.uint32),
        np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 0.5, 1.5, -2.5, 1.0, 88.7, -87.4], np.float32).view(np.uint32),
    ])  # fmt: skip
    x = bits.view(np.float32)
    got = on_pocl(opencl.build(unary(op, len(x))), x)
    for value, there in zip(x.tolist(), got, strict=True):
        here = elementary.element(op, F32, [value], [F32])
        assert (math.isnan(here) and math.isnan(there)) or kernel_scalars.bits_of(here, F32) == there.view(np.uint32), (
            value
        )


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_convert_of_16_bit_floats_to_f32_and_back_is_exact(dtype):
    widen, narrow = mathlib.function("convert", dtype, F32), mathlib.function("convert", F32, dtype)
    for bits in range(0, 1 << 16, examples(29, 7)):
        value = kernel_scalars.from_bits(bits, dtype)
        wide = elementary.call(widen, [value])
        assert wide == value or math.isnan(value)
        again = elementary.call(narrow, [wide])
        assert again == value or math.isnan(value)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_convert_to_16_bits_rounds_to_nearest_even(dtype):
    narrow = mathlib.function("convert", F32, dtype)
    for bits in [
        *range(0, 1 << 32, 99991 * 13),
        *struct.unpack("4I", struct.pack("4f", 65519.99, 65520.0, 2.98e-8, 5.97e-8)),
    ]:
        value = kernel_scalars.from_bits(bits, F32)
        if not math.isnan(value):
            assert elementary.call(narrow, [value]) == rounded(value, dtype), value
