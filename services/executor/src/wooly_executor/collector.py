"""When cycles of garbage are looked for: while the device has nothing to do.

Left to itself, the interpreter walks over everything that lives each time this has grown by a quarter, and stops all threads
meanwhile: beside the programs of one language model that is 0.4 s, in the middle of somebody's work, and on their bill. What it
finds is next to nothing, as what sessions leave behind goes by reference counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

#: The device has done nothing for so long: nobody is likely to notice.
REST_S = 1.0
#: A device that never rests is interrupted after this.
AT_LAST_S = 600.0
#: Collections of the middle generation after which the interpreter walks over everything by itself: never.
_NEVER = 1 << 30


class Collector:
    """Owned by the device loop's thread. What it has looked at once it does not look at again while sessions are open.

    Args:
        clock: seconds that only go forward.
    """

    __slots__ = ("_clock", "_looked", "_worked")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._worked: float | None = None

    def begin(self) -> None:
        """From now on only this looks at what is old. It holds for the process."""
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._look(everything=False)

    def worked(self) -> None:
        """The device has just done something."""
        self._worked = now = self._clock()
        if now - self._looked >= AT_LAST_S:
            self._look(everything=False)

    def timeout(self) -> float | None:
        """Seconds until `rest` has something to do; None: only after more work."""
        return None if self._worked is None else max(0.0, self._worked + REST_S - self._clock())

    def rest(self, *, alone: bool) -> None:
        """The device has nothing to do.

        Args:
            alone: no session is open.
        """
        if self._worked is not None and self._clock() - self._worked >= REST_S:
            self._worked = None
            self._look(everything=alone)

    def _look(self, *, everything: bool) -> None:
        if everything:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._looked = self._clock()
