"""Arithmetic of single elements, exact to the bit: the operations of `kernel.ops` for Python numbers of a dtype.

Sums, products, quotients and roots are rounded once, as IEEE 754 requires. f32 is computed in f64 and then rounded, which gives
the same result for these operations. Elementary functions are those of the C library in f64, rounded to the dtype.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Number
from wooly_wis.kernel.ops import FLOATS, SIGNED, bounds, rounded

_INT_FORMAT: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def wrapped(value: int, dtype: DType) -> int:
    """An integer, wrapped to the range of its dtype."""
    low, high = bounds(dtype)
    return (value - low) % (high - low + 1) + low


def bits_of(value: Number, dtype: DType) -> int:
    """The bits of an element, as an unsigned integer."""
    if dtype in (DType.F16, DType.BF16):
        if dtype is DType.BF16:
            return int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    if dtype in FLOATS:
        pair = ("<f", "<I") if dtype is DType.F32 else ("<d", "<Q")
        return int(struct.unpack(pair[1], struct.pack(pair[0], value))[0])
    return int(value) & ((1 << 8 * dtype.itemsize) - 1)


def from_bits(bits: int, dtype: DType) -> Number:
    """The element with these bits."""
    if dtype is DType.BOOL:
        return bits != 0
    if dtype is DType.BF16:
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    if dtype.kind == "float":
        code = {2: "<e", 4: "<f", 8: "<d"}[dtype.itemsize]
        return float(struct.unpack(code, struct.pack("<" + _INT_FORMAT[dtype.itemsize], bits))[0])
    return wrapped(bits, dtype)


def convert(value: Number, source: DType, target: DType) -> Number:
    """Convert an element to another dtype."""
    if target is DType.BOOL:
        return value != 0
    if target.kind == "float":
        if source in (DType.I64, DType.U64) and target is DType.F32:
            return _nearest_f32(int(value))
        return rounded(float(value), target)
    if source.kind == "float":
        if math.isnan(value):
            return 0
        low, high = bounds(target)
        return low if value <= low else high if value >= high else int(value)
    return wrapped(int(value), target)


def _nearest_f32(n: int) -> float:
    """The f32 nearest to a 64-bit integer, rounded once."""
    extra = max(abs(n).bit_length() - 24, 0)
    if not extra:
        return float(n)
    whole, rest = divmod(abs(n), 1 << extra)
    half = 1 << extra - 1
    if rest > half or (rest == half and whole & 1):
        whole += 1
    return math.copysign(float(whole << extra), n)


def _guarded(function: Callable[..., float]) -> Callable[..., float]:
    """Wrap a function of Python so that it returns the result of C instead of raising."""

    def run(*args: float) -> float:
        if any(math.isnan(a) for a in args):
            return math.nan
        try:
            return function(*args)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return run


def _div(a: float, b: float) -> float:
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _pole(function: Callable[[float], float], at: float) -> Callable[[float], float]:
    return _guarded(lambda a: -math.inf if a == at else function(a))


def _pow(a: float, b: float) -> float:
    if a == 1 or b == 0:
        return 1.0
    if math.isnan(a) or math.isnan(b):
        return math.nan
    try:
        return math.pow(a, b)
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf
    except ValueError:
        if a == 0:
            return math.copysign(math.inf, a) if b % 2 == 1 else math.inf
        return math.nan


def _sign_odd(function: Callable[[float], float]) -> Callable[[float], float]:
    """Wrap an odd function so that it returns a signed infinity on overflow."""

    def run(a: float) -> float:
        try:
            return function(a)
        except OverflowError:
            return math.copysign(math.inf, a)

    return run


def _whole(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda a: a if math.isnan(a) or math.isinf(a) else math.copysign(float(function(a)), a)


def _fma(a: float, b: float, c: float) -> float:
    if any(math.isnan(v) or math.isinf(v) for v in (a, b, c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if exact else a * b + c


def _fma_f32(a: float, b: float, c: float) -> float:
    """An f64 that rounds to the f32 nearest to a * b + c.

    The product is exact in f64. If the sum is not exact, the result is the neighbouring f64 with an odd last bit, which rounds to
    the same f32 as the exact sum (S. Boldo, G. Melquiond: Emulation of FMA and correctly rounded sums, 2008).
    """
    product = a * b
    total = product + c
    if math.isnan(total) or math.isinf(total):
        return total
    back = total - product
    error = (product - (total - back)) + (c - back)
    if error and not struct.unpack("<Q", struct.pack("<d", total))[0] & 1:
        return math.nextafter(total, math.copysign(math.inf, error))
    return total


_FLOAT_OPS: Final[dict[str, Callable[..., float]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _div,
    "neg": lambda a: -a,
    "abs": abs,
    "max": lambda a, b: a if math.isnan(a) or (not math.isnan(b) and a > b) else b,
    "min": lambda a, b: a if math.isnan(a) or (not math.isnan(b) and a < b) else b,
    "fmod": _guarded(math.fmod),
    "pow": _pow,
    "sqrt": _guarded(math.sqrt),
    "exp": _guarded(math.exp),
    "exp2": _guarded(lambda a: math.pow(2.0, a)),
    "expm1": _guarded(math.expm1),
    "log": _pole(math.log, 0),
    "log2": _pole(math.log2, 0),
    "log10": _pole(math.log10, 0),
    "log1p": _pole(math.log1p, -1),
    "sin": _guarded(math.sin),
    "cos": _guarded(math.cos),
    "tan": _guarded(math.tan),
    "asin": _guarded(math.asin),
    "acos": _guarded(math.acos),
    "atan": math.atan,
    "atan2": math.atan2,
    "sinh": _sign_odd(math.sinh),
    "cosh": _guarded(math.cosh),
    "tanh": math.tanh,
    "erf": math.erf,
    "erfc": math.erfc,
    "floor": _whole(math.floor),
    "ceil": _whole(math.ceil),
    "round": _whole(round),
    "trunc": _whole(math.trunc),
    "fma": _fma,
}


def _quotient(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_INT_OPS: Final[dict[str, Callable[..., int]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": abs,
    "max": max,
    "min": min,
    "div_floor": lambda a, b: a // b if b else 0,
    "div_trunc": _quotient,
    "fmod": lambda a, b: a - _quotient(a, b) * b if b else 0,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def apply(op: str, dtype: DType, args: list[Number], types: list[DType]) -> Number:
    """The result of a valid operation.

    Args:
        op: name of the operation.
        dtype: dtype of the result.
        args: operands.
        types: dtypes of the operands.
    """
    if op in _COMPARE:
        return _COMPARE[op](*args)
    if op == "select":
        return args[1] if args[0] else args[2]
    if op == "convert":
        return convert(args[0], types[0], dtype)
    if op == "bitcast":
        return from_bits(bits_of(args[0], types[0]), dtype)
    if op == "isnan":
        return math.isnan(args[0])
    if op == "isinf":
        return math.isinf(args[0])
    if dtype in FLOATS:
        if op == "fma" and dtype is DType.F32:
            return rounded(_fma_f32(*args), dtype)
        return rounded(_FLOAT_OPS[op](*args), dtype)
    if dtype is DType.BOOL:
        if op == "not":
            return not args[0]
        return bool(_INT_OPS[op](*[int(a) for a in args]))
    a = int(args[0])
    if op in ("shl", "shr"):
        width = 8 * dtype.itemsize
        by = int(args[1]) % width
        if op == "shl":
            return wrapped(a << by, dtype)
        return wrapped(a >> by if dtype in SIGNED else (a & ((1 << width) - 1)) >> by, dtype)
    return wrapped(_INT_OPS[op](*[int(v) for v in args]), dtype)
