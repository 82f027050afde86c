"""The primitives of scalar expressions (`wooly_wis.scalar_expr`) as nodes of a graph. Each takes an emitter, then nodes.

Raises (all functions):
    UnsupportedError: kernels do not have the operation for operands of these types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ops import FLOATS

from wooly_compiler.dag import Emitter
from wooly_compiler.errors import UnsupportedError

Primitive = Callable[..., int]


def primitives(e: Emitter) -> dict[str, Primitive]:
    """Return all primitives, bound to one emitter."""
    return {name: functools.partial(make, e) for name, make in PRIMITIVES.items()}


def _same(e: Emitter, a: int, b: int) -> DType:
    """Return the type of two values, which must be the same."""
    if e.dtype(a) is not e.dtype(b):
        raise UnsupportedError(f"a kernel cannot combine {e.dtype(a).label} with {e.dtype(b).label}")
    return e.dtype(a)


# -- families ------------------------------------------------------------------------------------------------------------


def _arithmetic(op: str, truth: str | None) -> Primitive:
    """A sum, difference or product; for truth values, the operation `truth`."""

    def make(e: Emitter, a: int, b: int) -> int:
        if _same(e, a, b) is DType.BOOL:
            if truth is None:
                raise UnsupportedError(f"generated kernels do not support {op} of truth values")
            return e.apply(truth, a, b)
        return e.apply(op, a, b)

    return make


def _floats(op: str) -> Primitive:
    """A function that only floating-point numbers have."""

    def make(e: Emitter, *args: int) -> int:
        if e.dtype(args[0]) not in FLOATS:
            raise UnsupportedError(f"generated kernels do not support {op} of {e.dtype(args[0]).label}")
        return e.apply(op, *args)

    return make


def _whole(op: str) -> Primitive:
    """A rounding; it leaves integers unchanged."""
    return lambda e, a: e.apply(op, a) if e.dtype(a) in FLOATS else a


def _compare(op: str) -> Primitive:
    def make(e: Emitter, a: int, b: int) -> int:
        _same(e, a, b)
        return e.apply(op, a, b, dtype=DType.BOOL)

    return make


def _test(op: str) -> Primitive:
    """A test that is false for all integers."""
    return lambda e, a: e.apply(op, a, dtype=DType.BOOL) if e.dtype(a) in FLOATS else e.const(DType.BOOL, False)


def _bits(op: str) -> Primitive:
    def make(e: Emitter, *args: int) -> int:
        if e.dtype(args[0]) in FLOATS:
            raise UnsupportedError(f"generated kernels do not support {op} of floating point")
        return e.apply(op, *args)

    return make


# -- single ones ---------------------------------------------------------------------------------------------------------


def _negative(e: Emitter, a: int) -> int:
    if e.dtype(a) is DType.BOOL:
        raise UnsupportedError("generated kernels do not support neg of truth values")
    return e.apply("neg", a)


def _power(e: Emitter, a: int, b: int) -> int:
    """A power. If the exponent is a known small number, the result is a product, as in the library."""
    exponent = e.graph.nodes[b]
    if e.dtype(a) not in FLOATS:
        raise UnsupportedError("generated kernels do not support pow of integers")
    if exponent.kind == "const":
        square = e.apply("mul", a, a)
        one = e.const(e.dtype(a), 1.0)
        known: dict[float, Callable[[], int]] = {
            1.0: lambda: a,
            2.0: lambda: square,
            3.0: lambda: e.apply("mul", square, a),
            0.5: lambda: e.apply("sqrt", a),
            -0.5: lambda: e.apply("div", one, e.apply("sqrt", a)),
            -1.0: lambda: e.apply("div", one, a),
            -2.0: lambda: e.apply("div", one, square),
        }
        if exponent.value in known:
            return known[float(exponent.value)]()
    return e.apply("pow", a, b)


def _choose(e: Emitter, c: int, a: int, b: int) -> int:
    if e.dtype(c) is not DType.BOOL:
        raise UnsupportedError("the condition of a select is not a truth value")
    _same(e, a, b)
    return e.apply("select", c, a, b)


def _whole_quotient(e: Emitter, op: str, a: int, b: int) -> int:
    """A quotient or remainder of integers. The kernel reports a divisor of 0, as the library does."""
    divisor = e.graph.nodes[b]
    if e.dtype(a) is DType.BOOL or e.dtype(b) is not e.dtype(a):
        raise UnsupportedError(f"generated kernels do not support {op} of {e.dtype(a).label}")
    if divisor.kind != "const" or not divisor.value:
        b = e.guard(b, e.apply("eq", b, e.const(e.dtype(b), 0), dtype=DType.BOOL))
    return e.apply(op, a, b)


def _div_trunc(e: Emitter, a: int, b: int) -> int:
    if _same(e, a, b) in FLOATS:
        return e.apply("trunc", e.apply("div", a, b))
    return _whole_quotient(e, "div_trunc", a, b)


def _remainder(e: Emitter, a: int, b: int) -> int:
    return e.apply("fmod", a, b) if _same(e, a, b) in FLOATS else _whole_quotient(e, "fmod", a, b)


def _div_floor(e: Emitter, a: int, b: int) -> int:
    """The exact quotient rounded down, by way of the exact remainder. A rounded quotient may be too large by one."""
    dtype = _same(e, a, b)
    if dtype not in FLOATS:
        return _whole_quotient(e, "div_floor", a, b)
    zero, one = e.const(dtype, 0.0), e.const(dtype, 1.0)
    left = e.apply("fmod", a, b)
    quotient = e.apply("div", e.apply("sub", a, left), b)
    signs = [e.apply("lt", n, zero, dtype=DType.BOOL) for n in (b, left)]
    beyond = e.apply("and", e.apply("ne", left, zero, dtype=DType.BOOL), e.apply("xor", *signs))
    quotient = e.apply("select", beyond, e.apply("sub", quotient, one), quotient)
    down = e.apply("floor", quotient)
    up = e.apply("gt", e.apply("sub", quotient, down), e.const(dtype, 0.5), dtype=DType.BOOL)
    down = e.apply("select", up, e.apply("add", down, one), down)
    none = e.apply("mul", e.apply("div", a, b), zero)
    found = e.apply("select", e.apply("eq", quotient, zero, dtype=DType.BOOL), none, down)
    return e.apply("select", e.apply("eq", b, zero, dtype=DType.BOOL), e.apply("div", a, b), found)


_FUNCTIONS: Final = (
    "div atan2 sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc".split()  # noqa: SIM905
)
#: The primitives by their names in scalar expressions.
PRIMITIVES: Final[dict[str, Primitive]] = {
    "add": _arithmetic("add", "or"),
    "sub": _arithmetic("sub", None),
    "mul": _arithmetic("mul", "and"),
    "div_trunc": _div_trunc,
    "div_floor": _div_floor,
    "fmod": _remainder,
    "neg": _negative,
    "abs": lambda e, a: a if e.dtype(a) is DType.BOOL else e.apply("abs", a),
    "conj": lambda e, a: a,
    "pow": _power,
    "select": _choose,
    **{op: _floats(op) for op in _FUNCTIONS},
    **{op: _whole(op) for op in ("floor", "ceil", "round", "trunc")},
    **{op: _compare(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{op: _test(op) for op in ("isnan", "isinf")},
    **{op: _bits(op) for op in ("and", "or", "xor", "not")},
}
