"""What a law is, and the words that laws are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Form

from wooly_executor.runtime.torch_private import OpOverload, schema_of

#: Arguments of a call, by the names that the operator's schema has for them.
Arguments = Mapping[str, Any]
Check = Callable[[Arguments], None]


@dataclass(frozen=True, slots=True)
class ArgumentLaw:
    """What must hold of an operator's arguments; each part raises RuntimeError where it does not.

    Attributes:
        shapes: about shapes and numbers; the values of tensors are not looked at.
        values: about the values of tensors, once the shapes are right.
        attributes: about what a form says of its arguments, tensors aside.
        applies: whether it is a law for a form at all; given what the form says of its arguments. None: it is.
    """

    shapes: Check | None = None
    values: Check | None = None
    attributes: Check | None = None
    applies: Callable[[Arguments, Form], bool] | None = None


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the operator's schema, with its defaults."""
    declared = schema_of(op).arguments
    given = {a.name: a.default_value if a.has_default_value() else None for a in declared}
    given.update(zip([a.name for a in declared], args, strict=False))
    given.update(kwargs)
    return given


def require(holds: bool, why: str) -> None:
    """It holds, or the call fails with why."""
    if not holds:
        raise RuntimeError(why)


def sized(given: Arguments, name: str, sizes: Sequence[int]) -> None:
    """The argument is a tensor of these sizes."""
    t = given[name]
    require(isinstance(t, Tensor), f"{name} must be a tensor of shape {list(sizes)}")
    require(list(t.shape) == list(sizes), f"{name} must have shape {list(sizes)}, it has {list(t.shape)}")


def counted(given: Arguments, name: str, n: int) -> None:
    """The argument is a tensor of so many elements."""
    t = given[name]
    require(isinstance(t, Tensor) and t.numel() == n, f"{name} must be a tensor of {n} elements")


def optional(given: Arguments, names: Sequence[str], n: int) -> None:
    """Each of the arguments has so many elements, where it is given."""
    for name in names:
        if given.get(name) is not None:
            counted(given, name, n)


def within(name: str, t: Tensor, low: int, high: int) -> None:
    """All values lie in [low, high)."""
    if t.numel():
        least, most = t.aminmax()
        require(
            int(least) >= low and int(most) < high,
            f"index out of range: {name} must lie between {low} and {high - 1}, it has {int(least)} to {int(most)}",
        )


def spread(name: str, t: Tensor) -> None:
    """No element lies on another, for kernels that take as much memory as there are elements from where the first one lies."""
    end = 1 + sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)])
    require(not t.numel() or end >= t.numel(), f"{name} must not overlap itself")


def like(t: Tensor) -> Tensor:
    """A tensor of the same form that holds nothing."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def results_of(op: OpOverload, given: Arguments, **more: Any) -> list[Tensor]:
    """What an operator would return for the arguments that it has in common with these: shapes alone."""
    args = []
    for a in schema_of(op).arguments:
        value = more[a.name] if a.name in more else given.get(a.name)
        args.append(like(value) if isinstance(value, Tensor) else value)
    names = [a.name for a in schema_of(op).arguments]
    at = next((i for i, a in enumerate(schema_of(op).arguments) if a.kwarg_only), len(names))
    found = op(*args[:at], **dict(zip(names[at:], args[at:], strict=True)))
    return list(found) if isinstance(found, (list, tuple)) else [found]


def backward_of(op: OpOverload, **results: int) -> Check:
    """The named arguments have the shapes of `op`'s results."""

    def check(given: Arguments) -> None:
        found = results_of(op, given)
        for name, k in results.items():
            sized(given, name, found[k].shape)

    return check


def same_shape(*names: str) -> Check:
    """The arguments have the shape of the first."""

    def check(given: Arguments) -> None:
        for name in names[1:]:
            sized(given, name, given[names[0]].shape)

    return check


def all_of(*checks: Check) -> Check:
    """One check after the other."""

    def check(given: Arguments) -> None:
        for c in checks:
            c(given)

    return check


def numbers_of(given: Arguments, name: str) -> list[int]:
    """The numbers of an argument that is a list, or a tensor of them."""
    value = given[name]
    found: list[int] = value.tolist() if isinstance(value, Tensor) else list(value)
    return found
