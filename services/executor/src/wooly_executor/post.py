"""Queues for the device's thread: events of sessions, and functions that other threads send to it.

Decoders, compilers, the mover and the control plane send functions. The device's thread itself posts events of sessions, and
handles them between two launches.
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
    """Events of sessions, first in, first out. Only the device's thread uses it."""

    def __init__(self) -> None:
        self._events: deque[tuple[Session, Event]] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, session: Session, event: Event) -> None:
        """Queue an event of a session."""
        self._events.append((session, event))

    def take(self) -> tuple[Session, Event]:
        """Remove and return the oldest event. The queue must not be empty."""
        return self._events.popleft()


class Calls:
    """Functions that other threads run in the device's thread.

    Args:
        wake: wakes the device's thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = ""
        self.empty = self._jobs.empty

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the device's thread, even if the caller no longer waits for the result.

        After `end`, the future fails with `LoopEndedError`.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # cancelling the waiting task does not cancel the call

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

    def tell(self, function: Callable[[], None]) -> None:
        """Run `function` in the device's thread, without a caller that waits for it. After `end`, it is dropped.

        An error ends the device's thread, as an error in a frame's processing would: nobody else would notice it, and sessions
        would wait for ever.
        """

        def job() -> None:
            if not self._over:
                function()

        self._jobs.put(job)
        if self._over:
            self._answer()
        self._wake()

    def run_one(self) -> None:
        """Run the oldest function. The queue must not be empty."""
        self._jobs.get_nowait()()

    def end(self, why: str) -> None:
        """Make all queued and future calls fail with this reason."""
        self._over = why
        self._answer()

    def _answer(self) -> None:
        with contextlib.suppress(queue.Empty):  # another thread empties the queue at the same time
            while True:
                self._jobs.get_nowait()()
