"""Decides which foreign kernel is compiled next, and where: in worker processes of this executor, or by remote compilers."""

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

#: Maximum number of kernels that compile at the same time, in total and for one tenant. A tenant cannot take all places.
AT_ONCE = 4
OWN_AT_ONCE = 2
T = TypeVar("T")


class BuildRefusedError(WorkerError):
    """A remote compiler refuses to compile a kernel."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Builder(Protocol):
    """A compiler on this machine. Thread-safe."""

    def version(self) -> str:
        """Return the version of the compiler; empty if there is no compiler or its version is unknown."""
        ...

    def build(self, request: dict[str, Any], what: str) -> bytes:
        """Compile a kernel, and return its code (see `wooly_wis.foreign`).

        Raises:
            WisError: the kernel cannot be compiled.
        """
        ...


class Remote(Protocol):
    """Compilers on other machines. Thread-safe."""

    def get(self, source: Source, key: KernelKey, target: str, rejected: str) -> tuple[str, bytes] | None:
        """Return the version of a compiler and the code that it built; None if no compiler answers in time.

        Args:
            source: the text.
            key: the kernel of the text.
            target: the target of the code.
            rejected: version of a compiler whose code was rejected, so that the compiler builds it again; or empty.

        Raises:
            BuildRefusedError: the kernel cannot be compiled.
        """
        ...


class WorkerBuilder:
    """Compiles in worker processes of this executor, with the compiler service's code. It starts one worker per concurrent
    request.

    Args:
        folder: where the workers keep their files.
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
        return self.ask({"what": "foreign", **request}, what)

    def ask(self, request: dict[str, Any], what: str) -> bytes:
        """Send a request of `wooly_compiler.worker` to an idle worker, and return the answer.

        Raises:
            WorkerError: there is no compiler, or it refuses the request, crashes or takes too long.
        """
        if self._package is None:
            error = WorkerError(
                f"{what} needs a compiler, and none is available: run `wooly up`, which starts one, "
                "or run pip install wooly-compiler on the executor's machine"
            )
            error.retryable = True
            raise error
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = WorkerProcess(Limits(), self.MODULE, (str(self._folder),))
        try:
            return worker.ask(request, str(request["target"]), what)
        finally:
            self._idle.append(worker)


class Turns(Generic[T]):
    """A thread pool in which owners take turns, so that no owner can occupy all threads.

    Args:
        work: called with each item, in one of the threads.
    """

    def __init__(self, work: Callable[[T], None]) -> None:
        self._work = work
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._busy: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads = self._idle = self._put = 0

    def put(self, owner: str, item: T) -> None:
        """Queue an item behind the owner's earlier items."""
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
