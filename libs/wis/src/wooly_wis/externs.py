"""The allow-list of `extern`: the operators of the device library that a program may call. All other operators are refused."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def allowed() -> frozenset[str]:
    """All allowed operator names, such as ``aten.add.Tensor``."""
    text = files("wooly_wis").joinpath("data/extern_ops.txt").read_text("ascii")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def is_allowed(name: str) -> bool:
    """Whether a program may name this operator overload."""
    return name in allowed()
