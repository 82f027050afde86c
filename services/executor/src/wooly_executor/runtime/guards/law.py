"""The type of a law, and the checks of which laws are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Form

from wooly_executor.runtime.torch_private import OpOverload, schema_of

#: Arguments of a call, by their names in the operator's schema.
Arguments = Mapping[str, Any]
Check = Callable[[Arguments], None]


@dataclass(frozen=True, slots=True)
class ArgumentLaw:
    """Checks on the arguments of an operator. Each check raises RuntimeError if it fails.

    Attributes:
        shapes: checks shapes and numbers, but not the values of tensors.
        values: checks the values of tensors, after `shapes` has passed.
        attributes: checks the arguments as the form states them, without tensors.
        applies: returns whether the law applies to a form, given the arguments as the form states them. None: the law always
            applies.
        instead: a function of the arguments that takes the operator's place if `values` fails. None: the call fails.
    """

    shapes: Check | None = None
    values: Check | None = None
    attributes: Check | None = None
    applies: Callable[[Arguments, Form], bool] | None = None
    instead: Callable[[Arguments], Any] | None = None


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their schema names, with the schema's defaults filled in."""
    declared = schema_of(op).arguments
    given = {a.name: a.default_value if a.has_default_value() else None for a in declared}
    given.update(zip([a.name for a in declared], args, strict=False))
    given.update(kwargs)
    return given


def require(holds: bool, why: str) -> None:
    """Raise RuntimeError with the message `why` if `holds` is false."""
    if not holds:
        raise RuntimeError(why)


def require_shape(given: Arguments, name: str, sizes: Sequence[int]) -> None:
    """Require that the argument `name` is a tensor of this shape."""
    t = given[name]
    require(isinstance(t, Tensor), f"{name} must be a tensor of shape {list(sizes)}")
    require(list(t.shape) == list(sizes), f"{name} must have shape {list(sizes)}, but it has {list(t.shape)}")


def require_count(given: Arguments, name: str, n: int) -> None:
    """Require that the argument `name` is a tensor of `n` elements."""
    t = given[name]
    require(isinstance(t, Tensor) and t.numel() == n, f"{name} must be a tensor of {n} elements")


def require_optional_count(given: Arguments, names: Sequence[str], n: int) -> None:
    """Require that each of the arguments has `n` elements, if the argument is given."""
    for name in names:
        if given.get(name) is not None:
            require_count(given, name, n)


def require_range(name: str, t: Tensor, low: int, high: int) -> None:
    """Require that all values of `t` are in [low, high)."""
    if t.numel():
        least, most = t.aminmax()
        require(
            int(least) >= low and int(most) < high,
            f"index out of range: {name} must be between {low} and {high - 1}, but its values go from {int(least)} "
            f"to {int(most)}",
        )


def require_no_overlap(name: str, t: Tensor) -> None:
    """Require that no two elements of `t` share memory.

    The kernels in question access `numel` consecutive elements from the tensor's start. A tensor that overlaps itself has less
    memory.
    """
    end = 1 + sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)])
    require(not t.numel() or end >= t.numel(), f"{name} must not overlap itself")


def require_contiguous(name: str, t: Tensor) -> None:
    """Require that `t` is contiguous. The kernels in question ignore its strides."""
    require(t.is_contiguous(), f"{name} must be contiguous, but it has strides {list(t.stride())}")


def meta_like(t: Tensor) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of `t`."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def results_of(op: OpOverload, given: Arguments, **more: Any) -> list[Tensor]:
    """Return the results of `op` as meta tensors, called with the arguments of the same name in `given` and `more`."""
    args = []
    for a in schema_of(op).arguments:
        value = more[a.name] if a.name in more else given.get(a.name)
        args.append(meta_like(value) if isinstance(value, Tensor) else value)
    names = [a.name for a in schema_of(op).arguments]
    at = next((i for i, a in enumerate(schema_of(op).arguments) if a.kwarg_only), len(names))
    found = op(*args[:at], **dict(zip(names[at:], args[at:], strict=True)))
    return list(found) if isinstance(found, (list, tuple)) else [found]


def backward_of(op: OpOverload, **results: int) -> Check:
    """Require that the named arguments have the shapes of `op`'s results. A value in `results` is the index of a result."""

    def check(given: Arguments) -> None:
        found = results_of(op, given)
        for name, k in results.items():
            require_shape(given, name, found[k].shape)

    return check


def same_shape(*names: str) -> Check:
    """Require that all named arguments have the shape of the first one."""

    def check(given: Arguments) -> None:
        for name in names[1:]:
            require_shape(given, name, given[names[0]].shape)

    return check


def all_of(*checks: Check) -> Check:
    """Combine checks into one that runs them in order."""

    def check(given: Arguments) -> None:
        for c in checks:
            c(given)

    return check


def numbers_of(given: Arguments, name: str) -> list[int]:
    """Return the numbers of an argument that is a list of numbers or a tensor."""
    value = given[name]
    found: list[int] = value.tolist() if isinstance(value, Tensor) else list(value)
    return found
