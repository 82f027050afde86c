"""Evaluates the compiler's elementary functions for Python numbers.

The results have the same bits as those of generated kernels.
"""

from __future__ import annotations

from wooly_compiler import mathlib
from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Apply, Const, Number

from wooly_testkit import kernel_scalars


def element(op: str, dtype: DType, args: list[Number], types: list[DType]) -> Number:
    """The result of one operation: by the compiler's own function if it has one, else by `kernel_scalars.apply`."""
    own = mathlib.function(op, types[0], dtype)
    return kernel_scalars.apply(op, dtype, args, types) if own is None else call(own, args)


def call(own: mathlib.Function, args: list[Number]) -> Number:
    """Evaluate a function of the compiler for Python numbers."""
    values: dict[int, Number] = dict(enumerate(args))
    types: dict[int, DType] = dict(enumerate(own.args))
    for s in own.body:
        if isinstance(s, Const):
            values[s.out], types[s.out] = s.value, s.dtype
        elif isinstance(s, Apply):
            at = [types[a] for a in s.args]
            values[s.out] = element(s.op, s.dtype, [values[a] for a in s.args], at)
            types[s.out] = s.dtype
    return values[own.result]
