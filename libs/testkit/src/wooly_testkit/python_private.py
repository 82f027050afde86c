"""Every private name of CPython that the test kit leans on, in one place. Checked against Python 3.11 and 3.12."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from typing import Any


def close_pipe_ends(process: subprocess.Popen[Any], ends: tuple[int, int, int, int, int, int]) -> None:
    """Close the ends of the pipes that are the child's, given all ends as `Popen._execute_child` is given them."""
    process._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def waiting_lock(process: subprocess.Popen[Any]) -> AbstractContextManager[Any]:
    """The lock that a thread holds while it takes a process's exit status."""
    lock: AbstractContextManager[Any] = process._waitpid_lock  # type: ignore[attr-defined]
    return lock
