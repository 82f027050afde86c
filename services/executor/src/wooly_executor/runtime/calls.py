"""Turns an instruction into a library call: operator, argument template, params, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from wooly_wis.dtypes import DType
from wooly_wis.externs import is_allowed
from wooly_wis.optable import TABLE, Row, Spelling
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role, Symbol, View
from wooly_wis.scalar_expr import Name

from wooly_executor.errors import OperationError
from wooly_executor.runtime import extensions
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.fast_bindings import FAST
from wooly_executor.runtime.sparse.library import OPERATORS as SPARSE_OPERATORS
from wooly_executor.runtime.torch_private import OpOverload, binding_of, neg_view, schema_of

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """The library operator of an instruction, and its arguments as attributes of the form.

    Attributes:
        op: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        instead: a function to call in place of the operator, for example because the device's library lacks the operator.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    instead: Callable[..., Any] | None = None


def view_of_first(call: LibraryCall, form: Form) -> View | None:
    """Return how the call's first argument looks at its buffer; None: it is no operand, or its view is not known."""
    first = call.args[0] if call.args else None
    return form.operands[first.index].view if isinstance(first, OperandRef) else None


def library_call(form: Form) -> LibraryCall:
    """Return the library call of an `extern` or a native instruction.

    Raises:
        OperationError: the operator is not in the allow-list, or this library does not have it.
    """
    if form.opcode != "extern":
        return _native_call(form)
    name = form.attr("name")
    if not isinstance(name, str):
        raise OperationError("extern: the attribute 'name' is missing")
    op = _overload(name) if is_allowed(name) else _extension(name)
    args, kwargs = _split_kwargs(form)
    return LibraryCall(
        op, tuple([_host_tensor(a, v) for a, v in zip(schema_of(op).arguments, args, strict=False)]), kwargs
    )


def _host_tensor(argument: Any, value: Attr) -> Any:
    """Return the value of an argument.

    A tuple of numbers for a tensor argument becomes a host tensor (lengths of packed sequences).
    """
    if isinstance(value, tuple) and str(argument.type) == "Tensor":
        return torch.tensor(value, dtype=torch.int64)
    return value


def _extension(name: str) -> OpOverload:
    """Return an operator on sparse tensors, or an extension operator.

    Raises:
        OperationError: this executor does not offer it.
    """
    op = SPARSE_OPERATORS.get(name) or extensions.offered(name)
    if op is None:
        known = ", ".join([f"{k} {v}" for k, v in extensions.versions().items()]) or "no library"
        raise OperationError(
            f"operator {name!r} is not allowed: it is not in the allow-list, and this executor offers {known}; "
            "install its library on the executor and name it in WOOLY_EXECUTOR_LIBRARIES"
        )
    return op


def _overload(name: str) -> OpOverload:
    _, packet_name, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet_name, None), overload, None)
    if not isinstance(op, OpOverload):
        raise OperationError(
            f"the executor's library (torch {torch.__version__}) has no operator {name}; "
            "use the same version of torch in the client"
        )
    return op


def _native_call(form: Form) -> LibraryCall:
    row = TABLE.get(form.opcode)
    if row is None:
        raise OperationError(f"opcode {form.opcode!r} has no implementation in this runtime")
    values = form.attr("args", ())
    assert isinstance(values, tuple)
    given = {arg.name: value for arg, value in zip(row.args, values, strict=False)}
    in_place = any(o.role is Role.INOUT for o in form.operands)
    fallback: LibraryCall | None = None
    for spelling in row.spellings:
        if spelling.in_place is not in_place:
            continue
        op = _overload(spelling.operator)
        found = _spelled(row, op, spelling, given)
        if found is None:
            continue
        if _needs_no_conversion(op, spelling, given):
            return found
        fallback = fallback or found
    if fallback is None:
        raise OperationError(f"{form.opcode}: the library has no operator for this combination of arguments")
    return fallback


def _spelled(row: Row, op: OpOverload, spelling: Spelling, given: dict[str, Attr]) -> LibraryCall | None:
    """Return a call of `op`, or None if the operator cannot express the given arguments."""
    if not set(given) <= {a.name for a in spelling.args if isinstance(a, Name)}:
        return None
    defaults = {a.name: a.default for a in row.args}
    args: list[Attr] = []
    kwargs: list[tuple[str, Attr]] = []
    whole = True
    for a, declared in zip(spelling.args, schema_of(op).arguments, strict=False):
        if isinstance(a, Name):
            value = given.get(a.name, defaults[a.name])
            omitted = a.name not in given
        else:
            value, omitted = a, True
        if omitted and declared.has_default_value() and declared.default_value == value:
            whole = False
            continue
        if declared.kwarg_only or not whole:
            kwargs.append((declared.name, value))
        else:
            args.append(value)
    return LibraryCall(op, tuple(args), tuple(kwargs))


def _needs_no_conversion(op: OpOverload, spelling: Spelling, given: dict[str, Attr]) -> bool:
    """Whether tensors are passed to tensor arguments and numbers to number arguments, so that no conversion is needed."""
    for a, declared in zip(spelling.args, schema_of(op).arguments, strict=False):
        value = given.get(a.name) if isinstance(a, Name) else None
        if value is not None and not isinstance(value, tuple):
            tensor = "Tensor" in str(declared.type)
            if tensor is not isinstance(value, OperandRef):
                return False
    return True


#: Operators whose behaviour depends on the grad mode, and the argument that tells the mode here (None: always enabled).
_ASKS_GRAD_MODE = {"aten.mkldnn_rnn_layer.default": "train", "aten.mkldnn_rnn_layer_backward.default": None}


def asks_grad_mode(op: OpOverload) -> bool:
    """Whether an overload behaves differently when gradients are enabled."""
    return str(op) in _ASKS_GRAD_MODE


def function_of(op: OpOverload) -> Callable[..., Any]:
    """Return the function to call for an overload. It sets the grad mode that the overload needs."""
    call: Callable[..., Any] = binding_of(op)
    if not asks_grad_mode(op):
        return call
    asks = _ASKS_GRAD_MODE[str(op)]
    at = next((i for i, a in enumerate(schema_of(op).arguments) if a.name == asks), None)

    def with_grad(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(at is None or bool(args[at])):
            return call(*args, **kwargs)

    return with_grad


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients that an instruction asks for.

    Attributes:
        wanted: operands whose gradients are wanted.
        given: per result of the operator, the operand with its gradient. None for the whole: the instruction asks for the
            results.
        enabled: whether the operator runs with gradients enabled. If not, `wanted` only tells it which operands need gradients:
            `matmul` chooses its product by this.
    """

    wanted: tuple[int, ...]
    given: tuple[int | None, ...] | None
    enabled: bool = True


def gradients_of(form: Form) -> Gradients | None:
    """Return the gradients that a form asks for, or None."""
    wanted, given = form.attr("wanted"), form.attr("vjp")
    if not isinstance(wanted, tuple):
        return None
    return Gradients(
        tuple([w.index for w in wanted if isinstance(w, OperandRef)]),
        tuple([g.index if isinstance(g, OperandRef) else None for g in given]) if isinstance(given, tuple) else None,
        form.attr("no_grad") is None,
    )


#: Views through which an operand may be read: attribute of the form, and function that makes the view.
READINGS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (("conj", torch.conj), ("neg", neg_view))


def readings(form: Form) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """Return the operands that a form reads through a view, in order, with the function that makes the view."""
    found = []
    for name, view in READINGS:
        refs = form.attr(name)
        if isinstance(refs, tuple):
            found += [(r.index, view) for r in refs if isinstance(r, OperandRef)]
    return found


def differentiate(call: Callable[[list[Tensor]], Any], operands: list[Tensor], gradients: Gradients) -> Any:
    """Call an operator on operands that need gradients, and return its results, or the gradients that flow back from given ones.

    A gradient to which nothing flows is zero.

    Args:
        call: the operator, as a function of the operands.
        operands: the operands that are read.
        gradients: the gradients that the instruction asks for.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(gradients.enabled):
        # A tensor made in inference mode cannot be part of a graph, but a new tensor on its storage can.
        own = [
            torch.empty(0, dtype=t.dtype, device=t.device).set_(
                t.untyped_storage(), t.storage_offset(), t.shape, t.stride()
            )
            for t in operands
        ]
        leaves = [own[k].requires_grad_() for k in gradients.wanted]
        result = call(own)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if gradients.given is None:
            return [t.detach() for t in results]
        given = [(t, own[k]) for t, k in zip(results, gradients.given, strict=True) if k is not None]
        found = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given], allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def mix(seed: int, offset: int) -> int:
    """Mix a (seed, offset) pair into one 64-bit seed: SplitMix64 (Steele, Lea, Flood 2014), twice."""

    def splitmix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    return splitmix(splitmix(seed & _MASK) ^ (offset & _MASK))


def seed_of(params: Sequence[Any], pair: tuple[int, int]) -> int:
    """Return the seed of a library's generator for one call. `pair`: the run's params with the call's seed and offset.

    Torch accepts signed and unsigned seeds of 64 bits; the shift makes both equal.
    """
    seed, offset = pair
    return mix(params[seed], params[offset]) >> 1


def constant(value: Attr) -> Any:
    """Return the Python value of a constant attribute."""
    if isinstance(value, DType):
        return TORCH_DTYPE[value]
    if isinstance(value, Symbol):
        if value.kind == "device":
            return torch.device("cpu")
        if value.kind in ("layout", "memory_format"):
            found = getattr(torch, value.name, None)
            if isinstance(found, (torch.layout, torch.memory_format)):
                return found
        raise OperationError(f"unknown symbol {value.kind}:{value.name}")
    return value


def refers(value: Attr) -> bool:
    """Whether an attribute refers to an operand or a param."""
    if isinstance(value, (OperandRef, ParamRef)):
        return True
    return isinstance(value, tuple) and any(refers(v) for v in value)


Fill = Callable[[list[Any], Sequence[Any]], Any]

#: Dtypes of integers that do not hold every integer param.
_NARROW = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32})


def _wrapping(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that converts a number as an operator converts a number beside a tensor: integers wrap around."""
    if dtype not in _NARROW:
        return lambda value: value
    least, size = torch.iinfo(dtype).min, 1 << torch.iinfo(dtype).bits
    return lambda value: (value - least) % size + least


def filler(
    value: Attr,
    registers: dict[int, int],
    first_param: int,
    typed: dict[int, torch.dtype],
    device: torch.device | None = None,
) -> Fill:
    """Return a function of (registers, params) that gives the value of an attribute.

    Args:
        value: the attribute.
        registers: the register of each operand.
        first_param: index of the instruction's first param in the params of the run.
        typed: params that become 0-dimensional tensors, with their dtype.
        device: where these tensors are; None: on the host.
    """
    if isinstance(value, OperandRef):
        register = registers[value.index]
        return lambda r, p: r[register]
    if isinstance(value, ParamRef):
        index = first_param + value.index
        dtype = typed.get(value.index)
        # fill on the device: copying a number from the host would make the host wait
        if dtype is not None and device is not None:
            narrow = _wrapping(dtype)
            return lambda r, p: torch.full((), narrow(p[index]), dtype=dtype, device=device)
        if dtype in _NARROW:
            narrow = _wrapping(dtype)
            return lambda r, p: torch.scalar_tensor(narrow(p[index]), dtype=dtype)
        if dtype is not None:
            return lambda r, p: torch.scalar_tensor(p[index], dtype=dtype)
        return lambda r, p: p[index]
    if isinstance(value, tuple):
        if not refers(value):
            fixed = [constant_tree(v) for v in value]
            return lambda r, p: fixed
        if all(isinstance(v, OperandRef) for v in value):
            indices = [registers[v.index] for v in value if isinstance(v, OperandRef)]
            return lambda r, p: [r[i] for i in indices]
        parts = [filler(v, registers, first_param, typed, device) for v in value]
        return lambda r, p: [f(r, p) for f in parts]
    fixed_value = constant(value)
    return lambda r, p: fixed_value


def constant_tree(value: Attr) -> Any:
    """Like `constant`, but nested tuples become lists."""
    if isinstance(value, tuple):
        return [constant_tree(v) for v in value]
    return constant(value)


#: Operators that accept a Python number for a tensor argument without rounding it (torch::should_allow_numbers_as_tensors).
_TAKES_NUMBERS = frozenset(
    name + ending
    for name in ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "floor_divide")
    for ending in ("", "_")
)


def _gives_fractions(op: OpOverload) -> bool:
    """Whether an operator computes with floating point numbers whatever its operands are, and takes a number for a tensor."""
    name = op.overloadpacket.__name__.rstrip("_")
    return op.namespace == "aten" and (name in ("copysign", "xlogy") or name.startswith("special_"))


def _is_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


_SAMPLE = {ParamKind.F64: 1.0, ParamKind.I64: 1, ParamKind.C128: 1j, ParamKind.BOOL: True}


def typed_params(form: Form, call: LibraryCall) -> dict[int, torch.dtype]:
    """Return the params that become 0-dimensional tensors, with their dtype.

    These are the params that the form gives a dtype, and the numbers for which the operator insists on a tensor. The latter get
    the dtype to which the number would be promoted.
    """
    typed: dict[int, torch.dtype] = {}
    scalars = form.attr("scalars")
    if isinstance(scalars, tuple):
        for item in scalars:
            if isinstance(item, tuple) and len(item) == 2:
                ref, dtype = item
                if isinstance(ref, ParamRef) and isinstance(dtype, DType):
                    typed[ref.index] = TORCH_DTYPE[dtype]
    if str(call.op) in FAST or (call.op.namespace == "aten" and call.op.overloadpacket.__name__ in _TAKES_NUMBERS):
        return typed
    views = [o.view for o in form.operands if o.view is not None]
    by_name = {a.name: v for a, v in zip(schema_of(call.op).arguments, call.args, strict=False)} | dict(call.kwargs)
    for argument in schema_of(call.op).arguments:
        value = by_name.get(argument.name)
        if isinstance(value, ParamRef) and value.index not in typed and "Tensor" in str(argument.type) and views:
            like = torch.empty((0,) * min(1, len(views[0].sizes)), dtype=TORCH_DTYPE[views[0].dtype])
            promoted = torch.result_type(like, _SAMPLE[form.params[value.index]])
            # uint8 would make 255 of -1, and refuse 300
            typed[value.index] = torch.int64 if _gives_fractions(call.op) and not _is_fraction(promoted) else promoted
    return typed


#: Operators that write all of `out=`, and the overloads that return a new tensor instead.
_OUT_OF_PLACE = {
    "aten.arange.start_out": "aten.arange.start_step",
    "aten.logical_not.out": "aten.logical_not.default",
}


def out_of_place(form: Form) -> tuple[int, LibraryCall] | None:
    """Return the `out=` operand of an operator that overwrites all of it, and a call that returns a new tensor instead.

    None for other operators.
    """
    twin = _OUT_OF_PLACE.get(str(form.attr("name"))) if form.opcode == "extern" else None
    if twin is None:
        return None
    call, op = library_call(form), _overload(twin)
    out = dict(call.kwargs).get("out")
    names = [a.name for a in schema_of(op).arguments]
    if not isinstance(out, OperandRef) or any(k not in names for k, _ in call.kwargs if k != "out"):
        return None
    kwargs = tuple([(k, v) for k, v in call.kwargs if k != "out"])
    view = form.operands[out.index].view
    if "dtype" in names and view is not None:
        kwargs += (("dtype", view.dtype),)
    return out.index, LibraryCall(op, call.args, kwargs)


def returns_one_tensor(op: OpOverload) -> bool:
    """Whether the operator returns exactly one tensor, and not a list of tensors."""
    returns = schema_of(op).returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def fresh_results(op: OpOverload) -> tuple[int, ...] | None:
    """Return which values that an operator returns are new results; None: all. The others are aliases of arguments."""
    returns = schema_of(op).returns
    fresh = tuple([i for i, r in enumerate(returns) if r.alias_info is None])
    return None if len(fresh) == len(returns) else fresh


def only(call: Callable[..., Any], fresh: tuple[int, ...]) -> Callable[..., Any]:
    """Return `call` with only some of its results (see `fresh_results`)."""

    def run(f: Any) -> Any:
        result = call(f)
        return [result[i] for i in fresh]

    return run


def _split_kwargs(form: Form) -> tuple[tuple[Attr, ...], tuple[tuple[str, Attr], ...]]:
    """Return the positional and keyword attributes of an `extern`.

    Raises:
        OperationError: the attributes do not have the expected structure.
    """
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    pairs: list[tuple[str, Attr]] = []
    if not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        raise OperationError("extern: args and kwargs must be tuples")
    for item in kwargs:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise OperationError("extern: kwargs must be (name, value) pairs")
        pairs.append((item[0], item[1]))
    return args, tuple(pairs)
