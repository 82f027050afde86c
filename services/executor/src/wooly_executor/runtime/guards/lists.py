"""Lists of tensors: as many in each."""

from __future__ import annotations

from wooly_wis.externs import allowed

from wooly_executor.runtime.guards.law import ArgumentLaw, Arguments, require


def _as_many(given: Arguments) -> None:
    """All lists are as long as the first, which is not empty."""
    lists = {name: v for name, v in given.items() if isinstance(v, (list, tuple))}
    first = next(iter(lists.values()), None)
    require(first is None or len(first) > 0, "there must be a tensor in the list")
    for name, values in lists.items():
        require(first is not None and len(values) == len(first), f"{name} must be as long as the first list")


def _some(given: Arguments) -> None:
    require(
        isinstance(given["tensors"], (list, tuple)) and len(given["tensors"]) > 0, "there must be a tensor in the list"
    )


LAWS: dict[str, ArgumentLaw] = {
    **{
        n: ArgumentLaw(attributes=_as_many)
        for n in sorted({name.split(".")[1] for name in allowed()})
        if n.startswith("_foreach_")
    },
    "_stack": ArgumentLaw(attributes=_some),
}
