"""The sessions of a device: the memory that each has, was promised, and could give up."""

from __future__ import annotations

from collections.abc import Callable

from wooly_dispatch.overcommit import Commitment, counted

from wooly_executor.dispatch import Dispatch
from wooly_executor.flow import Residence
from wooly_executor.memory.ledger import Ledger
from wooly_executor.memory.swap import Place, Policy, may_take
from wooly_executor.session import Session
from wooly_executor.weights.contents import Contents
from wooly_executor.weights.pinned_weights import PinnedWeights


class Residents:
    """The sessions of one device.

    Args:
        ledger: the accounts.
        policy: the reserve, the size of a large allocation, the required idle time.
        dispatch: knows the sessions' classes.
        contents: shared contents.
        pins: pinned weights.
        clock: returns monotonic ns.

    Attributes:
        sessions: by id.
        leaving: bytes that become free when the sessions in LEAVING have left. `coming_free` has those of contents, too.
        due: there may be new room, or a new victim, so `arrange` has work.
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

    @property
    def coming_free(self) -> int:
        """Bytes that become free without further evictions."""
        return self.leaving + self.contents.leaving

    def priority(self, session: Session) -> int:
        """The class of a session."""
        found = self._dispatch.state.sessions.get(session.id)
        return found.policy.priority if found is not None else 2

    def idle_since(self, session: Session) -> int | None:
        """Since when the session has been idle, monotonic ns; None: it works. A session that waits for memory, or at a collective
        for other ranks, counts as idle.
        """
        holdings, flow = session.holdings, session.flow
        if flow.aside is None or holdings.lacking:
            return holdings.lacking or holdings.idle_since
        return (holdings.parked or None) if flow.parked else None

    def between_programs(self, session: Session) -> bool:
        """Whether nothing uses the session's memory now, although it may have queued programs.

        While a client uploads, the bytes go straight to a buffer; then the session has work, but no frames.
        """
        flow, holdings, launch = session.flow, session.holdings, self._dispatch.launch
        return (
            flow.residence is Residence.HERE
            and not flow.running
            and not flow.lent
            and flow.current is None
            and not holdings.jobs
            and session.finish_upload is None
            and (launch is None or launch.session != session.id)
            and self._dispatch.going != session.id
            and (holdings.idle_since is not None or bool(flow.inbox.frames) or flow.aside is not None)
        )

    def give_back(self, session: Session) -> None:
        """Give back what the queued runs of a session have reserved. They need it again when the session's memory is back."""
        for frame in session.flow.submitted_runs():
            if frame.reserved:
                self.ledger.unreserve(session.holdings.account, frame.reserved)
                frame.need, frame.reserved = frame.reserved, 0

    def commitments(self) -> list[Commitment]:
        """What all sessions count against the device's promises. Pinned weights count as promises that cannot be swapped."""
        found = [Commitment(s.id, self.counted(s), s.holdings.swappable) for s in self.sessions.values()]
        return found + self._pinned()

    def declarations(self) -> list[Commitment]:
        """The promises to the sessions that declared a size, and to pinned weights."""
        found = [Commitment(s.id, s.holdings.declared or 0, s.holdings.swappable) for s in self.sessions.values()]
        return found + self._pinned()

    def _pinned(self) -> list[Commitment]:
        return [Commitment(p.name, self.ledger.book.has(p.name), False) for p in self.pins.accounts.values()]

    def counted(self, session: Session) -> int:
        """The bytes with which a session counts against the device's promises."""
        used = self.ledger.pool.held(session.id) + self.ledger.book.bears(session.id)
        return counted(session.holdings.declared, session.holdings.claim, used + sum(self.swapped_bytes(session)))

    def can_make_room(self, session: Session, need: int) -> bool:
        """Whether `need` bytes would be free for a session if all others left that may have to leave for it."""
        if session.id not in self._dispatch.state.sessions:
            return False  # in order of arrival, no session can be passed over
        return self.room_without_others(session) >= need

    def room_without_others(self, session: Session) -> int:
        """Bytes that would be free if all other sessions left that may have to leave for this one."""
        room, priority = self.ledger.spare + self.coming_free, self.priority(session)
        for other in self.sessions.values():
            if (
                other is not session
                and other.holdings.swappable
                and may_take(priority, self.priority(other))
                and other.flow.residence in (Residence.HERE, Residence.COMING)
            ):
                room += (
                    self.ledger.pool.held(other.id) + self.ledger.book.bears(other.id) + other.holdings.account.reserved
                )
        return room

    def promise(self, session: Session) -> None:
        """Reserve memory for the submitted runs of a session, in their order, as far as there is enough."""
        for frame in session.flow.submitted_runs():
            if frame.need and not frame.reserved:
                if frame.need > self.ledger.spare:
                    return
                self.ledger.reserve_for(session.holdings.account, frame.need)
                frame.reserved = frame.need

    def drop_workspaces(self, except_for: Session) -> None:
        """Free the workspaces that other sessions keep between programs."""
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
