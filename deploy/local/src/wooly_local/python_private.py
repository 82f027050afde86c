"""The private names of CPython that the local stack uses, in one file, so that they can be checked for a new Python release.

Checked against Python 3.11 to 3.14.
"""

from __future__ import annotations

import atexit
import threading
import weakref


def finish() -> None:
    """Wait for all threads, then run the exit functions. The interpreter does both at its end, which a fork never reaches."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def leave_to_the_end() -> None:
    """Do not call the finalizers (`weakref.finalize`) of objects that exist now at the end of this process and of its forks.

    PyTorch has one for each of its libraries of operators. Together they take 40 ms, and the process ends anyway.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
