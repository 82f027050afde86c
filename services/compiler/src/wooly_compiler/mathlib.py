"""Elementary functions of f32, and conversions of 16-bit floats, written in kernel IR.

They use only sums, products, products with a sum rounded once (`fma`), quotients, shifts and selections. Every chip rounds these
in the same way, so a function has the same bits on all devices, in fused kernels and in single ones. An `fma` is executed only
where it is written: no compiler makes one of a product and a sum. There are no tables and no branches, so that the loops around
the functions can be vectorized.

`BOUNDS` states the maximum error of a result, in units of the last place (ulp). The tests check every f32 (`make every-float`).
The largest errors found so: exp 0.866, exp2 0.868, expm1 1.439, log 0.848, log2 1.252, log10 1.948, log1p 1.437, tanh 1.371, erf
1.313, sin 1.576, cos 1.578. The coefficients are our own fits: `tools/fit_math.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder, Value
from wooly_wis.kernel.ir import Block
from wooly_wis.kernel.ops import rounded

F32, F64, I32, U16, U32 = DType.F32, DType.F64, DType.I32, DType.U16, DType.U32

#: Maximum error in ulp, for all arguments whose result is a normal number. Below the normal numbers, `exp` gives 0.
BOUNDS: Final[dict[str, float]] = {
    "exp": 1.0,
    "exp2": 1.0,
    "expm1": 2.0,
    "log": 1.0,
    "log2": 1.5,
    "log10": 2.0,
    "log1p": 2.0,
    "tanh": 2.0,
    "erf": 1.5,
    "sin": 2.0,
    "cos": 2.0,
}

_EXP = (
    0.5,
    0.1666666567325592,
    0.041666463017463684,
    0.008333571255207062,
    0.0013935083989053965,
    0.00019739456183742732,
)
_EXP2 = (
    0.6931471824645996,
    0.24022650718688965,
    0.055504050105810165,
    0.009618086740374565,
    0.001333796652033925,
    0.00015452111256308854,
    1.4322521565190982e-05,
)
_LOG = (
    0.3333331346511841,
    -0.25000008940696716,
    0.20002074539661407,
    -0.1666799932718277,
    0.14220279455184937,
    -0.12405908852815628,
    0.11883886158466339,
    -0.11672573536634445,
    0.06751645356416702,
)
_TANH = (
    -0.3333333134651184,
    0.13333222270011902,
    -0.053948454558849335,
    0.021708663552999496,
    -0.00819477066397667,
    0.0021572604309767485,
)
_ERF = (
    0.12837916612625122,
    -0.3761262893676758,
    0.11283618211746216,
    -0.02685512602329254,
    0.005190733820199966,
    -0.0008030761382542551,
    7.920368079794571e-05,
)
_ERFC_ROOT = (
    0.629769504070282,
    -0.41548511385917664,
    0.00431937025859952,
    0.050835754722356796,
    -0.0037913888227194548,
    -0.005413808859884739,
    0.001276240567676723,
    3.900517549482174e-05,
    -2.723449688346591e-05,
)
_SIN = (-0.1666666716337204, 0.008333380334079266, -0.00019853511184919626, 2.8375159217830515e-06)
_COS = (0.0416666679084301, -0.001388898235745728, 2.4822984414640814e-05, -2.897732258588803e-07)
#: log(2) as a sum. The first part has few bits, so that its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG10_2_HIGH, _LOG10_2_LOW = 0.30102920532226562, 7.9034151668e-07
#: Adding and subtracting this number rounds to an integer. The low bits of the sum then hold that integer.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000


@dataclass(frozen=True, slots=True)
class Function:
    """A function of elements.

    Attributes:
        name: its name in generated sources.
        op: the operation that it computes.
        args: types of its arguments. The arguments are the first values.
        dtype: type of its result.
        body: `Const` and `Apply` statements.
        result: number of the value that it returns.
    """

    name: str
    op: str
    args: tuple[DType, ...]
    dtype: DType
    body: Block
    result: int


class _Writer(KernelBuilder):
    """Writes the body of a function."""

    def argument(self, dtype: DType) -> Value:
        return self.new_value(dtype)

    def number(self, value: float | int, dtype: DType = F32) -> Value:
        return self.const(dtype, rounded(value, dtype) if dtype is F32 else value)

    def _both(self, op: str, a: Value | float, b: Value | float) -> Value:
        like = a if isinstance(a, Value) else b
        assert isinstance(like, Value)
        left = a if isinstance(a, Value) else self.number(a, like.dtype)
        right = b if isinstance(b, Value) else self.number(b, like.dtype)
        return self.apply(op, left, right)

    def add(self, a: Value | float, b: Value | float) -> Value:
        return self._both("add", a, b)

    def sub(self, a: Value | float, b: Value | float) -> Value:
        return self._both("sub", a, b)

    def mul(self, a: Value | float, b: Value | float) -> Value:
        return self._both("mul", a, b)

    def div(self, a: Value | float, b: Value | float) -> Value:
        return self._both("div", a, b)

    def fma(self, a: Value, b: Value | float, c: Value | float) -> Value:
        """A * b + c, rounded once."""
        right = b if isinstance(b, Value) else self.number(b, a.dtype)
        return self.apply("fma", a, right, c if isinstance(c, Value) else self.number(c, a.dtype))

    def test(self, op: str, a: Value, b: float | int) -> Value:
        return self._both(op, a, b)

    def select(self, c: Value, a: Value | float, b: Value | float) -> Value:
        like = a if isinstance(a, Value) else b
        assert isinstance(like, Value)
        left = a if isinstance(a, Value) else self.number(a, like.dtype)
        right = b if isinstance(b, Value) else self.number(b, like.dtype)
        return self.apply("select", c, left, right)

    def bits(self, a: Value, dtype: DType) -> Value:
        return self.apply("bitcast", a, dtype=dtype)

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Evaluate a polynomial by Horner's rule; `coefficients` begin with that of x**0."""
        found = self.number(coefficients[-1], x.dtype)
        for c in reversed(coefficients[:-1]):
            found = self.fma(found, x, c)
        return found

    def scaled(self, p: Value, n: Value) -> Value:
        """P * 2**n for n in [-252, 254]. It multiplies in two steps, so that the result may be subnormal."""
        half = self.apply("shr", n, self.number(1, I32))
        rest = self.sub(n, half)
        for e in (half, rest):
            power = self.apply("shl", self.add(e, 127), self.number(23, I32))
            p = self.mul(p, self.bits(power, F32))
        return p

    def moved(self, p: Value, n: Value) -> Value:
        """P * 2**n if p and the result are normal: adds n to the exponent bits of p."""
        return self.bits(self.add(self.bits(p, I32), self.apply("shl", n, self.number(23, I32))), F32)

    def nearest(self, x: Value) -> tuple[Value, Value]:
        """Return the integer nearest to x, as f32 and as i32. Valid only if |x| < 2**22."""
        moved = self.add(x, _ROUND)
        return self.sub(moved, _ROUND), self.sub(self.bits(moved, I32), _ROUND_BITS)

    def clamped(self, x: Value, low: float, high: float) -> Value:
        """Limit x to [low, high]. NaN stays NaN."""
        x = self.select(self.test("lt", x, low), low, x)
        return self.select(self.test("gt", x, high), high, x)


def _exp_parts(w: _Writer, x: Value) -> tuple[Value, Value, Value]:
    """(r, q, n) with e**x = (1 + r + r*r*q) * 2**n."""
    moved = w.fma(x, 1.4426950408889634, _ROUND)
    nf, n = w.sub(moved, _ROUND), w.sub(w.bits(moved, I32), _ROUND_BITS)
    r = w.fma(nf, -_LN2_LOW, w.fma(nf, -_LN2_HIGH, x))
    return r, w.polynomial(r, _EXP), n


def _exp_inside(w: _Writer, x: Value) -> Value:
    """e**x; valid only if the result is a normal number."""
    r, q, n = _exp_parts(w, x)
    return w.moved(w.fma(w.fma(q, r, 1.0), r, 1.0), n)


def _exp(w: _Writer, x: Value) -> Value:
    """e**x; results below the smallest normal number are 0. The sum with infinity gives infinity for large x, and NaN for NaN."""
    found = w.select(w.test("lt", x, -87.33654022216797), 0.0, _exp_inside(w, x))
    return w.select(w.test("le", x, 88.72283172607422), found, w.add(x, math.inf))


def _exp2(w: _Writer, x: Value) -> Value:
    x = w.clamped(x, -151.0, 129.0)
    nf, n = w.nearest(x)
    r = w.sub(x, nf)
    return w.scaled(w.fma(r, w.polynomial(r, _EXP2), 1.0), n)


def _expm1(w: _Writer, x: Value) -> Value:
    r, q, n = _exp_parts(w, w.clamped(x, -30.0, 89.0))
    p = w.fma(w.mul(r, r), q, r)
    half = w.bits(w.apply("shl", w.add(n, 126), w.number(23, I32)), F32)
    found = w.mul(w.fma(p, half, w.sub(half, 0.5)), 2.0)
    near = w.test("eq", n, 0)
    return w.select(w.test("eq", x, 0.0), x, w.select(near, p, found))


def _log_parts(w: _Writer, x: Value) -> tuple[Value, Value, Value]:
    """(f, t, e) with log(x) = f + t + e * log(2) for positive finite x."""
    tiny = w.test("lt", x, 1.1754943508222875e-38)
    bits = w.sub(w.bits(w.select(tiny, w.mul(x, 8388608.0), x), I32), 0x3F3504F3)
    e = w.apply("shr", bits, w.number(23, I32))
    m = w.bits(w.add(w.apply("and", bits, w.number(0x7FFFFF, I32)), 0x3F3504F3), F32)
    f = w.sub(m, 1.0)
    exponent = w.apply("convert", w.select(tiny, w.sub(e, 23), e), dtype=F32)
    z = w.mul(f, f)
    t = w.fma(w.mul(z, f), w.polynomial(f, _LOG), w.mul(z, -0.5))
    return f, t, exponent


def _log_ends(w: _Writer, x: Value, inside: Value) -> Value:
    """Return `inside` for positive finite x, else the logarithm's value for 0, infinity, NaN or a negative number."""
    found = w.select(w.test("lt", x, math.inf), inside, x)
    found = w.select(w.test("eq", x, 0.0), -math.inf, found)
    return w.select(w.test("lt", x, 0.0), math.nan, found)


def _log_inside(w: _Writer, x: Value) -> Value:
    f, t, e = _log_parts(w, x)
    return w.fma(e, _LN2_HIGH, w.add(w.fma(e, _LN2_LOW, t), f))


def _log(w: _Writer, x: Value) -> Value:
    return _log_ends(w, x, _log_inside(w, x))


def _log2(w: _Writer, x: Value) -> Value:
    f, t, e = _log_parts(w, x)
    # The factor 1/log(2) - 1 keeps the error of the product below that of the sum.
    low = w.fma(f, 0.4426950408889634, w.mul(t, 1.4426950408889634))
    return _log_ends(w, x, w.add(w.add(low, f), e))


def _log10(w: _Writer, x: Value) -> Value:
    f, t, e = _log_parts(w, x)
    low = w.fma(w.add(t, f), 0.4342944819032518, w.mul(e, _LOG10_2_LOW))
    return _log_ends(w, x, w.fma(e, _LOG10_2_HIGH, low))


def _log1p(w: _Writer, x: Value) -> Value:
    u = w.add(x, 1.0)
    lost = w.div(w.sub(x, w.sub(u, 1.0)), u)
    found = w.add(_log_inside(w, u), lost)
    found = w.select(w.test("eq", u, 1.0), x, found)
    found = w.select(w.test("lt", u, math.inf), found, u)
    found = w.select(w.test("eq", u, 0.0), -math.inf, found)
    return w.select(w.test("lt", u, 0.0), math.nan, found)


def _sign(w: _Writer, x: Value) -> Value:
    """Return the sign bit of x."""
    return w.apply("and", w.bits(x, U32), w.number(0x80000000, U32))


def _signed(w: _Writer, a: Value, sign: Value) -> Value:
    """Give the sign bit `sign` to the positive number `a`."""
    return w.bits(w.apply("or", w.bits(a, U32), sign), F32)


def _tanh(w: _Writer, x: Value) -> Value:
    a = w.apply("abs", x)
    z = w.mul(x, x)
    small = w.fma(w.mul(x, z), w.polynomial(z, _TANH), x)
    e = _exp_inside(w, w.mul(w.select(w.test("gt", a, 10.0), 10.0, a), 2.0))
    large = w.sub(1.0, w.div(2.0, w.add(e, 1.0)))
    return w.select(w.test("ge", a, 0.625), _signed(w, large, _sign(w, x)), small)


def _erf(w: _Writer, x: Value) -> Value:
    """For |x| >= 1, uses the fourth root of 1 - erf: it is smooth, and squaring it twice costs less than an exponential
    function.
    """
    a = w.apply("abs", x)
    z = w.mul(x, x)
    small = w.fma(x, w.polynomial(z, _ERF), x)
    root = w.polynomial(w.sub(w.select(w.test("gt", a, 4.0), 4.0, a), 1.0), _ERFC_ROOT)
    square = w.mul(root, root)
    large = w.fma(w.apply("neg", square), square, 1.0)
    return w.select(w.test("ge", a, 1.0), _signed(w, large, _sign(w, x)), small)


#: 2/pi in parts of 24 bits. Part k is an integer times 2**(-24*(k+1)).
_TWO_OVER_PI_BITS = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561
_PIECES = 9
#: Adding and subtracting this number rounds an f64 below 2**51 to an integer.
_ROUND64 = 6755399441055744.0


def _two_over_pi(k: int) -> float:
    piece = (_TWO_OVER_PI_BITS >> (256 - 24 * (k + 1))) & 0xFFFFFF
    return math.ldexp(piece, -24 * (k + 1))


def _quadrant(w: _Writer, x: Value) -> tuple[Value, Value]:
    """Return (r, n) with x = r + n * pi/2 up to full turns, for finite x: r in [-pi/4, pi/4] as f32, n as i32.

    x times a part of 2/pi is exact in f64. Multiples of 4 are subtracted from each product, which is exact, too. The remainders
    are summed with compensation for rounding errors. So the reduction is as accurate for 1e38 as for 1.
    """
    wide = w.apply("convert", x, dtype=F64)
    high, low = w.number(0.0, F64), w.number(0.0, F64)
    for k in range(_PIECES):
        product = w.mul(wide, _two_over_pi(k))
        quarter = w.mul(product, 0.25)
        whole = w.sub(w.add(quarter, _ROUND64), _ROUND64)
        big = w.test("ge", w.apply("abs", quarter), 2251799813685248.0)
        part = w.sub(product, w.mul(w.select(big, quarter, whole), 4.0))
        total = w.add(high, part)
        back = w.sub(total, high)
        error = w.add(w.sub(high, w.sub(total, back)), w.sub(part, back))
        high, low = total, w.add(low, error)
    moved = w.add(high, _ROUND64)
    n = w.apply("convert", w.bits(moved, DType.I64), dtype=I32)
    turns = w.add(w.sub(high, w.sub(moved, _ROUND64)), low)
    return w.apply("convert", w.mul(turns, 1.5707963267948966), dtype=F32), n


def _circular(shift: int) -> Callable[[_Writer, Value], Value]:
    def build(w: _Writer, x: Value) -> Value:
        r, n = _quadrant(w, x)
        n = w.add(n, shift) if shift else n
        z = w.mul(r, r)
        sine = w.fma(w.mul(r, z), w.polynomial(z, _SIN), r)
        cosine = w.fma(w.mul(z, z), w.polynomial(z, _COS), w.fma(z, -0.5, 1.0))
        odd = w.test("ne", w.apply("and", n, w.number(1, I32)), 0)
        found = w.select(odd, cosine, sine)
        negative = w.test("ne", w.apply("and", n, w.number(2, I32)), 0)
        found = w.select(negative, w.apply("neg", found), found)
        found = w.select(w.test("lt", w.apply("abs", x), math.inf), found, math.nan)
        return found if shift else w.select(w.test("eq", x, 0.0), x, found)

    return build


def _whole(w: _Writer, x: Value) -> tuple[Value, Value]:
    """Return |x| rounded to the nearest integer, and the sign bit of x."""
    a = w.apply("abs", x)
    near = w.sub(w.add(a, 8388608.0), 8388608.0)
    return w.select(w.test("lt", a, 8388608.0), near, a), _sign(w, x)


def _round(w: _Writer, x: Value) -> Value:
    return _signed(w, *_whole(w, x))


def _trunc(w: _Writer, x: Value) -> Value:
    near, sign = _whole(w, x)
    beyond = w.apply("gt", near, w.apply("abs", x))
    return _signed(w, w.select(beyond, w.sub(near, 1.0), near), sign)


def _floor(w: _Writer, x: Value) -> Value:
    near = _round(w, x)
    return w.select(w.apply("gt", near, x), w.sub(near, 1.0), near)


def _ceil(w: _Writer, x: Value) -> Value:
    near, sign = _whole(w, x)
    near = _signed(w, near, sign)
    return _signed_zero(w, w.select(w.apply("lt", near, x), w.add(near, 1.0), near), sign)


def _signed_zero(w: _Writer, a: Value, sign: Value) -> Value:
    return w.select(w.test("eq", a, 0.0), w.bits(sign, F32), a)


def _abs(w: _Writer, x: Value) -> Value:
    """|x|, by its bits. A call of the library's function would keep PoCL from vectorizing the loop."""
    unsigned, mask = (U32, 0x7FFFFFFF) if x.dtype is F32 else (DType.U64, 0x7FFFFFFFFFFFFFFF)
    return w.bits(w.apply("and", w.bits(x, unsigned), w.number(mask, unsigned)), x.dtype)


def _from_f16(w: _Writer, x: Value) -> Value:
    bits = w.apply("convert", w.bits(x, U16), dtype=U32)
    magnitude = w.apply("shl", w.apply("and", bits, w.number(0x7FFF, U32)), w.number(13, U32))
    number = w.bits(w.mul(w.bits(magnitude, F32), 5.192296858534828e33), U32)
    special = w.apply("or", magnitude, w.number(0x7F800000, U32))
    number = w.select(w.test("ge", magnitude, 0x0F800000), special, number)
    sign = w.apply("shl", w.apply("and", bits, w.number(0x8000, U32)), w.number(16, U32))
    return w.bits(w.apply("or", number, sign), F32)


def _to_f16(w: _Writer, x: Value) -> Value:
    bits = w.bits(x, U32)
    magnitude = w.apply("and", bits, w.number(0x7FFFFFFF, U32))
    odd = w.apply("and", w.apply("shr", magnitude, w.number(13, U32)), w.number(1, U32))
    normal = w.apply("shr", w.add(w.add(magnitude, 0xC8000FFF), odd), w.number(13, U32))
    small = w.sub(w.bits(w.add(w.bits(magnitude, F32), 0.5), U32), 0x3F000000)
    found = w.select(w.test("lt", magnitude, 0x38800000), small, normal)
    found = w.select(w.test("ge", magnitude, 0x47800000), w.number(0x7C00, U32), found)
    found = w.select(w.test("gt", magnitude, 0x7F800000), w.number(0x7E00, U32), found)
    sign = w.apply("and", w.apply("shr", bits, w.number(16, U32)), w.number(0x8000, U32))
    return w.bits(w.apply("convert", w.apply("or", found, sign), dtype=U16), DType.F16)


def _from_bf16(w: _Writer, x: Value) -> Value:
    return w.bits(w.apply("shl", w.apply("convert", w.bits(x, U16), dtype=U32), w.number(16, U32)), F32)


def _to_bf16(w: _Writer, x: Value) -> Value:
    bits = w.bits(x, U32)
    odd = w.apply("and", w.apply("shr", bits, w.number(16, U32)), w.number(1, U32))
    near = w.apply("shr", w.add(w.add(bits, 0x7FFF), odd), w.number(16, U32))
    found = w.select(w.apply("isnan", x), w.number(0x7FC0, U32), near)
    return w.bits(w.apply("convert", found, dtype=U16), DType.BF16)


_BODIES: Final[dict[str, Callable[[_Writer, Value], Value]]] = {
    "exp": _exp,
    "exp2": _exp2,
    "expm1": _expm1,
    "log": _log,
    "log2": _log2,
    "log10": _log10,
    "log1p": _log1p,
    "tanh": _tanh,
    "erf": _erf,
    "sin": _circular(0),
    "cos": _circular(1),
    "round": _round,
    "trunc": _trunc,
    "floor": _floor,
    "ceil": _ceil,
}
_CONVERSIONS: Final[dict[tuple[DType, DType], Callable[[_Writer, Value], Value]]] = {
    (DType.F16, F32): _from_f16,
    (F32, DType.F16): _to_f16,
    (DType.BF16, F32): _from_bf16,
    (F32, DType.BF16): _to_bf16,
}


@cache
def function(op: str, source: DType, target: DType) -> Function | None:
    """Return Wooly's function for an operation from `source` to `target`; None if the language's own function is used."""
    if op == "convert":
        build, name = _CONVERSIONS.get((source, target)), f"wooly_{source.label}_to_{target.label}"
    elif op == "abs":
        build, name = (_abs if source in (F32, F64) else None), f"wooly_abs_{source.label}"
    else:
        build, name = (_BODIES.get(op) if source is F32 else None), f"wooly_{op}"
    if build is None:
        return None
    w = _Writer(name, ())
    result = build(w, w.argument(source))
    return Function(name, op, (source,), target, w.finish().body, result.number)
