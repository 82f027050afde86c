"""Sessions of spawned child processes: each child gets its own session, as each CUDA process has its own context.

`multiprocessing` sends preparation data to each child. This module adds an object to that data which redirects "cuda" when the
child unpickles it. The child unpickles it before it imports the program's modules, so "cuda" works from their first line.
`RegisteredDevice.after_fork` handles forked processes, and `capture` those that the program starts by other means.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing.process
import multiprocessing.spawn
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch.multiprocessing

from wooly import ranks

if TYPE_CHECKING:
    from wooly.settings import Settings

Patch = tuple[Any, str, Any]

#: Returns the id of the executor of this process's session; empty: there is no session, or no controller. `api` sets it.
where: Callable[[], str] = str

#: The ranks of the processes that `mp.spawn` is about to start.
_spawning: Iterator[ranks.Rank] = iter(())
#: Settings by which a child opens its session; None while "cuda" is not redirected in this process.
settings: Settings | None = None


class _Opening:
    """Redirects "cuda" in a child when the child unpickles it."""

    def __init__(self, settings: Settings, near: str, rank: ranks.Rank | None) -> None:
        self._settings, self._near, self._rank = settings, near, rank

    def __reduce__(self) -> Any:
        return begin, (self._settings, self._near, self._rank)


def begin(settings: Settings, near: str, rank: ranks.Rank | None) -> None:
    """Redirect "cuda" in this child process. The first use of a device opens a session, which ends when the child exits.

    Args:
        settings: the parent's settings.
        near: the parent's executor, which the session prefers, because the processes may share memory.
        rank: the rank that this process is; None: it is none.
    """
    from wooly import api

    ranks.spawned = rank
    api.enable_on_use(settings, near)


def is_child() -> bool:
    """Whether this process is a child of multiprocessing."""
    return multiprocessing.process.parent_process() is not None


def failure(passing: BaseException | None) -> BaseException | None:
    """The failure of a child, by the exception that passes when it exits. `mp.spawn` raises SystemExit behind the exception."""
    if isinstance(passing, SystemExit):
        return (passing.__context__ or passing) if passing.code else None
    return passing


def close_at_exit(close: Callable[[], None]) -> None:
    """Call `close` when a child of multiprocessing exits. Such a child does not run `atexit`."""
    if is_child():
        Finalize(None, close, exitpriority=-100)


def patches() -> Iterator[Patch]:
    """Yield each patch as (owner, name, value)."""
    real = multiprocessing.spawn.get_preparation_data

    @functools.wraps(real)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(real(name))
        if settings is not None:
            data["wooly"] = _Opening(settings, where(), next(_spawning, None))
        return data

    yield (multiprocessing.spawn, "get_preparation_data", get_preparation_data)

    module: Any = importlib.import_module("torch.multiprocessing.spawn")  # its name is also that of a function
    start = module.start_processes

    @functools.wraps(start)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *more: Any, **options: Any) -> Any:
        """The processes of one call are ranks of one program. They start in the order of their ranks."""
        global _spawning
        gang = ranks.new_id()
        if nprocs > 1:
            _spawning = iter([ranks.Rank(gang, k, nprocs, nprocs) for k in range(nprocs)])
        try:
            context = start(fn, args, nprocs, False, *more, **options)
        finally:
            _spawning = iter(())
        while join and not context.join():
            pass
        return None if join else context

    yield (module, "start_processes", start_processes)
    yield (torch.multiprocessing, "start_processes", start_processes)
