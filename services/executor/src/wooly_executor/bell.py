"""Wakes one task of an event loop, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Bell:
    """Wakes the one task that waits for it. It may ring before the task waits, and after the event loop has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung = False
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def ring(self) -> None:
        """Wake the waiting task. If no task waits, the next wait returns at once. Any thread may call this."""
        with self._lock:
            listener, self._rung = self._listener, True
        if listener is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, so no task is left to wake
                listener[0].call_soon_threadsafe(listener[1].set)

    async def heard(self, timeout_s: float | None = None) -> None:
        """Wait until the bell has rung since the last wait, at most `timeout_s` seconds."""
        event = asyncio.Event()
        with self._lock:
            if self._rung:
                event.set()
            self._listener = asyncio.get_running_loop(), event
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        finally:
            with self._lock:
                self._listener = None
                self._rung = False
