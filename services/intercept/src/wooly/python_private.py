"""All private names of CPython that the client uses. Check this file against each new Python release.

Checked against Python 3.11 to 3.14.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import SemLock
from types import FrameType
from typing import Any

#: `frame_at(depth)`: a frame of this thread's stack. Depth 0 is the caller's frame, depth 1 the frame of the caller's caller.
frame_at: Callable[[int], FrameType] = sys._getframe


def unlock_after_fork(lock: Any) -> None:
    """Release a lock in a forked process. A thread of the parent may hold the lock, and the fork does not have that thread."""
    lock._at_fork_reinit()


def fenced_semaphores(before: Callable[[], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches (owner, name, value) by which all locks, semaphores, conditions, events and barriers of `multiprocessing`
    call `before` before they are released.
    """
    real_methods, real_exit = SemLock._make_methods, SemLock.__exit__  # type: ignore[attr-defined]

    @functools.wraps(real_methods)
    def make_methods(self: Any) -> None:
        real_methods(self)
        release = self.release

        def fenced() -> None:
            before()
            release()

        self.release = fenced

    @functools.wraps(real_exit)
    def leave(self: Any, *exc: Any) -> None:
        before()
        real_exit(self, *exc)

    yield (SemLock, "_make_methods", make_methods)
    yield (SemLock, "__exit__", leave)
