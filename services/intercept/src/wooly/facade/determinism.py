"""Patches of the functions that switch deterministic algorithms on and off."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from wooly.determinism import Determinism
from wooly.torch_private import deterministic_switches

Patch = tuple[Any, str, Any]


def patches(determinism: Determinism) -> Iterator[Patch]:
    """Yield the patches (owner, name, value): each switch also tells the kernels the new mode.

    `torch.use_deterministic_algorithms`, `torch.set_deterministic_debug_mode`, `torch.utils.deterministic` and compiled functions
    all call these switches.
    """

    def following(real: Any) -> Any:
        @functools.wraps(real)
        def switch(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            determinism.look()

        return switch

    for owner, name in deterministic_switches():
        yield (owner, name, following(getattr(owner, name)))
    determinism.look()
