"""A session leaves its executor because the controller asks for it: to go on in another one (a move), or to hibernate.

The session leaves at a cut, so nothing is done twice. For a move, a first cut is stored while the script runs; then the script
waits for a second cut, of what changed meanwhile, and for the other executor. A session that hibernates has no executor. Its next
operation finds a channel that is closed, and opens the session elsewhere, as after a loss.

The ranks of a program leave together: if one leaves, the others go back to the newest common cut, as after a loss.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from wooly_bus.channel import ChannelClient, ChannelClosedError
from wooly_bus.supervision import start_call
from wooly_wis.messages import RenewSessionReply, Resumed

from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly_bus.channel import Expected, Frame

    from wooly.link import Link
    from wooly.recorder import Lock
    from wooly.recovery import Recovery

log = logging.getLogger("wooly")
#: Seconds between two questions whether the first cut of a move is stored.
POLL_S = 0.05
#: Seconds after which the locks of all devices are tried again.
LOCK_AGAIN_S = 0.002
#: What the controller says if there is no room elsewhere any more.
STAYS = "router.stays"


class HibernatedChannel(ChannelClient):
    """The channel of a session without an executor. Each use fails as if the connection were closed.

    Args:
        acked: number of the last frame, which the executor has processed.
    """

    def __init__(self, acked: int) -> None:
        self.acked, self.receiving_s = acked, 0.0
        self.segment, self._placed = None, 0
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
        links: the link of each device, with the recorder's lock, which every user of the link holds.

    Attributes:
        stays: why the session did not do what it was asked for; empty: it did, or was asked for nothing.
        asked: the reason that the controller gave when it asked for what the session did last; None: it did not ask.
    """

    def __init__(self, links: Sequence[tuple[Link, Lock]]) -> None:
        self._links = [link for link, _ in links]
        self._locks = [lock for _, lock in links]
        self.stays = ""
        self.asked: str | None = None
        self._busy = threading.Lock()
        self._positions: list[int] = []
        self._telling: list[tuple[Recovery, tuple[float, int]]] = []
        self._since = 0.0

    @property
    def recovers(self) -> bool:
        """Whether the session can go on in another executor."""
        return all(link.recovery is not None for link in self._links)

    @property
    def _is_rank(self) -> bool:
        return any(link.recovery is not None and link.recovery.together is not None for link in self._links)

    @property
    def _hibernates(self) -> bool:
        return any(link.recovery is not None and link.recovery.hibernates for link in self._links)

    def take_stays(self) -> str:
        """Why the session stays where it is; empty: it did what it was asked for, or was asked for nothing.

        Each reason is returned once, except why it cannot go on elsewhere any more.
        """
        stays, self.stays = self.stays, ""
        return stays or next(filter(None, [link.stays for link in self._links]), "")

    @property
    def resumed(self) -> Resumed | None:
        """How the session last went on in another executor; None: it did not, or the router was told (`told_resumed`)."""
        found = self._telling = [
            (r, r.resumed) for link in self._links if (r := link.recovery) is not None and r.resumed
        ]
        if not found:
            return None
        return Resumed(
            seconds=max([seconds for _, (seconds, _) in found]), frames=sum([frames for _, (_, frames) in found])
        )

    def told_resumed(self) -> None:
        """The router was told the last value of `resumed`."""
        for recovery, told in self._telling:
            if recovery.resumed is told:
                recovery.resumed = None
        self._telling = []

    @contextlib.contextmanager
    def _all_locked(self) -> Iterator[None]:
        """Hold the locks of all devices. A thread of the script may hold some and wait for others, so none is waited for here."""
        while True:
            with contextlib.ExitStack() as held:
                for lock in self._locks:
                    if not lock.acquire(blocking=False):
                        break
                    held.callback(lock.release)
                else:
                    yield
                    return
            time.sleep(LOCK_AGAIN_S)

    def heed(self, reply: RenewSessionReply) -> None:
        """Begin what the controller asks for, unless something has begun."""
        if reply.wish is not None:
            self._begin(reply.wish, reply.reason)
        elif reply.hibernate_after_s:
            self._hibernate_if_idle(reply.hibernate_after_s)

    def _hibernate_if_idle(self, after_s: float) -> None:
        now, positions = time.monotonic(), [link.position for link in self._links]
        if positions != self._positions:
            self._positions, self._since = positions, now
        elif self.recovers and not self._hibernates and not self._is_rank and now - self._since >= after_s:
            self._begin("idle", f"no operation for {now - self._since:.0f} s")

    def _begin(self, what: str, reason: str) -> None:
        if not self._busy.acquire(blocking=False):
            return
        do = {"move": self._move, "hibernate": self._hibernate, "idle": self._hibernate_idle, "wake": self._wake}[what]
        self.stays, self.asked = "", None if what == "idle" else reason

        def work() -> None:
            try:
                do(reason)
            except WoolyError as e:
                self.stays = str(e)
            finally:
                self._busy.release()

        start_call(work, "wooly-departure")

    def _move(self, reason: str) -> None:
        if self._is_rank:
            with self._all_locked():
                for link in self._links:
                    link.continuation.move(reason, time.monotonic())
            return
        for link, lock in zip(self._links, self._locks, strict=True):
            with lock:
                number = link.continuation.next_cut
            done = False
            while not done:
                with lock:
                    done = link.continuation.advance_cut(number)
                if not done:
                    time.sleep(POLL_S)
        with self._all_locked():
            begun = time.monotonic()
            problems = [link.continuation.cut_here() for link in self._links]
            if not self.recovers:
                return
            for problem in filter(None, problems):
                log.info("the session moves without a new checkpoint: %s", problem)
            for link in self._links:
                link.continuation.move(reason, begun)

    def _hibernate(self, reason: str) -> None:
        with self._all_locked():
            self._hibernate_here(reason)

    def _hibernate_idle(self, reason: str) -> None:
        with self._all_locked():
            if [link.position for link in self._links] == self._positions:
                self._hibernate_here(reason)
            self._positions = []

    def _hibernate_here(self, reason: str) -> None:
        if self._is_rank:
            raise WoolyError(
                "it is a rank of a torch.distributed group. The other ranks would wait for it, so it does not hibernate"
            )
        problems = [link.continuation.cut_here() for link in self._links]
        self.stays = next(filter(None, problems), "")
        if not self.stays:
            for link in self._links:
                link.continuation.hibernate(reason)

    def _wake(self, reason: str) -> None:
        with self._locks[0]:
            self._links[0].continuation.wake(reason)
