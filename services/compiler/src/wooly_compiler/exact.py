"""Which instructions have the library's own bits as a kernel: those whose every result IEEE 754, or integers, leave no choice in.

A sum, a product, a quotient are rounded once by both sides; a comparison, a selection, a copy are not rounded at all. Where the
library makes two operations one (a product added in one rounding), takes another function (its square root is a vendor's), or
hangs on the place of an element in its vectors (the sign of the larger of two zeros), the instruction stays the library's.
`tests/tiers` runs every row here against the library, on all sorts of bits. Of a not-a-number, only that it is one counts.
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
#: On all dtypes.
_ALWAYS: Final = frozenset(
    "neg abs sign floor ceil trunc round isnan logical_not logical_and logical_or logical_xor bitwise_not bitwise_and "  # noqa: SIM905
    "bitwise_or bitwise_xor eq ne lt le gt ge relu relu_backward where masked_fill any all mul div reciprocal".split()
)
#: On integers alone: of floating point, the order of the operands shows in the sign of a zero, or in the last bits.
_INTEGERS: Final = frozenset("maximum minimum clamp clamp_min clamp_max amax amin sum".split())  # noqa: SIM905
#: The library adds rows one by one, each sum rounded, and so does the kernel.
_EXTERNS: Final = frozenset({EMBEDDING_BACKWARD})
_COMPARISONS: Final = frozenset("eq ne lt le gt ge".split())  # noqa: SIM905
_EXPONENTS: Final = (1.0, 2.0, 3.0, -0.5, -1.0, -2.0)


def why_not(line: Line, decided: dict[int, Any]) -> str:
    """Why a kernel might have other bits than the library; empty if it has the same.

    Args:
        line: an instruction.
        decided: values of params on which the computation hangs.
    """
    form = line.form
    if form.opcode in ("copy", "fill"):
        return _moving(form)
    if form.opcode == "extern":
        return "" if form.attr("name") in _EXTERNS else f"{form.attr('name')} is not rounded as in the library"
    if form.opcode not in TABLE:
        return f"{form.opcode} is the library's"
    dtypes = [o.view.dtype for o in form.operands if o.view is not None]
    integral = all(kind_of(d) < NumberKind.FLOAT for d in dtypes)
    args = form.attr("args", ())
    assert isinstance(args, tuple)
    if form.opcode in _ALWAYS:
        return _compared(form, args) if form.opcode in _COMPARISONS else ""
    if form.opcode in _INTEGERS:
        return "" if integral else f"{form.opcode} of floating point has the library's bits only there"
    if form.opcode in ("add", "sub", "rsub"):
        return _sum(form, args, integral)
    if form.opcode == "pow":
        return _power(line, args, decided)
    if form.opcode in ("sigmoid_backward", "rsqrt"):
        return "" if not any(d in _HALVES for d in dtypes) else "of 16 bits, the library rounds in between"
    return f"{form.opcode} is not rounded as in the library"


def _moving(form: Form) -> str:
    to = form.operands[-1].view
    assert to is not None
    whole = kind_of(to.dtype) is NumberKind.INT
    if form.opcode == "copy":
        source = form.operands[0].view
        assert source is not None
        if whole and kind_of(source.dtype) >= NumberKind.FLOAT:
            return "what an integer becomes that cannot hold a number is the library's own"
        return ""
    value = form.attr("value")
    floating = isinstance(value, float) or (isinstance(value, ParamRef) and form.params[value.index] is ParamKind.F64)
    return "an integer is filled with a fraction" if whole and floating else ""


def _sum(form: Form, args: tuple[Attr, ...], integral: bool) -> str:
    if len(args) > 2 and args[2] not in (None, 1):
        return "the library adds a product in one rounding"
    if form.opcode == "rsub" and integral:
        return "the library rounds the number first"
    return _compared(form, args)


def _compared(form: Form, args: tuple[Attr, ...]) -> str:
    number = not all(isinstance(a, OperandRef) for a in args[:2])
    if number and any(o.view is not None and o.view.dtype in _HALVES for o in form.operands):
        return "the library rounds the number to 16 bits first"
    return ""


def _power(line: Line, args: tuple[Attr, ...], decided: dict[int, Any]) -> str:
    exponent = args[1]
    value = decided.get(line.first_param + exponent.index) if isinstance(exponent, ParamRef) else exponent
    if not isinstance(value, (int, float)) or float(value) not in _EXPONENTS:
        return "powers are the library's"
    dtype = arguments(line.form).promoted()
    if dtype in _HALVES and float(value) not in (1.0, 2.0):
        return "of 16 bits, the library rounds in between"
    return "" if kind_of(opmath(dtype)) is NumberKind.FLOAT else "powers of integers are the library's"
