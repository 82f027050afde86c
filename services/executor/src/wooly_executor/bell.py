"""Wakes one task of an event loop, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Bell:
    """A bell that one task listens to. It may ring before anybody listens, and after the event loop is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung = False
        self._listener: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def ring(self) -> None:
        """Wake the listener, or let the next one not wait. From any thread."""
        with self._lock:
            listener, self._rung = self._listener, True
        if listener is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is over: nobody is left to be woken
                listener[0].call_soon_threadsafe(listener[1].set)

    async def heard(self, timeout_s: float | None = None) -> None:
        """Wait until it has rung since the last time, at most `timeout_s` seconds."""
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
