"""When cycles of garbage are looked for: while the device has nothing to do.

Left to itself, the interpreter walks over everything that lives each time this has grown by a quarter, and stops all threads
meanwhile: beside the programs of one language model that is 0.4 s, in the middle of somebody's work, and on their bill. What it
finds is next to nothing, as what sessions leave behind goes by reference counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

#: The device has done nothing for so long: nobody is likely to notice a look at what is new, which takes milliseconds.
REST_S = 1.0
#: Nor, after so long and while there is no session, a look at everything.
LONG_REST_S = 60.0
#: A device that never rests is interrupted after this.
AT_LAST_S = 600.0
#: Collections of the middle generation after which the interpreter walks over everything by itself: never.
_NEVER = 1 << 30


class Collector:
    """Owned by the device loop's thread. What it has looked at once it passes over until nobody has been there for long.

    Args:
        clock: seconds that only go forward.
    """

    __slots__ = ("_clock", "_due", "_looked", "_rests")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = self._rests = clock()
        self._due: float | None = None

    def begin(self) -> None:
        """From now on only this looks at what is old. It holds for the process."""
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._look(everything=False)

    def worked(self) -> None:
        """The device has just done something."""
        self._rests = now = self._clock()
        self._due = REST_S
        if now - self._looked >= AT_LAST_S:
            self._look(everything=False)

    def timeout(self) -> float | None:
        """Seconds until `rest` has something to do; None: only after more work."""
        return None if self._due is None else max(0.0, self._rests + self._due - self._clock())

    def rest(self, *, alone: bool) -> None:
        """The device has nothing to do.

        Args:
            alone: no session is open.
        """
        due = self._due
        if due is None or self._clock() - self._rests < due:
            return
        self._due = LONG_REST_S if due == REST_S else None
        if due == REST_S or alone:
            self._look(everything=due == LONG_REST_S)

    def _look(self, *, everything: bool) -> None:
        if everything:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._looked = self._clock()
