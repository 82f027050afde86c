"""Runs Python's garbage collector while the device is idle, and gives freed memory back to the system.

By default, the interpreter scans all objects whenever their number has grown by a quarter, and stops all threads meanwhile. With
the programs of one language model this takes 0.4 s, in the middle of a session's work and at the session's cost. The scan finds
almost nothing, because reference counts already free what sessions leave behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

#: Idle seconds after which new objects are collected. This takes milliseconds, and after a second of idleness it rarely delays
#: anybody.
IDLE_S = 1.0
#: Idle seconds after which all objects are collected, if no session is open, and freed memory is given back.
LONG_IDLE_S = 60.0
#: Maximum seconds between two collections of new objects while the device is never idle.
MAX_INTERVAL_S = 600.0
#: Threshold that switches off the interpreter's own full collections: it is never reached.
_NEVER = 1 << 30


class Collector:
    """Decides when to collect. It freezes the objects that it has scanned, and scans them again only after a long idle time.

    The device loop's thread owns it.

    Args:
        clock: returns monotonic seconds.
        give_back: gives freed memory back.
    """

    __slots__ = ("_clock", "_due", "_give_back", "_looked", "_rests")

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, give_back: Callable[[], object] = lambda: None
    ) -> None:
        self._clock, self._give_back = clock, give_back
        self._looked = self._rests = clock()
        self._due: float | None = None

    def begin(self) -> None:
        """Switch off the interpreter's own full collections, for the whole process. From now on only this object starts them."""
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._collect(everything=False)

    def worked(self) -> None:
        """Note that the device has just worked."""
        self._rests = now = self._clock()
        self._due = IDLE_S
        if now - self._looked >= MAX_INTERVAL_S:
            self._collect(everything=False)

    def timeout(self) -> float | None:
        """Seconds until `rest` has something to do. None: nothing to do before the device works again."""
        return None if self._due is None else max(0.0, self._rests + self._due - self._clock())

    def rest(self, *, alone: bool) -> None:
        """Collect garbage if the device has been idle for long enough.

        Args:
            alone: no session is open.
        """
        due = self._due
        if due is None or self._clock() - self._rests < due:
            return
        self._due = LONG_IDLE_S if due == IDLE_S else None
        if due == IDLE_S or alone:
            self._collect(everything=due == LONG_IDLE_S)
        if due == LONG_IDLE_S:
            self._give_back()

    def _collect(self, *, everything: bool) -> None:
        if everything:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._looked = self._clock()
