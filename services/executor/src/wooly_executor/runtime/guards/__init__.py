"""Argument checks (laws) for library operators that do not check their arguments.

With wrong arguments, the kernels of these operators read or write out of bounds, or end the process. Operators that scripts call
directly check their arguments. Operators that only autograd and composite operators call do not, and a session may call them with
any arguments.

Each such operator has a law. The laws were found by calling every operator of the allow-list with arguments that do not fit
together (`tests/hostile`). A law about shapes is checked once per form if none of the arguments is a param. A law about values
(indices, lengths, pivots) is checked in every run. Each family of operators has a file with a table of laws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Form, OperandRef, ParamRef

from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.calls import LibraryCall, constant, function_of
from wooly_executor.runtime.fast_bindings import FAST
from wooly_executor.runtime.guards import (
    layers,
    linalg,
    lists,
    losses,
    normalisation,
    optimisers,
    polynomials,
    pooling,
    quantisation,
    segments,
    selection,
    shuffles,
    transforms,
    vision,
)
from wooly_executor.runtime.guards.law import ArgumentLaw, arguments_of
from wooly_executor.runtime.guards.symbols import wrong_symbol
from wooly_executor.runtime.guards.writing import (
    Layout,
    out_arguments,
    overlapping_out,
    shared_results,
    tensors_in,
    undeclared_write,
    works_in_place,
)
from wooly_executor.runtime.torch_private import OpOverload

#: Laws by operator name; a law applies to all overloads of the operator.
LAWS: dict[str, ArgumentLaw] = {
    **pooling.LAWS,
    **normalisation.LAWS,
    **layers.LAWS,
    **losses.LAWS,
    **segments.LAWS,
    **linalg.LAWS,
    **lists.LAWS,
    **optimisers.LAWS,
    **polynomials.LAWS,
    **quantisation.LAWS,
    **selection.LAWS,
    **shuffles.LAWS,
    **transforms.LAWS,
}


#: Laws of extension operators by namespace and operator name (``torchvision.nms``).
EXTENSION_LAWS: dict[str, ArgumentLaw] = {**vision.LAWS}


def law_of(op: OpOverload) -> ArgumentLaw | None:
    """Return the law of an operator, or None."""
    name = op.overloadpacket.__name__
    return LAWS.get(name) if op.namespace == "aten" else EXTENSION_LAWS.get(f"{op.namespace}.{name}")


def guarded(call: LibraryCall, form: Form) -> LibraryCall:
    """Return a call that checks its operator's law before it calls the library.

    If the arguments can never be valid, the returned call always raises RuntimeError.

    Args:
        call: the library call that the form describes, on the device where it will run.
        form: the form whose operands and params the call refers to.
    """
    lawful, outs = _lawful(call, form), out_arguments(call)
    if not outs or getattr(lawful.instead, "fails", False):
        return lawful
    return replace(lawful, instead=_keeping(lawful, outs))


def _lawful(call: LibraryCall, form: Form) -> LibraryCall:
    """Return a call that checks the law of its operator."""
    why = wrong_symbol(call) or undeclared_write(call, form) or overlapping_out(call, form)
    if why:
        return replace(call, instead=_failing(why))
    law = law_of(call.op)
    if law is None:
        return call
    if getattr(call.instead, "checks_values", False):  # a GPU checks the values itself; the host need not wait for them
        law = replace(law, values=None)
    shapes = law.shapes
    if law.attributes is not None or law.applies is not None:
        said = arguments_of(call.op, call.args, dict(call.kwargs))
        if law.applies is not None and not law.applies(said, form):
            return call
        try:
            if law.attributes is not None:
                law.attributes(said)
        except RuntimeError as e:
            return replace(call, instead=_failing(str(e)))
    if shapes is not None:
        try:
            shapes(arguments_of(call.op, *_sketch(call, form)))
            shapes = None
        except TypeError:
            pass  # the law needs the value of a param, which is known only in a run
        except Exception as e:  # the law does not hold, or an argument has the wrong type for it
            return replace(call, instead=_failing(str(e)))
    if shapes is None and law.values is None:
        return call
    return replace(call, instead=_checking(call, replace(law, shapes=shapes)))


def looks_at_values(call: LibraryCall) -> bool:
    """Whether a guarded call reads the values of tensors in every run. On a GPU, the host waits for the device then."""
    return getattr(call.instead, "looks_at_values", False)


def _checking(call: LibraryCall, law: ArgumentLaw) -> Callable[..., Any]:
    op, do = call.op, _function(call)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = arguments_of(op, args, kwargs)
        if law.shapes is not None:
            law.shapes(given)
        if law.values is not None:
            try:
                law.values(given)
            except RuntimeError:
                if law.instead is None:
                    raise
                return law.instead(given)
        return do(*args, **kwargs)

    checked.looks_at_values = law.values is not None  # type: ignore[attr-defined]
    return checked


def _function(call: LibraryCall) -> Callable[..., Any]:
    return call.instead or FAST.get(str(call.op)) or function_of(call.op)


def _keeping(call: LibraryCall, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that fails if the results given as `names` overlap, or if the library changes their layout.

    A result that shares memory with an argument is computed in memory of its own, and then copied.
    """
    op, do, exact = call.op, _function(call), _may_lie_where_an_argument_lies(call.op)

    def kept(*args: Any, **kwargs: Any) -> Any:
        outs = [Layout(name, t) for name in names for t in tensors_in(kwargs.get(name))]
        read = [t for key, v in [*enumerate(args), *kwargs.items()] if key not in names for t in tensors_in(v)]
        apart = shared_results(op, outs, read, exact)
        if not apart:
            found = do(*args, **kwargs)
            for layout in outs:
                layout.require_kept(op)
            return found
        own = {k: layout.tensor for k, layout in apart.items()}
        found = do(*args, **kwargs | {name: _exchanged(kwargs[name], own) for name in names})
        for layout in outs:
            apart.get(id(layout.tensor), layout).require_kept(op)
        shared = {id(own[id(t)]): t for t in [layout.tensor for layout in outs] if id(t) in own}
        for k, layout in apart.items():
            shared[id(own[k])].copy_(layout.tensor)
        return _exchanged(found, shared)

    kept.looks_at_values = looks_at_values(call)  # type: ignore[attr-defined]
    return kept


def _may_lie_where_an_argument_lies(op: OpOverload) -> bool:
    """Whether a result of the call may lie exactly where an argument lies, also after the operator's law was checked.

    The values that a law has checked must not change before the kernel reads them: an element-wise kernel reads an element before
    it writes it, and `tril` and `triu` have no law about values.
    """
    if law_of(op) is None:
        return works_in_place(op)
    return torch.Tag.pointwise in op.tags or op.overloadpacket.__name__ in ("tril", "triu")


def _exchanged(value: Any, by: dict[int, Tensor]) -> Any:
    """Return a value in which other tensors have the places of those whose ids `by` has."""
    if isinstance(value, (tuple, list)):
        return value.__class__([_exchanged(v, by) for v in value])
    return by.get(id(value), value)


def _failing(why: str) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(why)

    fail.fails = True  # type: ignore[attr-defined]
    return fail


class _Param:
    """Placeholder for a param, whose value is known only in a run. Comparing it raises TypeError."""

    def __repr__(self) -> str:  # error messages contain this; the default repr would show a memory address
        return "a param"

    def __bool__(self) -> bool:
        raise TypeError("the value of a param is known only in a run")

    def __eq__(self, other: object) -> bool:
        raise TypeError("the value of a param is known only in a run")

    __hash__ = None  # type: ignore[assignment]


def _sketch(call: LibraryCall, form: Form) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with each tensor as a meta tensor of the same shape."""
    return [_sketch_of(a, form) for a in call.args], {k: _sketch_of(v, form) for k, v in call.kwargs}


def _sketch_of(attr: Any, form: Form) -> Any:
    if isinstance(attr, OperandRef):
        view = form.operands[attr.index].view
        if view is None:
            raise RuntimeError("an operand has no view, but the operator needs its shape; give the operand a view")
        return torch.empty_strided(view.sizes, view.strides, dtype=TORCH_DTYPE[view.dtype], device="meta")
    if isinstance(attr, ParamRef):
        return _Param()
    if isinstance(attr, (tuple, list)):
        return [_sketch_of(a, form) for a in attr]
    return attr if isinstance(attr, (Tensor, torch.device, torch.dtype)) else constant(attr)
