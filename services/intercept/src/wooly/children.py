"""Sessions of spawned child processes: each child gets its own session, as each CUDA process has its own context.

`multiprocessing` sends preparation data to each child. This module adds an object to that data which opens the session when the
child unpickles it. The child unpickles it before it imports the program's modules, so "cuda" works from their first line.
`RegisteredDevice.after_fork` handles forked processes.
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

#: Settings by which a child opens its session; None while this process has no session.
settings: Settings | None = None


class _Opening:
    """Opens the session of a child when the child unpickles it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __reduce__(self) -> Any:
        return begin, (self._settings,)


def begin(settings: Settings) -> None:
    """Open the session of this child process. The session ends when the child exits.

    Raises:
        WoolyError: no device is available for the session.
    """
    from wooly import api

    api.enable(settings)
    Finalize(None, api.disable, exitpriority=-100)  # children of multiprocessing exit without running `atexit`


def patches() -> Iterator[Patch]:
    """Yield each patch as (owner, name, value)."""
    real = multiprocessing.spawn.get_preparation_data

    @functools.wraps(real)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(real(name))
        if settings is not None:
            data["wooly"] = _Opening(settings)
        return data

    yield (multiprocessing.spawn, "get_preparation_data", get_preparation_data)
