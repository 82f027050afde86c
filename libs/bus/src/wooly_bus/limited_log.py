"""A log that whoever causes its lines cannot fill."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """Passes on at most `lines` warnings in `period_s` seconds, counts the others, and tells how many when the period is over.

    Owned by one thread.

    Args:
        log: where the warnings go.
        what: what the lines are about, in the plural, for the line that tells how many were left out.
        lines: warnings per period.
        period_s: seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        log: logging.Logger,
        what: str,
        *,
        lines: int = 10,
        period_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._what = what
        self._lines = lines
        self._period_s = period_s
        self._clock = clock
        self._until = float("-inf")
        self._left = 0
        self._left_out = 0

    def warning(self, text: str) -> None:
        """Pass a line on, or count it."""
        self.settle()
        now = self._clock()
        if now >= self._until:
            self._until, self._left = now + self._period_s, self._lines
        if self._left:
            self._left -= 1
            self._log.warning("%s", text)
        else:
            self._left_out += 1

    def settle(self) -> None:
        """Tell how many lines were left out, if the period is over."""
        if self._left_out and self._clock() >= self._until:
            self._log.warning("%d more %s in %g s", self._left_out, self._what, self._period_s)
            self._left_out = 0

    @property
    def due(self) -> float | None:
        """When `settle` has something to tell, on the clock; None: it has not."""
        return self._until if self._left_out else None
