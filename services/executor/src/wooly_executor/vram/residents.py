"""The sessions of a device and what of its memory they have, were promised and could give up."""

from __future__ import annotations

from collections.abc import Callable

from wooly_dispatch.overcommit import Commitment

from wooly_executor.contents import Contents
from wooly_executor.dispatch import Dispatch
from wooly_executor.flow import Residence
from wooly_executor.frames import Frame
from wooly_executor.memory.ledger import Ledger
from wooly_executor.memory.swap import Place, Policy
from wooly_executor.pinned_weights import PinnedWeights
from wooly_executor.session import Session


class Residents:
    """Who is on one device.

    Args:
        ledger: the accounts.
        policy: reserve, what a large allocation is, how long a session must be idle.
        dispatch: knows the sessions' classes.
        contents: what they share.
        pins: what stays without them.
        clock: monotonic ns.

    Attributes:
        sessions: by id.
        leaving: bytes that will be free when those who leave have left.
        due: there may be room, or somebody to leave, that was not there before.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        dispatch: Dispatch,
        contents: Contents,
        pins: PinnedWeights,
        clock: Callable[[], int],
    ) -> None:
        self.ledger, self.policy, self.contents, self.pins, self.clock = ledger, policy, contents, pins, clock
        self.sessions: dict[str, Session] = {}
        self.leaving = 0
        self.due = False
        self._dispatch = dispatch

    def priority(self, session: Session) -> int:
        """The class of a session."""
        found = self._dispatch.state.sessions.get(session.id)
        return found.policy.priority if found is not None else 2

    def idle_since(self, session: Session) -> int | None:
        """Since when nothing of a session runs; who waits for memory does nothing either."""
        return session.holdings.lacking or session.holdings.idle_since

    def commitments(self) -> list[Commitment]:
        """What every session was promised; what is pinned stays, and counts as such."""
        found = [Commitment(s.id, s.holdings.promised, s.holdings.swappable) for s in self.sessions.values()]
        return found + [Commitment(p.name, self.ledger.book.has(p.name), False) for p in self.pins.accounts.values()]

    def can_make_room(self, session: Session, need: int) -> bool:
        """Whether a program that does not fit could have room if all others that may leave did."""
        if session.id not in self._dispatch.state.sessions:
            return False  # frames in the order of their arrival: nobody can be passed over
        return self.room_without_others(session) >= need

    def room_without_others(self, session: Session) -> int:
        """Bytes that would be free if all others that may leave did."""
        room = self.ledger.spare + self.leaving
        for other in self.sessions.values():
            if (
                other is not session
                and other.holdings.swappable
                and other.flow.residence in (Residence.HERE, Residence.COMING)
            ):
                room += (
                    self.ledger.pool.held(other.id) + self.ledger.book.bears(other.id) + other.holdings.account.reserved
                )
        return room

    def promise(self, session: Session, head: Frame | None, nbytes: int) -> None:
        """Set room aside for the run that a session begins with."""
        if head is not None and nbytes and not head.reserved:
            self.ledger.reserve_for(session.holdings.account, nbytes)
            head.reserved = nbytes

    def drop_workspaces(self, except_for: Session) -> None:
        """Take back what sessions keep between programs."""
        for session in self.sessions.values():
            if session.holdings.account.workspace and session is not except_for and not session.running:
                self.ledger.settle(session.holdings.account, self.clock())
                self.ledger.drop_workspace(session.holdings.account)

    @staticmethod
    def swapped_bytes(session: Session) -> tuple[int, int]:
        """Bytes of a session in host memory and on disk."""
        host = sum(c.nbytes for c in session.holdings.copies.values() if c.place is Place.HOST)
        disk = sum(c.nbytes for c in session.holdings.copies.values() if c.place is Place.DISK)
        return host, disk
