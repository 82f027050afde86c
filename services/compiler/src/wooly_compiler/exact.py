"""Decides which instructions give the library's exact bits as a kernel.

An instruction qualifies if IEEE 754 or integer arithmetic determines every result. Kernel and library round a sum, a product or a
quotient once; they do not round a comparison, a selection or a copy. An instruction stays with the library in three cases. The
library may merge two operations (a product and a sum rounded once). It may use another function (its square root is a vendor's).
Or its result may depend on the position of an element in a vector (the sign of the larger of two zeros). `tests/tiers` of the
compiler compares every row here with the library on many bit patterns. All NaNs count as equal.
"""

from __future__ import annotations

from typing import Any, Final

from wooly_wis.dtypes import DType
from wooly_wis.optable import TABLE, arguments
from wooly_wis.plan import Line
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef
from wooly_wis.promotion import NumberKind, kind_of, opmath

from wooly_compiler.externs import EMBEDDING_BACKWARD

_HALVES: Final = (DType.F16, DType.BF16)
#: Operations that qualify for all dtypes.
_ALWAYS: Final = frozenset(
    "neg abs sign floor ceil trunc round isnan logical_not logical_and logical_or logical_xor bitwise_not bitwise_and "  # noqa: SIM905
    "bitwise_or bitwise_xor eq ne lt le gt ge relu relu_backward where masked_fill any all mul div reciprocal".split()
)
#: Operations that qualify for integers only. For floats, the order of operands changes the sign of a zero, or the last bits.
_INTEGERS: Final = frozenset("maximum minimum clamp clamp_min clamp_max amax amin sum".split())  # noqa: SIM905
#: Operators that qualify: library and kernel both add rows one by one and round each sum.
_EXTERNS: Final = frozenset({EMBEDDING_BACKWARD})
_COMPARISONS: Final = frozenset("eq ne lt le gt ge".split())  # noqa: SIM905
_EXPONENTS: Final = (1.0, 2.0, 3.0, -0.5, -1.0, -2.0)


def why_not(line: Line, decided: dict[int, Any]) -> str:
    """Return why a kernel might give other bits than the library; empty if the bits are the same.

    Args:
        line: an instruction.
        decided: values of the params that decide what is computed.
    """
    form = line.form
    if form.opcode in ("copy", "fill"):
        return _moving(form)
    if form.opcode == "extern":
        return (
            ""
            if form.attr("name") in _EXTERNS
            else f"a kernel would round {form.attr('name')} in another way than the library"
        )
    if form.opcode not in TABLE:
        return f"{form.opcode} has no generated kernel"
    dtypes = [o.view.dtype for o in form.operands if o.view is not None]
    integral = all(kind_of(d) < NumberKind.FLOAT for d in dtypes)
    args = form.attr("args", ())
    assert isinstance(args, tuple)
    if form.opcode in _ALWAYS:
        return _compared(form, args) if form.opcode in _COMPARISONS else ""
    if form.opcode in _INTEGERS:
        return "" if integral else f"a kernel may give other bits than the library for {form.opcode} of floating point"
    if form.opcode in ("add", "sub", "rsub"):
        return _sum(form, args, integral)
    if form.opcode == "pow":
        return _power(line, args, decided)
    if form.opcode in ("sigmoid_backward", "rsqrt"):
        return "" if not any(d in _HALVES for d in dtypes) else "the library rounds 16-bit intermediate results"
    return f"a kernel would round {form.opcode} in another way than the library"


def _moving(form: Form) -> str:
    to = form.operands[-1].view
    assert to is not None
    whole = kind_of(to.dtype) is NumberKind.INT
    if form.opcode == "copy":
        source = form.operands[0].view
        assert source is not None
        if whole and kind_of(source.dtype) >= NumberKind.FLOAT:
            return "the library has its own rule for numbers that do not fit into an integer"
        return ""
    value = form.attr("value")
    floating = isinstance(value, float) or (isinstance(value, ParamRef) and form.params[value.index] is ParamKind.F64)
    return "an integer tensor is filled with a floating-point number" if whole and floating else ""


def _sum(form: Form, args: tuple[Attr, ...], integral: bool) -> str:
    if len(args) > 2 and args[2] not in (None, 1):
        return "the library multiplies and adds with one rounding"
    if form.opcode == "rsub" and integral:
        return "the library rounds the number before the subtraction"
    return _compared(form, args)


def _compared(form: Form, args: tuple[Attr, ...]) -> str:
    number = not all(isinstance(a, OperandRef) for a in args[:2])
    if number and any(o.view is not None and o.view.dtype in _HALVES for o in form.operands):
        return "the library rounds the number to 16 bits before the operation"
    return ""


def _power(line: Line, args: tuple[Attr, ...], decided: dict[int, Any]) -> str:
    exponent = args[1]
    value = decided.get(line.first_param + exponent.index) if isinstance(exponent, ParamRef) else exponent
    if not isinstance(value, (int, float)) or float(value) not in _EXPONENTS:
        return "a kernel may give other bits than the library for this exponent"
    dtype = arguments(line.form).promoted()
    if dtype in _HALVES and float(value) not in (1.0, 2.0):
        return "the library rounds 16-bit intermediate results"
    return "" if kind_of(opmath(dtype)) is NumberKind.FLOAT else "powers of integers have no generated kernel"
