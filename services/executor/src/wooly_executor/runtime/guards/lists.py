"""Laws for operators on lists of tensors: all lists have the same length."""

from __future__ import annotations

from wooly_wis.externs import allowed

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require, require_contiguous


def _as_many(given: Arguments) -> None:
    """Require that all lists are as long as the first one, which must not be empty."""
    lists = {name: v for name, v in given.items() if isinstance(v, (list, tuple))}
    first = next(iter(lists.values()), None)
    require(first is None or len(first) > 0, "the list of tensors must not be empty")
    for name, values in lists.items():
        require(first is not None and len(values) == len(first), f"{name} must be as long as the first list")


def _stacked(given: Arguments) -> None:
    for t in given["tensors"]:
        require_contiguous("each of tensors", t)


def _some(given: Arguments) -> None:
    require(isinstance(given["tensors"], (list, tuple)) and len(given["tensors"]) > 0, "tensors must not be empty")


LAWS: dict[str, ArgumentLaw] = {
    **{
        n: ArgumentLaw(attributes=_as_many)
        for n in sorted({name.split(".")[1] for name in allowed()})
        if n.startswith("_foreach_")
    },
    "_stack": ArgumentLaw(_stacked, attributes=_some),
}
