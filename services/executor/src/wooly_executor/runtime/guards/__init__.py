"""What the library does not check itself: arguments on which its kernels would read or write out of bounds, or end the process.

Operators that a script calls check what they are given. Those that only autograd and composites call trust it; a session may call
any of them with anything. Each has a law here, found by calling every operator of the allow-list with arguments that do not go
together (`tests/hostile`). A law about shapes holds for a form once and for all where nothing of its arguments is a param; a law
about values (indices, lengths, pivots) is looked at in every run. A table per family of operators, each in a file.
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
    segments,
    transforms,
)
from wooly_executor.runtime.guards.law import ArgumentLaw, arguments_of
from wooly_executor.runtime.guards.symbols import mistaken
from wooly_executor.runtime.guards.writing import misplaced, undeclared

#: By the operator's name, for all its overloads.
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
    **transforms.LAWS,
}


def guarded(call: LibraryCall, form: Form) -> LibraryCall:
    """A call that keeps to its operator's law, or fails before the library sees it.

    Args:
        call: what a form means, on the device where it will run.
        form: whose operands and params it refers to.
    """
    why = mistaken(call) or undeclared(call, form) or misplaced(call, form)
    if why:
        return replace(call, instead=_failing(why))
    law = LAWS.get(call.op.overloadpacket.__name__)
    if law is None:
        return call
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
            pass  # it asks for a param, which only a run has
        except Exception as e:  # the law is broken, or an argument is nothing of which it can be asked
            return replace(call, instead=_failing(str(e)))
    if shapes is None and law.values is None:
        return call
    return replace(call, instead=_checking(call, ArgumentLaw(shapes, law.values)))


def looks_at_values(call: LibraryCall) -> bool:
    """Whether a guarded call reads tensors in every run: on a GPU the host waits for them."""
    return getattr(call.instead, "looks_at_values", False)


def _checking(call: LibraryCall, law: ArgumentLaw) -> Callable[..., Any]:
    op, do = call.op, call.instead or FAST.get(str(call.op)) or function_of(call.op)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = arguments_of(op, args, kwargs)
        for check in (law.shapes, law.values):
            if check is not None:
                check(given)
        return do(*args, **kwargs)

    checked.looks_at_values = law.values is not None  # type: ignore[attr-defined]
    return checked


def _failing(why: str) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(why)

    return fail


class _Param:
    """A number that only a run has: nothing can be asked of it."""

    def __repr__(self) -> str:  # errors name it; an address of this process is nobody's business
        return "a param"

    def __bool__(self) -> bool:
        raise TypeError("a param has no value yet")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a param has no value yet")

    __hash__ = None  # type: ignore[assignment]


def _sketch(call: LibraryCall, form: Form) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments without what tensors hold."""

    def value(attr: Any) -> Any:
        if isinstance(attr, OperandRef):
            view = form.operands[attr.index].view
            if view is None:
                raise RuntimeError("an operand without a view where one is needed")
            return torch.empty_strided(view.sizes, view.strides, dtype=TORCH_DTYPE[view.dtype], device="meta")
        if isinstance(attr, ParamRef):
            return _Param()
        if isinstance(attr, (tuple, list)):
            return [value(a) for a in attr]
        return attr if isinstance(attr, (Tensor, torch.device, torch.dtype)) else constant(attr)

    return [value(a) for a in call.args], {k: value(v) for k, v in call.kwargs}
