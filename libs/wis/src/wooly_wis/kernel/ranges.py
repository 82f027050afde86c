"""Intervals of integer values, computed from loop extents. The verifier uses them to prove that an index is in bounds."""

from __future__ import annotations

from typing import TypeAlias

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ops import INTS, bounds

Interval: TypeAlias = tuple[int, int]


def of_dtype(dtype: DType) -> Interval | None:
    """The interval of all values of a type; None for floating point."""
    return bounds(dtype) if dtype in INTS or dtype is DType.BOOL else None


def _trunc(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _corners(a: Interval, b: Interval) -> Interval:
    found = [x * y for x in a for y in b]
    return min(found), max(found)


def apply(op: str, dtype: DType, args: list[Interval | None]) -> Interval | None:
    """The interval of an operation's result. If nothing better is known, this is the interval of the type."""
    whole = of_dtype(dtype)
    if whole is None:
        return None
    if any(a is None for a in args):
        return whole
    known = [a for a in args if a is not None]
    found = _of(op, known)
    if found is None or found[0] < whole[0] or found[1] > whole[1]:
        return whole
    return found


def _of(op: str, args: list[Interval]) -> Interval | None:
    a = args[0]
    b = args[1] if len(args) > 1 else (0, 0)
    match op:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            return _corners(a, b)
        case "neg":
            return -a[1], -a[0]
        case "abs":
            low = 0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
            return low, max(abs(a[0]), abs(a[1]))
        case "max":
            return max(a[0], b[0]), max(a[1], b[1])
        case "min":
            return min(a[0], b[0]), min(a[1], b[1])
        case "div_floor" if b[0] > 0:
            return min(a[0] // b[0], a[0] // b[1]), max(a[1] // b[0], a[1] // b[1])
        case "div_trunc" if b[0] > 0:
            return min(_trunc(a[0], b[0]), _trunc(a[0], b[1])), max(_trunc(a[1], b[0]), _trunc(a[1], b[1]))
        case "fmod" if b[0] > 0:
            return max(a[0], -b[1] + 1) if a[0] < 0 else 0, min(a[1], b[1] - 1) if a[1] > 0 else 0
        case "and" if a[0] >= 0 and b[0] >= 0:
            return 0, min(a[1], b[1])
        case "shl" if b[0] == b[1] and 0 <= b[0] < 64:
            return a[0] << b[0], a[1] << b[0]
        case "shr" if b[0] == b[1] and 0 <= b[0] < 64:
            return a[0] >> b[0], a[1] >> b[0]
        case "select":
            c = args[2]
            return min(b[0], c[0]), max(b[1], c[1])
        case "convert":
            return a
    return None


def fits(op: str, dtype: DType, args: list[Interval | None]) -> bool:
    """Whether integer arithmetic on these intervals stays within the type, so that no value wraps around."""
    whole = of_dtype(dtype)
    if whole is None or any(a is None for a in args):
        return False
    found = _of(op, [a for a in args if a is not None])
    return found is not None and whole[0] <= found[0] and found[1] <= whole[1]
