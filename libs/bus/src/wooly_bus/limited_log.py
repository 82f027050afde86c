"""A logger with a rate limit, so that a client cannot fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


def first_line(error: BaseException) -> str:
    """The first line of an error's text: the errors of databases have several. Without a text, the name of its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class LimitedLog:
    """Logs at most `lines` warnings in `period_s` seconds. After the period, logs how many further warnings were suppressed.

    Not thread-safe.

    Args:
        log: the logger that receives the warnings.
        what: the subject of the warnings, in the plural; part of the line that reports the suppressed warnings.
        lines: largest number of warnings per period.
        period_s: length of a period, in seconds.
        clock: returns monotonic seconds.
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
        self._suppressed = 0

    def warning(self, text: str) -> None:
        """Log the warning, or count it if the limit of this period is reached."""
        self.settle()
        now = self._clock()
        if now >= self._until:
            self._until, self._left = now + self._period_s, self._lines
        if self._left:
            self._left -= 1
            self._log.warning("%s", text)
        else:
            self._suppressed += 1

    def settle(self) -> None:
        """If the period is over, log how many warnings were suppressed."""
        if self._suppressed and self._clock() >= self._until:
            self._log.warning("%d more %s in %g s", self._suppressed, self._what, self._period_s)
            self._suppressed = 0

    @property
    def due(self) -> float | None:
        """The time on the clock at which `settle` will log the number of suppressed warnings; None: no warning was suppressed."""
        return self._until if self._suppressed else None
