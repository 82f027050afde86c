"""Time since the epoch that does not jump, for leases and deadlines that outlive a process.

A machine's clock may be set while services run: by an administrator, by NTP after a long time without a network, or when a
virtual machine continues. A lease that is compared with such a clock ends too early, or never.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("wooly.clock")
#: How fast the clock follows a machine's clock that was set, in seconds per second. At this rate, a lease of 15 s ends at most
#: 0.75 s early or late.
SLEW = 0.05
#: A difference above this, in seconds, is adopted at once: the machine had no valid time before.
ADOPTED_S = 86400.0
#: A difference above this, in seconds, is logged.
LOGGED_S = 5.0


class SteadyClock:
    """Returns seconds since the epoch. It runs with the monotonic clock and follows the machine's clock slowly.

    Args:
        wall: the machine's clock, in seconds since the epoch.
        steady: a clock that never jumps, in seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._last = steady()
        self._offset = wall() - self._last
        self._logged = 0.0

    def __call__(self) -> float:
        """Seconds since the epoch. Unless it adopts a difference of more than a day, it never returns less than before."""
        now = self._steady()
        behind = self._wall() - now - self._offset
        if abs(behind) > ADOPTED_S:
            log.warning("the machine's clock was set by %+.0f s; the time is adopted at once", behind)
            self._offset += behind
        else:
            most = SLEW * (now - self._last)
            self._offset += max(-most, min(behind, most))
            self._log(behind)
        self._last = now
        return now + self._offset

    def _log(self, behind: float) -> None:
        if abs(behind) < LOGGED_S:
            self._logged = 0.0
        elif abs(behind - self._logged) > abs(self._logged) / 2:
            log.warning(
                "the machine's clock was set by %+.0f s; leases and deadlines follow it by %.0f ms per second",
                behind,
                1e3 * SLEW,
            )
            self._logged = behind
