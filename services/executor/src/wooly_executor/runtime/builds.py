"""Whose kernel is compiled next, and by whom: processes of this executor's own, or compilers elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from wooly_bus.supervision import start_thread
from wooly_bus.worker import Limits, WorkerError, WorkerProcess
from wooly_wis.artifact import compiler_version
from wooly_wis.foreign import KernelKey, Source

#: Kernels that are compiled at the same time, and those of one tenant among them: another's never wait for all of its.
AT_ONCE = 4
OWN_AT_ONCE = 2
T = TypeVar("T")


class BuildRefusedError(WorkerError):
    """A compiler elsewhere says no."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Builder(Protocol):
    """What compiles on this machine; several threads ask it."""

    def version(self) -> str:
        """Which compiler it is; empty if there is none, or nobody knows."""
        ...

    def build(self, request: dict[str, Any], what: str) -> bytes:
        """The code (see `wooly_wis.foreign`) of a kernel.

        Raises:
            WisError: it cannot be compiled.
        """
        ...


class Remote(Protocol):
    """Compilers elsewhere; several threads ask them."""

    def get(self, source: Source, key: KernelKey, target: str, rejected: str) -> tuple[str, bytes] | None:
        """Version of a compiler, and the bytes of the code that it made; None if nobody answers, or not soon.

        Args:
            source: the text.
            key: which kernel of it.
            target: what the code is for.
            rejected: version of a compiler whose code is bad, so that it makes it anew.

        Raises:
            BuildRefusedError: it cannot be compiled.
        """
        ...


class WorkerBuilder:
    """Compiles in processes of the compiler service's, of this executor's own: as many as are asked at once.

    Args:
        folder: where they keep their files.
    """

    MODULE = "wooly_compiler.worker"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[WorkerProcess] = []

    @functools.cached_property
    def _package(self) -> Path | None:
        found = importlib.util.find_spec("wooly_compiler")
        places = found.submodule_search_locations if found is not None else None
        return Path(next(iter(places))) if places else None

    def version(self) -> str:
        """See `Builder`."""
        return compiler_version(self._package) if self._package is not None else ""

    def build(self, request: dict[str, Any], what: str) -> bytes:
        """See `Builder`."""
        if self._package is None:
            error = WorkerError(
                "kernels in other languages need a compiler: `wooly up` starts one, "
                "or pip install wooly-compiler on the executor's machine"
            )
            error.retryable = True
            raise error
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = WorkerProcess(Limits(), self.MODULE, (str(self._folder),))
        try:
            return worker.ask({"what": "foreign", **request}, str(request["target"]), what)
        finally:
            self._idle.append(worker)


class Turns(Generic[T]):
    """Does work of several owners in threads of its own: owners take turns, and none has all threads.

    Args:
        work: what is done with an item.
    """

    def __init__(self, work: Callable[[T], None]) -> None:
        self._work = work
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._busy: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads = self._idle = self._put = 0

    def put(self, owner: str, item: T) -> None:
        """Have something done, after what that owner gave before."""
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(item)
            self._put += 1
            if self._put > self._idle and self._threads < AT_ONCE:
                self._threads += 1
                start_thread(self._serve, "foreign-kernels")
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while (owner := self._next()) is None:
                    self._changed.wait()
                self._idle -= 1
                self._put -= 1
                item = self._waiting[owner].popleft()
                if self._waiting[owner]:
                    self._waiting.move_to_end(owner)
                else:
                    del self._waiting[owner]
                self._busy[owner] += 1
            try:
                self._work(item)
            finally:
                with self._changed:
                    self._busy[owner] -= 1
                    if not self._busy[owner]:
                        del self._busy[owner]
                    self._changed.notify()

    def _next(self) -> str | None:
        return next((owner for owner in self._waiting if self._busy[owner] < OWN_AT_ONCE), None)
