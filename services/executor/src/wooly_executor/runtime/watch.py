"""Tells kernels that exceed their time limit to end. A separate thread sets a word in memory that the kernel reads."""

from __future__ import annotations

import threading
import time
from typing import Any

from wooly_bus.supervision import start_thread

#: Time between two checks of the running launch, in seconds.
TICK_S = 0.02
#: Number of checks without a running launch after which the thread sleeps until the next launch.
IDLE_TICKS = 100


class Watch:
    """Watches one launch at a time."""

    def __init__(self) -> None:
        self._running: tuple[float, Any] | None = None
        self._asleep = True
        self._wake = threading.Event()
        start_thread(self._look, "kernel-watch")

    def begin(self, word: Any, seconds: float) -> None:
        """Set the first element of `word` if `end` is not called within `seconds`."""
        self._running = (time.monotonic() + seconds, word)
        if self._asleep:
            self._wake.set()

    def end(self) -> None:
        """The launch is over."""
        self._running = None

    def _look(self) -> None:
        while True:
            self._wake.wait()
            self._asleep = False
            idle = 0
            while idle < IDLE_TICKS:
                running = self._running
                idle = 0 if running is not None else idle + 1
                if running is not None and time.monotonic() > running[0]:
                    running[1][0] = 1
                time.sleep(TICK_S)
            self._wake.clear()
            self._asleep = True
            if self._running is not None:  # a launch began while the thread went to sleep
                self._wake.set()
