"""Sessions of spawned child processes: each child gets its own session, as each CUDA process has its own context.

`multiprocessing` sends preparation data to each child. This module adds an object to that data which redirects "cuda" when the
child unpickles it. The child unpickles it before it imports the program's modules, so "cuda" works from their first line.
`RegisteredDevice.after_fork` handles forked processes, and `capture` those that the program starts by other means.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import multiprocessing.spawn
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wooly.settings import Settings

Patch = tuple[Any, str, Any]

#: Returns the id of the executor of this process's session; empty: there is no session, or no controller. `api` sets it.
where: Callable[[], str] = str

#: Settings by which a child opens its session; None while "cuda" is not redirected in this process.
settings: Settings | None = None


class _Opening:
    """Redirects "cuda" in a child when the child unpickles it."""

    def __init__(self, settings: Settings, near: str) -> None:
        self._settings, self._near = settings, near

    def __reduce__(self) -> Any:
        return begin, (self._settings, self._near)


def begin(settings: Settings, near: str) -> None:
    """Redirect "cuda" in this child process. The first use of a device opens a session, which ends when the child exits.

    Args:
        settings: the parent's settings.
        near: the parent's executor, which the session prefers, because the processes may share memory.
    """
    from wooly import api

    api.enable_on_use(settings, near)


def close_at_exit(close: Callable[[], None]) -> None:
    """Call `close` when a child of multiprocessing exits. Such a child does not run `atexit`."""
    if multiprocessing.process.parent_process() is not None:
        Finalize(None, close, exitpriority=-100)


def patches() -> Iterator[Patch]:
    """Yield each patch as (owner, name, value)."""
    real = multiprocessing.spawn.get_preparation_data

    @functools.wraps(real)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(real(name))
        if settings is not None:
            data["wooly"] = _Opening(settings, where())
        return data

    yield (multiprocessing.spawn, "get_preparation_data", get_preparation_data)
