"""The private names of CPython that the test kit uses, in one file. Checked against Python 3.11 to 3.14."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from typing import Any


def close_pipe_ends(process: subprocess.Popen[Any], ends: tuple[int, int, int, int, int, int]) -> None:
    """Close the child's ends of the pipes. `ends` has all ends, in the order of the arguments of `Popen._execute_child`."""
    process._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def waiting_lock(process: subprocess.Popen[Any]) -> AbstractContextManager[Any]:
    """The lock that a thread holds while it reads the exit status of a process."""
    lock: AbstractContextManager[Any] = process._waitpid_lock  # type: ignore[attr-defined]
    return lock
