"""Every private name of CPython that the local stack leans on, in one place, so that a new Python release is checked in one file.

Checked against Python 3.11 and 3.12.
"""

from __future__ import annotations

import atexit
import threading


def finish() -> None:
    """What the interpreter does at its end, which a fork does not come to: wait for threads, then run exit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
