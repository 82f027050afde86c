"""The operations of kernel IR, one row each: the primitives of `scalar_expr`, and a few operations that only machines need."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.scalar_expr import PRIMITIVES

#: Types of values in kernels. 16-bit floats can only be loaded, stored, selected and converted; arithmetic uses f32.
FLOATS: Final = frozenset({DType.F32, DType.F64})
SIGNED: Final = frozenset({DType.I8, DType.I16, DType.I32, DType.I64})
INTS: Final = SIGNED | {DType.U8, DType.U16, DType.U32, DType.U64}
NUMBERS: Final = FLOATS | INTS
STORED: Final = NUMBERS | {DType.BOOL, DType.F16, DType.BF16}

Rule = Callable[[DType, Sequence[DType]], bool]


@dataclass(frozen=True, slots=True)
class OpRow:
    """An operation.

    Attributes:
        name: name in the text.
        arity: number of arguments.
        says: meaning.
        types: description of the allowed argument types.
        rule: checks a result dtype against argument dtypes.
    """

    name: str
    arity: int
    says: str
    types: str
    rule: Rule


def _same(kinds: frozenset[DType]) -> Rule:
    return lambda out, args: out in kinds and all(a is out for a in args)


def _compare(out: DType, args: Sequence[DType]) -> bool:
    return out is DType.BOOL and args[0] is args[1] and args[0] in NUMBERS | {DType.BOOL}


def _test(out: DType, args: Sequence[DType]) -> bool:
    return out is DType.BOOL and args[0] in FLOATS


def _select(out: DType, args: Sequence[DType]) -> bool:
    return args[0] is DType.BOOL and args[1] is out and args[2] is out and out in STORED


def _convert(out: DType, args: Sequence[DType]) -> bool:
    halves = {DType.F16, DType.BF16}
    if out in halves:
        return args[0] is DType.F32
    if args[0] in halves:
        return out is DType.F32
    return out in STORED and args[0] in STORED


def _bitcast(out: DType, args: Sequence[DType]) -> bool:
    return out in STORED and args[0] in STORED and DType.BOOL not in (out, args[0]) and out.itemsize == args[0].itemsize


_BITS = INTS | {DType.BOOL}
_KINDS: dict[str, tuple[str, Rule]] = {
    "numbers": ("numbers of one type", _same(NUMBERS)),
    "floats": ("floating point of one type", _same(FLOATS)),
    "ints": ("integers of one type", _same(INTS)),
    "bits": ("integers of one type, or truth values", _same(_BITS)),
    "compare": ("two arguments of one type; the result is a truth value", _compare),
    "test": ("floating point; the result is a truth value", _test),
}
_BY_KIND: dict[str, str] = {
    "numbers": "add sub mul neg abs max min fmod",
    "floats": "div pow sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh erf erfc "
    "floor ceil round trunc fma",
    "ints": "div_floor div_trunc shl shr",
    "bits": "and or xor not",
    "compare": "eq ne lt le gt ge",
    "test": "isnan isinf",
}
_OWN: dict[str, tuple[int, str]] = {
    "max": (2, "the larger argument; not-a-number if either argument is"),
    "min": (2, "the smaller argument; not-a-number if either argument is"),
    "fma": (3, "a * b + c, rounded once"),
    "shl": (2, "a shifted left by b modulo its width"),
    "shr": (2, "a shifted right by b modulo its width, with the sign of signed types"),
}
#: All operations by name. Integer arithmetic wraps around. An integer quotient or remainder by 0 is 0.
OPS: Final[dict[str, OpRow]] = {
    name: OpRow(name, *(_OWN.get(name) or PRIMITIVES[name]), *_KINDS[kind])
    for kind, names in _BY_KIND.items()
    for name in names.split()
}
OPS["select"] = OpRow("select", *PRIMITIVES["select"], "a truth value and two arguments of one type", _select)
OPS["convert"] = OpRow(
    "convert",
    1,
    "a in another type: rounded to nearest, ties to even; to integers: towards zero, saturated, and 0 for not-a-number",
    "any two types; 16-bit floats only to and from f32",
    _convert,
)
OPS["bitcast"] = OpRow("bitcast", 1, "the same bits as another type", "two types of one size", _bitcast)

#: Kinds of atomic operations: how to combine an array element with a value.
ATOMICS: Final = frozenset({"add", "max", "min", "and", "or", "xor", "exchange"})


def bounds(dtype: DType) -> tuple[int, int]:
    """The least and greatest value of an integer type; (0, 1) for truth values."""
    if dtype is DType.BOOL:
        return 0, 1
    bits = 8 * dtype.itemsize
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype in SIGNED else (0, (1 << bits) - 1)


def rounded(value: float, dtype: DType) -> float:
    """The nearest value of a floating point type, ties to even."""
    if dtype is DType.F64:
        return value
    if dtype is DType.F32:
        return ctypes.c_float(value).value
    if dtype is DType.F16:
        try:
            return float(struct.unpack("<e", struct.pack("<e", value))[0])
        except OverflowError:
            return math.copysign(math.inf, value)
    assert dtype is DType.BF16
    if math.isnan(value):
        return value
    bits: int = struct.unpack("<I", struct.pack("<f", ctypes.c_float(value).value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
