"""A session leaves its executor because the controller asks for it: to go on in another one (a move), or to hibernate.

The session leaves at a cut, so nothing is done twice. For a move, a first cut is stored while the script runs; then the script
waits for a second cut, of what changed meanwhile, and for the other executor. A session that hibernates has no executor. Its next
operation finds a channel that is closed, and opens the session elsewhere, as after a loss.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from wooly_bus.channel import ChannelClient, ChannelClosedError
from wooly_bus.supervision import start_call
from wooly_wis.messages import RenewSessionReply, Resumed

from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly_bus.channel import Expected, Frame

    from wooly.link import Link
    from wooly.recorder import Lock

log = logging.getLogger("wooly")
#: Seconds between two questions whether the first cut of a move is stored.
POLL_S = 0.05
#: What the controller says if there is no room elsewhere any more.
STAYS = "router.stays"


class HibernatedChannel(ChannelClient):
    """The channel of a session without an executor. Each use fails as if the connection were closed.

    Args:
        acked: number of the last frame, which the executor has processed.
    """

    def __init__(self, acked: int) -> None:
        self.acked = acked
        self._aborted = threading.Event()

    def _closed(self) -> NoReturn:
        raise ChannelClosedError("the session hibernates")

    def send(self, kind: int, *buffers: object) -> int:
        """See `ChannelClient.send`."""
        self._closed()

    def complete(self, expected: Expected, timeout: float | None = None) -> None:
        """See `ChannelClient.complete`."""
        self._closed()

    def recv(self, timeout: float | None = None) -> Frame:
        """See `ChannelClient.recv`."""
        self._closed()

    def poll_acks(self) -> None:
        """Nothing arrives."""

    def broken(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted.is_set()

    def abort(self) -> None:
        """Let the next use, or `broken`, show that the session has ended."""
        self._aborted.set()

    def await_end(self, timeout: float) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """Nothing is open."""


class Departures:
    """Does what the controller asks a session for. The thread that renews the session's lease calls it.

    Args:
        link: the session's link.
        lock: the recorder's lock, which every user of the link holds.

    Attributes:
        stays: why the session did not do what it was asked for; empty: it did, or was asked for nothing.
    """

    def __init__(self, link: Link, lock: Lock) -> None:
        self._link, self._lock = link, lock
        self.stays = ""
        self._busy = threading.Lock()
        self._position, self._since = -1, 0.0

    @property
    def recovers(self) -> bool:
        """Whether the session can go on in another executor."""
        return self._link.recovery is not None

    def take_resumed(self) -> Resumed | None:
        """How the session last went on in another executor. Each is returned once."""
        recovery = self._link.recovery
        if recovery is None or recovery.resumed is None:
            return None
        (seconds, frames), recovery.resumed = recovery.resumed, None
        return Resumed(seconds=seconds, frames=frames)

    def heed(self, reply: RenewSessionReply) -> None:
        """Begin what the controller asks for, unless something has begun."""
        if reply.wish is not None:
            self._begin(reply.wish, reply.reason)
        elif reply.hibernate_after_s:
            self._hibernate_if_idle(reply.hibernate_after_s)

    def _hibernate_if_idle(self, after_s: float) -> None:
        recovery, now, position = self._link.recovery, time.monotonic(), self._link.position
        if position != self._position:
            self._position, self._since = position, now
        elif recovery is not None and not recovery.hibernates and now - self._since >= after_s:
            self._begin("idle", f"no operation for {now - self._since:.0f} s")

    def _begin(self, what: str, reason: str) -> None:
        if not self._busy.acquire(blocking=False):
            return
        do = {"move": self._move, "hibernate": self._hibernate, "idle": self._hibernate_idle, "wake": self._wake}[what]

        def work() -> None:
            try:
                self.stays = ""
                do(reason)
            except WoolyError as e:
                self.stays = str(e)
            finally:
                self._busy.release()

        start_call(work, "wooly-departure")

    def _move(self, reason: str) -> None:
        link = self._link
        with self._lock:
            number = link.continuation.next_cut
        done = False
        while not done:
            with self._lock:
                done = link.continuation.advance_cut(number)
            if not done:
                time.sleep(POLL_S)
        with self._lock:
            begun = time.monotonic()
            problem = link.continuation.cut_here()
            if link.recovery is not None:
                if problem:
                    log.info("the session moves without a new checkpoint: %s", problem)
                link.continuation.move(reason, begun)

    def _hibernate(self, reason: str) -> None:
        with self._lock:
            self._hibernate_here(reason)

    def _hibernate_idle(self, reason: str) -> None:
        with self._lock:
            if self._link.position == self._position:
                self._hibernate_here(reason)
            self._position = -1

    def _hibernate_here(self, reason: str) -> None:
        problem = self._link.continuation.cut_here()
        if problem:
            self.stays = problem
        elif self._link.recovery is not None:
            self._link.continuation.hibernate(reason)

    def _wake(self, reason: str) -> None:
        with self._lock:
            self._link.continuation.wake(reason)
