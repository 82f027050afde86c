"""Every private name of CPython that Wooly leans on, in one place, so that a new Python release is checked in one file.

Checked against Python 3.11 and 3.12.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: `frame_at(depth)`: the frame that is so many calls above the caller's (0: the caller's own).
frame_at: Callable[[int], FrameType] = sys._getframe


def unlock_after_fork(lock: Any) -> None:
    """Make a lock of the parent free in this fork, though a thread that the fork does not have may hold it."""
    lock._at_fork_reinit()
