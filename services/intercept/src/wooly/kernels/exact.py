"""Operators whose results have the same bits on all devices, and how the host computes them.

Left to the device are results that devices may round differently: a factor that some fuse with an addition, a quotient by a
number, which some multiply by the reciprocal, a number beside half precision, and a zero whose sign may differ. This module
knows neither programs nor the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.dtypes import DType
from wooly_wis.optable import TABLE
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role, Symbol

from wooly.dtypes import TORCH_DTYPES
from wooly.kernels.host_copies import FLOATS, HALVES, INTEGERS, MAX_BYTES, REAL, is_dense, key_of, nbytes_of
from wooly.link import ViewKey

Numbers = Sequence[float | int]
#: Dtypes in which one addition or multiplication is rounded once, on every device.
_ROUNDED_ONCE = INTEGERS | {torch.float32, torch.float64}


class _Exact(NamedTuple):
    """How an opcode is computed on the host.

    Attributes:
        call: takes the arguments of the opcode's row, in order.
        dtypes: dtypes for which the result has the same bits on all devices.
        signed_zeros: whether devices may differ in the sign of a result that is zero.
    """

    call: Callable[..., Tensor]
    dtypes: frozenset[torch.dtype] = REAL
    signed_zeros: bool = False


def _unscaled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator that also takes a factor, with the factor 1: with another one, some devices round once, others twice."""

    def compute(a: Any, b: Any, alpha: float) -> Tensor:
        if alpha != 1:
            raise Unknown
        return call(a, b)

    return compute


def _of_tensors(a: Any, b: Any) -> Tensor:
    """A quotient of two tensors. Some devices multiply by the reciprocal of a number."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype is not b.dtype:
        raise Unknown
    return torch.div(a, b)


def _extreme(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, dims, keepdim: whole(a, dim=dims, keepdim=keepdim)


def _truth(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, dims, keepdim: whole(a) if dims is None and not keepdim else whole(a, dim=dims, keepdim=keepdim)


class Unknown(Exception):  # it is no error: the device computes the value
    """The value cannot be computed on the host with the bits of all devices."""


_EXACT: Mapping[str, _Exact] = {
    **{
        name: _Exact(getattr(torch, name))
        for name in (
            *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "neg", "abs", "floor", "ceil", "trunc"),
            *("where", "masked_fill"),
        )
    },
    **{
        name: _Exact(getattr(torch, name), signed_zeros=True)
        for name in ("maximum", "minimum", "clamp", "clamp_min", "clamp_max")
    },
    "amax": _Exact(_extreme(torch.amax), signed_zeros=True),
    "amin": _Exact(_extreme(torch.amin), signed_zeros=True),
    "add": _Exact(_unscaled(torch.add), _ROUNDED_ONCE),
    "sub": _Exact(_unscaled(torch.sub), _ROUNDED_ONCE),
    "rsub": _Exact(_unscaled(torch.rsub), _ROUNDED_ONCE),
    "mul": _Exact(torch.mul, _ROUNDED_ONCE),
    "div": _Exact(_of_tensors, frozenset((torch.float32, torch.float64))),
    "div_floor": _Exact(lambda a, b: torch.div(a, b, rounding_mode="floor"), INTEGERS),
    "remainder": _Exact(torch.remainder, INTEGERS),
    "sqrt": _Exact(torch.sqrt, frozenset((torch.float32, torch.float64))),
    "sum": _Exact(lambda a, dims, keepdim, dtype: torch.sum(a, dim=dims, keepdim=keepdim, dtype=dtype), INTEGERS),
    "any": _Exact(_truth(torch.any)),
    "all": _Exact(_truth(torch.all)),
    "concat": _Exact(lambda parts, dim: torch.cat(parts, dim)),
    "index_select": _Exact(torch.index_select),
    "gather": _Exact(torch.gather),
    "embedding": _Exact(lambda weight, index, _: torch.embedding(weight, index)),
}
#: Library operators, and the dtypes for which their results have the same bits on all devices.
_EXACT_EXTERNS: Mapping[str, frozenset[torch.dtype]] = {
    "aten.any.dim": REAL,
    "aten.all.dim": REAL,
    "aten.isin.Tensor_Tensor": REAL,
    "aten.isin.Tensor_Scalar": REAL,
    "aten.cumsum.default": INTEGERS,
    "aten.prod.default": INTEGERS,
    "aten.prod.dim_int": INTEGERS,
    "aten.flip.default": REAL,
    "aten.isinf.default": REAL,
    "aten.index.Tensor": REAL,
}
#: The operator that fills a new tensor with a range of numbers. Its operand is also an input, in name.
_ARANGE = "aten.arange.start_out"
#: Library operators whose shapes depend on data, and the same.
EXACT_DYNAMIC: Mapping[str, frozenset[torch.dtype]] = {
    "aten.nonzero.default": REAL,
    "aten.masked_select.default": REAL,
    "aten.repeat_interleave.Tensor": INTEGERS,
    "aten._unique2.default": INTEGERS,
    "aten.unique_consecutive.default": INTEGERS,
    "aten.bincount.default": INTEGERS,
}


class Rule(NamedTuple):
    """How the instructions of one form are computed.

    Attributes:
        call: takes the operands (None for the result) and the params.
        inputs: positions and views of the operands that are read.
        result: position of the operand that is written.
        view: its view.
        signed_zeros: as in `_Exact`.
    """

    call: Callable[[Sequence[Tensor | None], Numbers], Tensor]
    inputs: tuple[tuple[int, ViewKey], ...]
    result: int
    view: ViewKey
    signed_zeros: bool


def laid_out(rule: Rule, host: Tensor) -> Tensor:
    """The result of an instruction with the strides of its view.

    Raises:
        Unknown: it is not what the instruction computes, or devices may compute another sign of zero.
    """
    _, dtype, shape, stride = rule.view
    if host.dtype is not dtype or tuple(host.shape) != tuple(shape):
        raise Unknown
    if rule.signed_zeros and dtype in FLOATS and bool((host == 0).any()):
        raise Unknown
    if tuple(host.stride()) == tuple(stride):
        return host
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(host)


def rule_of(form: Form) -> Rule | None:
    """How instructions of a form are computed; None: not on the host."""
    views = [operand.view for operand in form.operands]
    written = [k for k, operand in enumerate(form.operands) if operand.role is not Role.IN]
    if len(written) != 1 or None in views or ParamKind.C128 in form.params:
        return None
    keys = [key_of(view) for view in views if view is not None]
    result = written[0]
    if not is_dense(keys[result]) or max(map(nbytes_of, keys)) > MAX_BYTES:
        return None
    overwritten = result if form.attr("name") == _ARANGE else None
    inputs = tuple(
        [(k, key) for k, key in enumerate(keys) if form.operands[k].role is not Role.OUT and k != overwritten]
    )
    found = _call_of(form, [key[1] for key in keys])
    if found is None:
        return None
    call, signed_zeros = found
    in_place = form.operands[result].role is Role.INOUT
    if in_place:
        dtype = keys[result][1]
        computed = call

        def call(operands: Sequence[Tensor | None], params: Numbers) -> Tensor:
            value = computed(operands, params)
            if value.dtype is not dtype and not _converts(value.dtype, dtype):
                raise Unknown
            return value.to(dtype)

    return Rule(call, inputs, result, keys[result], signed_zeros)


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether conversions are exact, or rounded alike on all devices."""
    return source in REAL and target in REAL and (source in INTEGERS or target in FLOATS or target is torch.bool)


def _call_of(
    form: Form, dtypes: Sequence[torch.dtype]
) -> tuple[Callable[[Sequence[Tensor | None], Numbers], Tensor], bool] | None:
    """What computes a form, and whether devices may differ in the sign of a zero; None: not on the host."""
    if form.opcode == "copy":
        source, target = dtypes
        return (lambda operands, _: _given(operands[0]).to(target), False) if _converts(source, target) else None
    if form.opcode == "fill":
        view, value = form.operands[0].view, form.attr("value")
        assert view is not None
        if dtypes[0] not in REAL:
            return None
        return lambda _, params: torch.full(
            view.sizes, _argument(value, (), params), dtype=dtypes[0], device="cpu"
        ), False
    if form.attr("name") == _ARANGE:
        return _range(form, dtypes[0])
    if _attributes(form):
        return None
    if form.attr("name") == "aten.clone.default":  # its memory format decides the strides alone
        return (lambda operands, _: _given(operands[0]), False) if REAL.issuperset(dtypes) else None
    if form.opcode == "extern":
        return _extern(form, dtypes)
    row, exact = TABLE.get(form.opcode), _EXACT.get(form.opcode)
    if row is None or exact is None or not exact.dtypes.issuperset(dtypes):
        return None
    if form.params and not HALVES.isdisjoint(dtypes):  # devices round the number to 16 or to 32 bits
        return None
    given = form.attr("args", ())
    assert isinstance(given, tuple)
    attrs = given + tuple([arg.default for arg in row.args[len(given) :]])
    return (lambda operands, params: exact.call(*[_argument(a, operands, params) for a in attrs])), exact.signed_zeros


def _range(form: Form, dtype: torch.dtype) -> tuple[Callable[[Sequence[Tensor | None], Numbers], Tensor], bool] | None:
    """A range of integers. Devices may compute numbers with fractions in several ways."""
    args = form.attr("args", ())
    assert isinstance(args, tuple)
    if dtype not in INTEGERS or not all(type(a) is int or isinstance(a, ParamRef) for a in args):
        return None

    def compute(_: Sequence[Tensor | None], params: Numbers) -> Tensor:
        numbers = [_argument(a, (), params) for a in args]
        if any(type(number) is not int for number in numbers):
            raise Unknown
        return torch.arange(*numbers, dtype=dtype, device="cpu")

    return compute, False


def _extern(
    form: Form, dtypes: Sequence[torch.dtype]
) -> tuple[Callable[[Sequence[Tensor | None], Numbers], Tensor], bool] | None:
    exact = _EXACT_EXTERNS.get(str(form.attr("name")))
    inputs = [d for d, operand in zip(dtypes, form.operands, strict=True) if operand.role is Role.IN]
    if exact is None or not exact.issuperset(inputs) or len(inputs) == len(dtypes):
        return None
    return _library_call(form), False


def exact_dynamic(form: Form) -> Callable[[Sequence[Tensor | None], Numbers], Any] | None:
    """The call of an operator whose result shapes depend on data; None if devices may compute other bits, or other shapes.

    Args:
        form: the form of the call.
    """
    dtypes = [TORCH_DTYPES[o.view.dtype] for o in form.operands if o.view is not None]
    exact = EXACT_DYNAMIC.get(str(form.attr("name")), frozenset()).issuperset(dtypes)
    if not exact or _attributes(form) or any(o.role is Role.INOUT for o in form.operands):
        return None
    return _library_call(form)


def _attributes(form: Form) -> set[str]:
    """The attributes that change how a form is computed: flags, dtypes of host scalars, conjugated operands."""
    return {name for name, _ in form.attrs} - {"args", "kwargs", "name"}


def _library_call(form: Form) -> Callable[[Sequence[Tensor | None], Numbers], Any]:
    """The call of the library operator that a form names."""
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    _, packet, overload = str(form.attr("name")).split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    assert isinstance(args, tuple)
    assert isinstance(kwargs, tuple)
    named = [pair for pair in kwargs if isinstance(pair, tuple)]
    return lambda operands, params: op(
        *[_argument(a, operands, params) for a in args],
        **{str(name): _argument(value, operands, params) for name, value in named},
    )


def _given(operand: Tensor | None) -> Tensor:
    assert operand is not None
    return operand


def _argument(attr: Attr, operands: Sequence[Tensor | None], params: Numbers) -> Any:
    """The value of an attribute of a form.

    Raises:
        Unknown: it is of a kind that only devices use.
    """
    if isinstance(attr, OperandRef):
        return operands[attr.index]
    if isinstance(attr, ParamRef):
        return params[attr.index]
    if isinstance(attr, DType):
        return TORCH_DTYPES[attr]
    if isinstance(attr, tuple):
        return [_argument(a, operands, params) for a in attr]
    if isinstance(attr, Symbol):
        raise Unknown
    return attr
