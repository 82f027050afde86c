"""All private names of CPython that the client uses. Check this file against each new Python release.

Checked against Python 3.11 to 3.14.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: `frame_at(depth)`: a frame of this thread's stack. Depth 0 is the caller's frame, depth 1 the frame of the caller's caller.
frame_at: Callable[[int], FrameType] = sys._getframe


def unlock_after_fork(lock: Any) -> None:
    """Release a lock in a forked process. A thread of the parent may hold the lock, and the fork does not have that thread."""
    lock._at_fork_reinit()
