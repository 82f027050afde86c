"""Opens the session of a process at other executors, once for all of its devices.

A session lives on all of its executors or on none. The link that first loses its executor, or leaves it, opens the session
elsewhere. The links of the other devices then connect to their new executors by themselves, each under its own lock. Devices do
not know of each other's frames, so each goes on from its own last cut.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wooly_bus.supervision import start_call

from wooly.errors import WoolyError
from wooly.recovery import Reopened

if TYPE_CHECKING:
    from wooly.link import Link
    from wooly.recorder import Lock

#: Why a device leaves an executor that is not lost.
FOLLOWS = "the session lost the executor of another device"


class Reopening:
    """The session's way to other executors. Each link calls it, in any thread.

    Args:
        open_elsewhere: opens the session. It gets the reason, the number of a cut that the executors must have (0: none), and
            whether the session still has its executors. It returns the address of each device, and raises WoolyError.
        connect: connects a device, by its index and its address. It raises WoolyError.
    """

    def __init__(
        self, open_elsewhere: Callable[[str, int, bool], Sequence[Any]], connect: Callable[[int, Any], Reopened]
    ) -> None:
        self._open_elsewhere, self._connect = open_elsewhere, connect
        self._lock = threading.Lock()
        self._links: list[tuple[Link, Lock]] = []
        #: How often the session was opened elsewhere, and by device: at which of these places the device is.
        self._openings = 0
        self._places: list[int] = []
        self._addresses: Sequence[Any] = ()

    def follow(self, links: Sequence[tuple[Link, Lock]]) -> None:
        """Take the links of all devices, and the locks of their recorders."""
        self._links, self._places = list(links), [0] * len(links)

    def left(self, index: int) -> bool:
        """Whether the session has left the executor of a device, for another device."""
        return self._places[index] != self._openings

    def reopen(self, index: int, why: str, cut: int, leaves: bool) -> Reopened:
        """Connect a device to its next executor. Open the session there, unless another device has.

        Args:
            index: index of the device.
            why: why it leaves its executor.
            cut: number of the cut that the next executor must have; 0: none.
            leaves: it still has its executor.

        Raises:
            WoolyError: the session cannot go on.
        """
        with self._lock:
            if not self.left(index):
                self._open(index, why, cut, leaves)
            self._places[index] = self._openings
            address = self._addresses[index]
        return self._connect(index, address)

    def _open(self, index: int, why: str, cut: int, leaves: bool) -> None:
        link, _ = self._links[index]
        if link.lost is not None:
            raise link.lost
        others = [each for i, each in enumerate(self._links) if i != index]
        if not leaves:
            for other, _ in others:
                other.continuation.abandon(FOLLOWS)
        cuts = [cut]
        for other, _ in others:
            if other.recovery is None:
                raise WoolyError(
                    f"{why}; the session's device on {other.where} cannot go on in another executor any more"
                )
            cuts.append(other.recovery.number)
        self._addresses = self._open_elsewhere(why, max(cuts), leaves)
        self._openings += 1
        for other, lock in others:
            other.continuation.abandon(FOLLOWS)
            start_call(_follower(other, lock), "wooly-recovery")


def _follower(link: Link, lock: Lock) -> Callable[[], None]:
    def follow() -> None:  # a thread that waits for an answer does it first
        with lock, contextlib.suppress(WoolyError):
            link.continuation.go_on()

    return follow
