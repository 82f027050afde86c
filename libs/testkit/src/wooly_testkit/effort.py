"""How much `make test` does of what `make test-all` does: examples of randomized tests, and cases of sweeps."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def examples(quick: int, thorough: int) -> int:
    """The number of examples: `thorough` if WOOLY_THOROUGH is set, else `quick`."""
    return thorough if os.environ.get("WOOLY_THOROUGH") else quick


def sampled(names: Iterable[str], every: int, kinds: Callable[[str], Iterable[Hashable]] = lambda name: ()) -> set[str]:
    """The names of a sweep that the quick suite runs: about one of `every`, and at least one of each kind.

    The choice depends on the names alone, so it is the same in each process, and a new name changes nothing of the others unless
    both have a kind in common.

    Args:
        names: names of all cases.
        every: the quick suite runs one of this many cases, by a hash of their names.
        kinds: the kinds of a case. A case that has a kind which no chosen case has is chosen, too.
    """
    by_hash = sorted(set(names), key=lambda name: (zlib.crc32(name.encode()), name))
    chosen = {name for name in by_hash if zlib.crc32(name.encode()) % every == 0}
    covered = {kind for name in chosen for kind in kinds(name)}
    for name in by_hash:
        if not covered.issuperset(kinds(name)):
            chosen.add(name)
            covered.update(kinds(name))
    return chosen


def sweep(names: Iterable[str], every: int, kinds: Callable[[str], Iterable[Hashable]] = lambda name: ()) -> list[Any]:
    """Pytest's parameters for the names of a sweep. Those that are not `sampled` are slow."""
    names = list(names)
    chosen = sampled(names, every, kinds)
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]
