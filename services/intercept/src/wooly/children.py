"""Processes that a program starts by spawning: each gets a session of its own, as with CUDA each has a context of its own.

What opens it rides with the data by which `multiprocessing` prepares a child, and is read before the program's own modules are
imported there, so that "cuda" is live from their first line. Forked processes are `Device.after_fork`'s.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wooly.settings import Settings

Patch = tuple[Any, str, Any]

#: With what a child opens its session; None while this process has none that a child could ask for.
settings: Settings | None = None


class _Opening:
    """Pickled in the parent; reading it opens the session."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __reduce__(self) -> Any:
        return begin, (self._settings,)


def begin(settings: Settings) -> None:
    """Open a child's session; it ends with the child.

    Raises:
        WoolyError: there is no device for it.
    """
    from wooly import api

    api.enable(settings)
    Finalize(None, api.disable, exitpriority=-100)  # children leave without running `atexit`


def patches() -> Iterator[Patch]:
    """(owner, name, value)."""
    real = multiprocessing.spawn.get_preparation_data

    @functools.wraps(real)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(real(name))
        if settings is not None:
            data["wooly"] = _Opening(settings)
        return data

    yield (multiprocessing.spawn, "get_preparation_data", get_preparation_data)
