"""The queue of sessions that wait for memory. Each session gets memory in its turn, or its request fails."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import OutOfMemoryError
from wooly_executor.flow import Readiness, Residence, Signal
from wooly_executor.memory.swap import PREEMPTING
from wooly_executor.post import Post
from wooly_executor.session import Session
from wooly_executor.vram.residents import Residents
from wooly_executor.vram.swapping import Swapping
from wooly_executor.vram.victims import Victims


@dataclass(eq=False, slots=True)
class MemoryRequest:
    """A request for a session's memory.

    Attributes:
        session: the session.
        since: time of the request, in ns.
        priority: class of the session.
        tried: it was already tried to keep the reserve for this request.
    """

    session: Session
    since: int
    priority: int
    tried: bool = False


class Waiting:
    """The requests for memory of a device.

    Args:
        residents: the sessions.
        victims: evicts sessions.
        swapping: swaps sessions in.
        dispatch: is told when a session's memory is there.
        patience_ns: time for which an allocation waits for other sessions to become idle before it fails.
        post: queue of events of sessions.

    Attributes:
        wants: requests by session.
        preempting: a request may get its memory when some session is between two programs.
    """

    def __init__(
        self,
        residents: Residents,
        victims: Victims,
        swapping: Swapping,
        dispatch: Dispatch,
        patience_ns: int,
        post: Post,
    ) -> None:
        self.wants: dict[str, MemoryRequest] = {}
        self.preempting = False
        self._residents, self._victims, self._swapping, self._dispatch = residents, victims, swapping, dispatch
        self._patience, self._post = patience_ns, post
        self._ledger, self._clock, self._policy = residents.ledger, residents.clock, residents.policy
        self._wake: int | None = None

    def ask(self, session: Session) -> None:
        """Request a session's memory."""
        if session.id not in self.wants and session.flow.residence is not Residence.COMING:
            self.wants[session.id] = MemoryRequest(session, self._clock(), self._residents.priority(session))
            self._residents.due = True

    def timeout(self) -> float | None:
        """Seconds until `arrange` should run again, because a session may have become eligible as a victim. None: no session
        waits.
        """
        if self._wake is None:
            return None
        return max(0.0, (self._wake - self._clock()) / 1e9)

    def arrange(self) -> None:
        """Serve the requests, the highest class first."""
        self._residents.due = self.preempting = False
        self._wake = None
        now = self._clock()
        for want in sorted(self.wants.values(), key=lambda w: (w.priority, w.since, w.session.id)):
            if want.session.id in self.wants and self._serve(want, now):
                return

    def _serve(self, want: MemoryRequest, now: int) -> bool:
        """Grant a request, or make room for it. Returns True if memory that becomes free is for this request, so that later
        requests must wait.
        """
        session, ledger = want.session, self._ledger
        if session.flow.residence in (Residence.LEAVING, Residence.PREEMPTED):
            return False  # it comes back when it has left
        extra = self._queued_need(session) if session.flow.run is not None else session.holdings.writing
        need = extra if session.flow.residence is Residence.HERE else ledger.needed(session.holdings.account) + extra
        if need > ledger.pool.capacity and session.flow.residence is not Residence.HERE:
            need -= extra
        if ledger.spare - need < self._policy.reserve:
            self._residents.drop_workspaces(session)
        short_of_reserve = need >= self._policy.large and ledger.spare - need < self._policy.reserve and not want.tried
        if ledger.spare >= need and not short_of_reserve:
            return self._grant(want)
        coming = self._residents.coming_free
        if coming and ledger.spare + coming >= need:
            return True
        want.tried = True
        if self._victims.make_room(need, session, now):
            return True
        if ledger.spare >= need:
            return self._grant(want)
        if session.flow.residence is Residence.HERE and now - session.holdings.lacking >= self._patience:
            self._give_up(want)
            return False
        self.preempting = self.preempting or (self._policy.preempt and want.priority <= PREEMPTING)
        self._schedule_wake(session, now)
        return False

    @staticmethod
    def _queued_need(session: Session) -> int:
        """Bytes that the submitted runs of a session need and have not reserved.

        These are the bytes of one run, or of all runs that were queued when the session was preempted.
        """
        return sum([frame.need for frame in session.flow.submitted_runs() if not frame.reserved])

    def _schedule_wake(self, session: Session, now: int) -> None:
        """Set the time at which another session will have been idle for long enough, or a full place may be used again."""
        times = [session.holdings.lacking + self._patience] if session.flow.residence is Residence.HERE else []
        for other in self._residents.sessions.values():
            if other is not session and other.holdings.swappable and other.flow.residence is Residence.HERE:
                since = self._residents.idle_since(other)
                if since is not None and since + self._policy.idle_ns > now:
                    times.append(since + self._policy.idle_ns)
        if (again := self._victims.again) is not None:
            times.append(again)
        if times:
            wake = max(min(times), now + 1_000_000)
            self._wake = wake if self._wake is None else min(self._wake, wake)

    def _give_up(self, want: MemoryRequest) -> None:
        """Fail a request. All sessions that could leave have had the time to do so."""
        session = want.session
        del self.wants[session.id]
        session.holdings.lacking = 0
        session.holdings.given_up = bool(session.holdings.writing)
        self._resume(session)

    def _resume(self, session: Session) -> None:
        """Let a session go on after its request was granted or has failed."""
        flow = session.flow
        if session.holdings.writing or flow.readiness is Readiness.MEMORY or flow.aside is not None:
            self._post.add(session, Signal.MEMORY_CAME)
        if not session.holdings.writing:
            self._dispatch.swapped_in(session)

    def _grant(self, want: MemoryRequest) -> bool:
        session, ledger = want.session, self._ledger
        if session.flow.residence is Residence.HERE:
            del self.wants[session.id]
            session.holdings.lacking = 0
            self._residents.promise(session)
            self._resume(session)
            return False
        try:
            stores = ledger.swap_in(session.holdings.account, self._clock())
        except OutOfMemoryError:  # enough bytes are free, but not in large enough extents
            self._schedule_wake(session, self._clock())
            return False
        del self.wants[session.id]
        self._residents.promise(session)
        self._swapping.bring(session, stores, want.priority, self._arrived)
        return False

    def _arrived(self, session: Session) -> None:
        """Continue a session whose memory is back. Its next program begins, or waits for its own room."""
        if self._next_has_room(session):
            session.holdings.lacking = 0  # it may have waited for room when it left
            self._dispatch.swapped_in(session)
        else:
            session.holdings.lacking = self._clock()
            self._dispatch.swapped_out(session)  # the core will ask again, for the room of the next program
        self._post.add(session, Signal.MEMORY_CAME)

    def _next_has_room(self, session: Session) -> bool:
        """Whether the submitted runs have their memory. A run may have arrived after the request."""
        self._residents.promise(session)
        need = self._queued_need(session)
        return not need or not self._residents.can_make_room(session, need)
