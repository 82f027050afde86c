"""Notices that this process was stopped: its virtual machine was moved, its machine had no CPU for it, a debugger held it.

A process that was stopped has not read what was said meanwhile. So the silence of others means nothing until it has listened
again. A stop may come at any `await`, so whoever decides because of a silence asks here at the moment of the decision.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Seconds between two notes that the event loop runs.
NOTE_S = 0.5
#: Seconds by which a note may be late. After a longer time, this process was stopped.
STOPPED_S = 2.0


class Stops:
    """Tells for how long this process was stopped.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._noted: float | None = None
        self._count, self._stopped_s = 0, 0.0

    async def run(self) -> None:
        """Note that the event loop runs, until cancelled. Without this work, no stop is noticed."""
        while True:
            self.note()
            await asyncio.sleep(NOTE_S)

    def note(self) -> None:
        """Note that the event loop runs now."""
        now = self.clock()
        if self._noted is not None and now - self._noted > NOTE_S + STOPPED_S:
            self._count += 1
            self._stopped_s = now - self._noted
        self._noted = now

    @property
    def count(self) -> int:
        """The number of stops so far, one that has just ended included."""
        if self._noted is not None:
            self.note()
        return self._count

    @property
    def last_s(self) -> float:
        """The length of the last stop, in seconds."""
        return self._stopped_s
