"""Waits for input by looking for it again and again for a short time, before the thread blocks.

The system takes 20 to 100 us to wake a blocked thread. It often wakes the thread on the core of the sender, so one of the two
waits. Two threads that exchange small frames are faster if they do not block in between. But a thread that looks all the time
takes a core from others, and perhaps from the sender. So a wait looks only if the wait before it was short. If it looks in vain,
or if the core was taken from it meanwhile, the next waits block at once, for a time that doubles. If a look finds input, this
time is halved.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wooly_bus import host

#: Maximum time, in ns, for which a wait looks for input before it blocks. A round trip between two processes takes 100 us.
LOOK_NS = 200_000
#: Time between two looks, in ns, that shows that another thread had the core. Usually it is 2 us.
TAKEN_NS = 30_000
#: Time, in ns, for which waits block at once after a wait that looked in vain: at least and at most.
PAUSES_NS = 1_000_000, 1_000_000_000
#: Minimum number of cores. With fewer, the sender cannot run while a thread looks.
MIN_CORES = 2


class BusyWait:
    """Decides for one thread whether its next wait looks for input before it blocks.

    Args:
        look_ns: maximum time for which a wait looks; 0: it never looks.
        cores: cores of this process; None: all that it may use.
        clock: returns monotonic ns.
    """

    __slots__ = ("_clock", "_look_ns", "_pause_ns", "_resumes", "_short")

    def __init__(
        self, look_ns: int = LOOK_NS, *, cores: int | None = None, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._look_ns = look_ns if (host.cores() if cores is None else cores) >= MIN_CORES else 0
        self._clock = clock
        self._short = False
        self._pause_ns, self._resumes = PAUSES_NS[0], 0

    def begin(self) -> tuple[int, int]:
        """Begin a wait. Returns the time now, and the time until which to look, or 0 if the wait must block at once."""
        now = self._clock()
        return now, now + self._look_ns if self._short and now >= self._resumes else 0

    def go_on(self, last: int, until: int) -> int:
        """Whether to look again. Returns the time now, or 0 if the wait must block.

        Args:
            last: the time of the last look.
            until: the time until which to look, from `begin`.
        """
        if not until:
            return 0
        now = self._clock()
        if now < until and now - last <= TAKEN_NS:
            return now
        self._resumes = now + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, PAUSES_NS[1])
        return 0

    def end(self, begun: int, until: int, *, blocked: bool) -> None:
        """End a wait.

        Args:
            begun: the time of its begin.
            until: the time until which it looked, from `begin`.
            blocked: it did not find the input by looking.
        """
        self._short = self._clock() - begun < self._look_ns
        if until and not blocked:
            self._pause_ns = max(self._pause_ns // 2, PAUSES_NS[0])
