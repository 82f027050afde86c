"""How the parts of an executor reach the device's thread: events of sessions, and functions to run there.

Decoders, compilers, the mover of memory and the control plane call. What happens to a session in the device's thread is posted,
and is taken up between two launches.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from wooly_executor.errors import LoopEndedError
from wooly_executor.flow import Event
from wooly_executor.session import Session

T = TypeVar("T")


class Post:
    """Events of sessions, in the order in which they were added. The device's thread alone uses it."""

    def __init__(self) -> None:
        self._events: deque[tuple[Session, Event]] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, session: Session, event: Event) -> None:
        """Something has happened to a session."""
        self._events.append((session, event))

    def take(self) -> tuple[Session, Event]:
        """The event that has waited longest; there is one."""
        return self._events.popleft()


class Calls:
    """Functions that other threads have the device's thread run.

    Args:
        wake: has it look.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = ""
        self.empty = self._jobs.empty

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the device's thread run `function`, also when nobody waits for the result any more.

        After `end` the future has a `LoopEndedError`.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who waits for it may be cancelled, the call is not

        def job() -> None:
            try:
                if self._over:
                    raise LoopEndedError(self._over)
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)

        self._jobs.put(job)
        if self._over:
            self._answer()
        self._wake()
        return future

    def run_one(self) -> None:
        """Run the function that has waited longest; there is one."""
        self._jobs.get_nowait()()

    def end(self, why: str) -> None:
        """From now on every call fails, those that wait, too."""
        self._over = why
        self._answer()

    def _answer(self) -> None:
        with contextlib.suppress(queue.Empty):  # another thread answers, too
            while True:
                self._jobs.get_nowait()()
