"""Type promotion: the dtype of a computation whose operands have different dtypes.

The rules are PyTorch's, as data. A Python number (not a tensor) has lower priority than a tensor.

Source: c10/core/ScalarType.cpp (promoteTypes) and ATen/native/TypeProperties.cpp (result_type) of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.program import View


class NumberKind(IntEnum):
    """Kind of a number that is not a tensor. The kinds are ordered: each kind can represent all kinds before it."""

    BOOL = 0
    INT = 1
    FLOAT = 2
    COMPLEX = 3


#: The dtype of a number if no tensor decides the dtype.
DEFAULT_OF = {
    NumberKind.BOOL: DType.BOOL,
    NumberKind.INT: DType.I64,
    NumberKind.FLOAT: DType.F32,
    NumberKind.COMPLEX: DType.C64,
}

FLOAT8 = frozenset(d for d in DType if d.label.startswith("f8"))
#: Unsigned types that promote only with themselves and with floating point types.
ISOLATED = frozenset({DType.U16, DType.U32, DType.U64})
_COMPLEX_OF = {DType.F16: DType.C32, DType.BF16: DType.C64, DType.F32: DType.C64, DType.F64: DType.C128}
_REAL_OF = {DType.C32: DType.F16, DType.C64: DType.F32, DType.C128: DType.F64}
_OPMATH = {DType.F16: DType.F32, DType.BF16: DType.F32, DType.C32: DType.C64}
_INTS = (DType.I8, DType.I16, DType.I32, DType.I64)


def kind_of(dtype: DType) -> NumberKind:
    """The kind of number that a dtype stores."""
    return {
        "bool": NumberKind.BOOL,
        "uint": NumberKind.INT,
        "int": NumberKind.INT,
        "float": NumberKind.FLOAT,
        "complex": NumberKind.COMPLEX,
    }[dtype.kind]


def complex_of(dtype: DType) -> DType:
    """The smallest complex dtype whose real and imaginary parts can represent `dtype`."""
    return dtype if dtype.kind == "complex" else _COMPLEX_OF[dtype]


def real_of(dtype: DType) -> DType:
    """The dtype of the magnitude of a `dtype` value."""
    return _REAL_OF.get(dtype, dtype)


def opmath(dtype: DType) -> DType:
    """The dtype in which elements are computed, before one rounding to `dtype`."""
    return _OPMATH.get(dtype, dtype)


def promote(a: DType, b: DType) -> DType:
    """The smallest dtype that can represent both dtypes.

    Raises:
        RuleError: no dtype can represent both, or PyTorch does not promote this pair.
    """
    if a is b:
        return a
    if a in FLOAT8 or b in FLOAT8:
        raise RuleError("dtype", f"{a.label} and {b.label} have no common dtype; convert one of them first")
    ka, kb = kind_of(a), kind_of(b)
    if ka < kb:
        a, b, ka, kb = b, a, kb, ka
    if b in ISOLATED and ka is NumberKind.COMPLEX:
        raise RuleError("dtype", f"{a.label} and {b.label} have no common dtype; convert one of them first")
    if ka is NumberKind.COMPLEX:
        other = b if kb is NumberKind.COMPLEX else complex_of(b) if kb is NumberKind.FLOAT else a
        return max(a, other, key=lambda d: d.itemsize)
    if ka is NumberKind.FLOAT:
        if kb is not NumberKind.FLOAT:
            return a
        return DType.F32 if {a, b} == {DType.F16, DType.BF16} else max(a, b, key=lambda d: d.itemsize)
    if a in ISOLATED or b in ISOLATED:
        raise RuleError("dtype", f"{a.label} and {b.label} have no common dtype; convert one of them first")
    if kb is NumberKind.BOOL:
        return a
    if DType.U8 in (a, b):
        signed = b if a is DType.U8 else a
        return max(signed, DType.I16, key=lambda d: d.itemsize)
    return max(a, b, key=_INTS.index)


def _combine(higher: DType | None, lower: DType | None) -> DType | None:
    """Combine the dtypes of two priority levels. `higher` decides, unless `lower` is of a higher kind."""
    if higher is None or lower is None:
        return higher or lower
    kh, kl = kind_of(higher), kind_of(lower)
    if kh is NumberKind.COMPLEX:
        return higher
    if kh is NumberKind.FLOAT:
        if kl is NumberKind.COMPLEX and higher in FLOAT8:
            raise RuleError(
                "dtype", f"{higher.label} has no complex dtype of the same precision; convert the operand first"
            )
        return complex_of(higher) if kl is NumberKind.COMPLEX else higher
    if kl is NumberKind.COMPLEX:
        return lower
    return promote(higher, lower) if kh is NumberKind.BOOL or kl is NumberKind.FLOAT else higher


def _promoted(known: DType | None, dtype: DType) -> DType:
    return dtype if known is None else promote(known, dtype)


def result_type(views: Iterable[View], numbers: Iterable[NumberKind] = ()) -> DType:
    """The common dtype of tensors and numbers. Tensors with dimensions decide first, then 0-dimensional tensors, then numbers.

    Raises:
        RuleError: the dtypes have no common dtype, or there is no operand.
    """
    of_dimensioned = of_scalars = of_numbers = None
    for view in views:
        if view.sizes:
            of_dimensioned = _promoted(of_dimensioned, view.dtype)
        else:
            of_scalars = _promoted(of_scalars, view.dtype)
    for number in numbers:
        of_numbers = _promoted(of_numbers, DEFAULT_OF[number])
    found = _combine(_combine(of_dimensioned, of_scalars), of_numbers)
    if found is None:
        raise RuleError("dtype", "the operation has no operand, so it has no dtype")
    return found
