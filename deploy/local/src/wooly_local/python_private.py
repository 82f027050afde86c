"""The private names of CPython that the local stack uses, in one file, so that they can be checked for a new Python release.

Checked against Python 3.11 to 3.14.
"""

from __future__ import annotations

import atexit
import threading


def finish() -> None:
    """Wait for all threads, then run the exit functions. The interpreter does both at its end, which a fork never reaches."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
