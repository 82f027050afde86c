"""The device's memory as the device loop sees it: who may begin, who must wait for room, who leaves for whom, who shares what.

The pure parts (`memory`) decide; this carries out, with the `mover` for what takes long. A session's memory is

    HERE --idle, and another needs the room--> LEAVING --> AWAY --its turn comes--> COMING --> HERE

A session that is LEAVING comes back at once when it has work: nothing was taken from it yet. A program is submitted to the
dispatch core when there is room for it, or alone: then the core is told that the session's memory is not there, and asks for it
when its turn comes. So whoever lacks memory is passed over, in the order of classes, and nobody else waits.

Owned by the device loop's thread.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from wooly_dispatch.overcommit import Commitment, headroom, promises
from wooly_wis.codec import DIGEST_SIZE
from wooly_wis.frames import Kind, unpack_run
from wooly_wis.messages import MemoryState, SessionMemory

from wooly_executor.contents import Contents, flat
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import OutOfMemoryError
from wooly_executor.memory.book import Scope
from wooly_executor.memory.ledger import Account, Ledger
from wooly_executor.memory.swap import Content, Place, Plan, Policy, Resident, Room, admit, choose
from wooly_executor.mover import Job, Loading, LoadJob, Mover, SaveJob, Saving
from wooly_executor.pins import Pins
from wooly_executor.runtime.device import HOST, TorchDevice
from wooly_executor.samples import Sample, Samples
from wooly_executor.session import Frame, Residence, Session
from wooly_executor.stowage import Pages, Stowage

log = logging.getLogger("wooly.executor")
#: The reserve is at most this share of the device.
RESERVE_SHARE = 8
#: Memory that was swapped and is kept to be used again, as a share of the device's.
PAGES_SHARE = 4
#: How often a reserve that could not be kept is tried again, ns.
RETRY_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class SwapSettings:
    """What an operator may set. Memory in bytes.

    Attributes:
        policy: reserve, what a large allocation is, how long a session must be idle.
        host: budget of pinned host memory.
        disk: budget of disk.
        folder: where swap files are.
        patience_ns: how long an allocation waits at least for others to become idle before it fails; otherwise as long as they
            must have been idle, since whoever has not been idle by then is not going to be.
    """

    policy: Policy = field(default_factory=Policy)
    host: int = 0
    disk: int = 0
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    patience_ns: int = 10_000_000_000


@dataclass(eq=False, slots=True)
class Want:
    """A session whose memory is asked for.

    Attributes:
        since: when it was, ns.
        priority: its class.
        tried: the reserve was tried for.
    """

    session: Session
    since: int
    priority: int
    tried: bool = False


class Vram:
    """The memory of one device.

    Args:
        capacity: bytes.
        dispatch: which sessions it may pass over.
        settings: of swapping.
        call: has a function run in the device loop's thread; from any thread.
        proceed: goes on with a session's frames.
        clock: monotonic ns.
        device: whose memory it is.
    """

    def __init__(
        self,
        capacity: int,
        dispatch: Dispatch,
        settings: SwapSettings,
        call: Callable[[Callable[[], None]], Any],
        proceed: Callable[[Session], None],
        clock: Callable[[], int] = time.monotonic_ns,
        device: TorchDevice = HOST,
    ) -> None:
        policy = settings.policy
        reserve = min(policy.reserve, capacity // RESERVE_SHARE)
        self.policy = Policy(reserve, policy.large, policy.idle_ns)
        self._patience = max(policy.idle_ns, settings.patience_ns)
        self.ledger = Ledger(capacity, reserve=reserve)
        host = Pages(capacity // PAGES_SHARE)
        self.pages = host if device.host else Pages(0, device)  # torch keeps what it has of a GPU's memory
        self.stowage = Stowage(settings.host, settings.disk, settings.folder, host)
        self.mover = Mover(device)
        self.clock = clock
        self.due = False
        self.overcommit_percent = 0
        self.swapped_out = self.swapped_in = 0
        self._dispatch, self._call, self._proceed = dispatch, call, proceed
        self._sessions: dict[str, Session] = {}
        self._wants: dict[str, Want] = {}
        self._leaving = 0  # bytes that will be free when those who leave have left
        self._choices = 0
        self._retry = 0
        self._wake: int | None = None
        self.contents = Contents(self.ledger, self.stowage, self.mover, clock, call, self._changed, proceed)
        self._samples = Samples(self.ledger, clock)
        self.pins = Pins(self.ledger, self.contents, self._samples, clock)
        dispatch.on_swap_in = self.ask

    @property
    def capacity(self) -> int:
        """Bytes of the device."""
        return self.ledger.pool.capacity

    def _changed(self) -> None:
        """There is room that was not there before."""
        self.due = self.due or bool(self._wants)

    def stop(self) -> None:
        """End the mover's thread."""
        self.mover.stop()

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(self, session: Session, tenant: str, scope: Scope) -> None:
        """A session is open."""
        now = self.clock()
        session.vram = self
        session.account = self.ledger.open(session.id, tenant=tenant, scope=scope, now=now)
        session.idle_since = now
        self._sessions[session.id] = session
        self._samples.open(session.account, now)

    def close(self, session: Session) -> None:
        """A session is over, wherever its memory was."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._wants.pop(session.id, None)
        self._samples.close(session.account, self.stowed(session))
        for job in session.sealing.values():
            job.cancelled = True
        session.sealing.clear()
        session.buried = True
        if session.job is not None:
            session.job.cancelled = True  # its blocks are free when nobody touches them any more
        else:
            self._bury(session)
        self.due = True

    def _bury(self, session: Session) -> None:
        self.contents.departed(self.ledger.close(session.account, self.clock()))
        for copy in session.copies.values():
            self.stowage.drop(copy)
        session.copies.clear()
        self.due = True

    def commitments(self) -> list[Commitment]:
        """What every session was promised; what is pinned stays, and counts as such."""
        found = [Commitment(s.id, s.promised, s.swappable) for s in self._sessions.values()]
        return found + [Commitment(p.name, self.ledger.book.has(p.name), False) for p in self.pins.accounts.values()]

    def quota(self, session_id: str, required: int | None, swappable: bool) -> int:
        """What a session that asks for so much, or for nothing in particular, may have.

        Raises:
            AdmissionError: it may not come; the message has the numbers.
        """
        admit(
            Commitment(session_id, required or 0, swappable), self.commitments(), self.capacity, self.overcommit_percent
        )
        if required is not None:
            return required
        promised = promises(self.commitments())
        if swappable or not promised.largest:
            return self.capacity - promised.fixed
        return headroom(promised, self.capacity, self.overcommit_percent, False)

    # -- programs ----------------------------------------------------------------------------------------------------

    def admit(self, session: Session, frame: Frame) -> bool:
        """Whether a run may be submitted to the dispatch core; if not, it is tried again when those before it are done."""
        ready = session.programs.get(bytes(frame.payload[:DIGEST_SIZE]))
        if ready is None:
            return True  # that is an error of its own
        need = ready.room
        if session.guarded:
            need += self.ledger.cost_of_writing(session.account, _written(frame, ready.written))
        residence = session.residence
        if residence is not Residence.HERE:
            if residence is Residence.LEAVING:
                self._stay(session)
            elif session.known:
                return False
            else:
                frame.need = need
                return True
        if not need:
            return True
        ledger = self.ledger
        if ledger.spare - need >= (self.policy.reserve if need >= self.policy.large else 0):
            ledger.reserve_for(session.account, need)
            frame.reserved = need
            return True
        return self._admit_tightly(session, frame, need, ready.peak_bytes)

    def _admit_tightly(self, session: Session, frame: Frame, need: int, peak: int) -> bool:
        if session.known:
            return False
        if session.bytes + peak > session.quota:
            return True  # it fails by itself, and nobody need leave for it
        ledger, now = self.ledger, self.clock()
        if ledger.spare - need < self.policy.reserve:
            self._drop_workspaces(session)
        if ledger.spare >= need:
            ledger.reserve_for(session.account, need)
            frame.reserved = need
            if need >= self.policy.large and ledger.spare < self.policy.reserve and now >= self._retry:
                self._retry = now + RETRY_NS
                self._make_room(self._choose(0, session, now, large=True), session)
            return True
        if not self._hopeful(session, need):
            return True
        frame.need = need
        session.lacking = now
        self._dispatch.swapped_out(session)
        return True

    def _hopeful(self, session: Session, need: int) -> bool:
        """Whether there could be room if all others that may leave did."""
        if session.id not in self._dispatch.state.sessions:
            return False  # frames in the order of their arrival: nobody can be passed over
        return self._room_without_others(session) >= need

    def _room_without_others(self, session: Session) -> int:
        """Bytes that would be free if all others that may leave did."""
        room = self.ledger.spare + self._leaving
        for other in self._sessions.values():
            if other is not session and other.swappable and other.residence in (Residence.HERE, Residence.COMING):
                room += self.ledger.pool.held(other.id) + self.ledger.book.bears(other.id) + other.account.reserved
        return room

    def begun(self, session: Session, frame: Frame) -> None:
        """A run begins: what was promised to it is its own to take."""
        if frame.reserved:
            self.ledger.unreserve(session.account, frame.reserved)
            frame.reserved = 0

    def idle(self, session: Session) -> None:
        """A session has nothing more to do."""
        session.idle_since = self.clock()
        if self._wants:
            self.due = True

    def present(self, session: Session) -> bool:
        """Whether the session's memory can be read and written now; if not, it is asked for, and `proceed` called then."""
        if session.residence is Residence.LEAVING:
            self._stay(session)
        if session.residence is Residence.HERE:
            return True
        self._want(session)
        return False

    def writable(self, session: Session, buffer: int) -> bool:
        """Whether the client may write a buffer now.

        If not, its session's memory or room for a copy is asked for, and `proceed` called then.
        """
        if not self.present(session):
            return False
        lacks = self.ledger.cost_of_writing(session.account, [buffer]) if buffer in session.guarded else 0
        if lacks > self.ledger.spare and not session.given_up:
            self._drop_workspaces(session)
            if lacks > self.ledger.spare and self._room_without_others(session) >= lacks:
                session.writing = lacks
                session.lacking = session.lacking or self.clock()
                self._want(session)
                return False
        if session.writing:
            session.writing = session.lacking = 0
            session.given_up = False
            self._wants.pop(session.id, None)
        return True

    # -- buffers -----------------------------------------------------------------------------------------------------

    def free(self, session: Session, buffers: Iterable[int]) -> None:
        """Some buffers are no more; those that are not known are ignored."""
        ledger, account = self.ledger, session.account
        own, give_back = account.own, ledger.pool.free
        now = self.clock()
        ledger.settle(account, now)
        plain = not session.guarded and not session.copies
        for buffer in buffers:
            offset = own.pop(buffer, None)
            if offset is not None:
                give_back(offset)
                if plain:
                    continue
            self._free_unusual(session, buffer, now)

    def _free_unusual(self, session: Session, buffer: int, now: int) -> None:
        """What is to be done where a buffer is shared, about to be, or away."""
        session.guarded.discard(buffer)
        job = session.sealing.pop(buffer, None)
        if job is not None:
            job.cancelled = True
        copy = session.copies.pop(buffer, None)
        if copy is not None:
            self.stowage.drop(copy)
        found = self.ledger.free(session.account, buffer, now)
        if found:
            self.contents.departed(found)

    # -- who comes and who leaves ------------------------------------------------------------------------------------

    def ask(self, session_id: str) -> None:
        """The dispatch core wants a session's memory: its turn has come."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._want(session)

    def _want(self, session: Session) -> None:
        if session.id not in self._wants and session.residence is not Residence.COMING:
            self._wants[session.id] = Want(session, self.clock(), self._priority(session))
            self.due = True

    def _priority(self, session: Session) -> int:
        found = self._dispatch.state.sessions.get(session.id)
        return found.policy.priority if found is not None else 2

    def timeout(self) -> float | None:
        """Seconds until somebody may have become idle for long enough that another waits for; None: nobody waits."""
        if self._wake is None:
            return None
        return max(0.0, (self._wake - self.clock()) / 1e9)

    def arrange(self) -> None:
        """See to those whose memory is asked for, the most urgent first."""
        self.due = False
        self._wake = None
        now = self.clock()
        for want in sorted(self._wants.values(), key=lambda w: (w.priority, w.since, w.session.id)):
            if want.session.id in self._wants and self._serve(want, now):
                return

    def _serve(self, want: Want, now: int) -> bool:
        """Grant what is wanted, or make room for it. True: the room that comes is for this one, and nobody after it."""
        session, ledger = want.session, self.ledger
        head = session.queue[0] if session.queue and session.queue[0].kind == Kind.RUN else None
        extra = head.need if head is not None else session.writing
        need = extra if session.residence is Residence.HERE else ledger.needed(session.account) + extra
        if need > self.capacity and session.residence is not Residence.HERE:
            need -= extra
        if ledger.spare - need < self.policy.reserve:
            self._drop_workspaces(session)
        short_of_reserve = need >= self.policy.large and ledger.spare - need < self.policy.reserve and not want.tried
        if ledger.spare >= need and not short_of_reserve:
            return self._grant(want, head, need)
        if self._leaving and ledger.spare + self._leaving >= need:
            return True
        want.tried = True
        if self._make_room(self._choose(need, session, now), session):
            return True
        if ledger.spare >= need:
            return self._grant(want, head, need)
        if session.residence is Residence.HERE and now - session.lacking >= self._patience:
            self._give_up(want)
            return False
        self._sleep(session, now)
        return False

    def _sleep(self, session: Session, now: int) -> None:
        """Look again when somebody will have been idle for long enough."""
        times = [session.lacking + self._patience] if session.residence is Residence.HERE else []
        for other in self._sessions.values():
            if other is not session and other.swappable and other.residence is Residence.HERE:
                since = self._idle_since(other)
                if since is not None and since + self.policy.idle_ns > now:
                    times.append(since + self.policy.idle_ns)
        if times:
            wake = max(min(times), now + 1_000_000)
            self._wake = wake if self._wake is None else min(self._wake, wake)

    def _give_up(self, want: Want) -> None:
        """Whoever may leave has had the time to: the allocation fails."""
        session = want.session
        del self._wants[session.id]
        session.lacking = 0
        session.given_up = bool(session.writing)
        self._there(session)

    def _there(self, session: Session) -> None:
        """What a session waited for has come, or will not: it goes on."""
        if session.writing:
            self._proceed(session)
        else:
            self._dispatch.swapped_in(session)

    def _grant(self, want: Want, head: Frame | None, need: int) -> bool:
        session, ledger = want.session, self.ledger
        promised = 0
        if head is not None and head.need:
            promised = min(head.need, need)
        if session.residence is Residence.HERE:
            del self._wants[session.id]
            session.lacking = 0
            self._promise(session, head, promised)
            self._there(session)
            return False
        try:
            stores = ledger.swap_in(session.account, self.clock())
        except OutOfMemoryError:  # there is room, but not in pieces that are large enough
            self._sleep(session, self.clock())
            return False
        del self._wants[session.id]
        if ledger.spare >= promised:
            self._promise(session, head, promised)
        session.residence = Residence.COMING
        pieces = [Loading(("own", b), copy) for b, copy in session.copies.items()]
        wanted = {*stores, *[s for s in session.account.shared.values() if s not in self.contents.here]}
        pieces += [Loading(("store", s), self.contents.copies[s]) for s in sorted(wanted) if s in self.contents.copies]

        def came(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._came(session, job, error))

        session.job = LoadJob(want.priority, came, pieces=pieces, pages=self.pages)
        self.mover.submit(session.job)
        return False

    def _promise(self, session: Session, head: Frame | None, nbytes: int) -> None:
        if head is not None and nbytes and not head.reserved:
            self.ledger.reserve_for(session.account, nbytes)
            head.reserved = nbytes

    def _came(self, session: Session, job: Job, error: Exception | None) -> None:
        assert isinstance(job, LoadJob)
        session.job = None
        if session.buried:
            self._bury(session)
            return
        lost: dict[int, str] = {}
        for piece in job.pieces:
            kind, key = piece.key  # type: ignore[misc]
            if kind == "own":
                known = session.buffers[key]
                known.base, known.view = piece.target, None
                if piece.target is None:
                    known.poison = piece.lost or f"it could not be brought back from where it was swapped to: {error}"
            elif piece.target is not None:
                self.contents.here.setdefault(key, piece.target)
            else:
                lost[key] = piece.lost or f"it could not be brought back from where it was swapped to: {error}"
        for buffer, store in session.account.shared.items():
            known = session.buffers[buffer]
            known.base, known.view = self.contents.here.get(store), None
            if known.base is None:
                known.poison = lost.get(store, "its content is lost")
        for copy in session.copies.values():
            self.stowage.drop(copy)
        session.copies.clear()
        session.residence = Residence.HERE
        session.idle_since = None if session.queue else self.clock()
        self.swapped_in += 1
        if session.spans is not None:
            session.spans.swapped("in", job.begun_ns, job.moved)
        log.info("session %s is back: %d bytes", session.id, job.moved)
        if self._next_has_room(session):
            self._dispatch.swapped_in(session)
        else:
            session.lacking = self.clock()
            self._dispatch.swapped_out(session)  # it will be asked for again, for what its next program needs
        self._proceed(session)

    def _next_has_room(self, session: Session) -> bool:
        """Whether the run that waits, which may have come after its session was asked for, has what it needs."""
        head = session.queue[0] if session.queue and session.queue[0].kind == Kind.RUN else None
        if head is None or not head.need or head.reserved:
            return True
        if self.ledger.spare >= head.need:
            self._promise(session, head, head.need)
            return True
        return not self._hopeful(session, head.need)

    # -- victims -----------------------------------------------------------------------------------------------------

    def _idle_since(self, session: Session) -> int | None:
        """Since when nothing of a session runs; who waits for memory does nothing either."""
        return session.lacking or session.idle_since

    def _choose(
        self, need: int, for_whom: Session, now: int, large: bool = False
    ) -> tuple[Plan, dict[int, tuple[Session, int]], list[str]]:
        """The policy's answer, whose own buffer each of its negative keys is, and who had been idle for long enough."""
        ledger, residents, owners, may = self.ledger, [], {}, []
        contents: dict[int, Content] = {}
        for session in self._sessions.values():
            if session.residence is not Residence.HERE:
                continue
            account = session.account
            busy = session is for_whom or session.job is not None or session.lending
            idle = None if busy else self._idle_since(session)
            keys = [*dict.fromkeys(account.shared.values())]
            for store in keys:
                contents[store] = Content(ledger.store_bytes(store), store in self.contents.copies)
            eligible = session.swappable and idle is not None and now - idle >= self.policy.idle_ns
            if eligible and not session.sealing:
                may.append(session.id)
                for buffer, offset in account.own.items():
                    key = -1 - offset
                    owners[key] = (session, buffer)
                    contents[key] = Content(ledger.pool.size(offset))
                    keys.append(key)
            swappable = session.swappable and not session.sealing
            residents.append(
                Resident(session.id, self._priority(session), idle, tuple(keys), swappable, session.chosen)
            )
        for pin in self.pins.accounts.values():
            stores = tuple(pin.shared.values())
            for store in stores:
                contents[store] = Content(ledger.store_bytes(store), store in self.contents.copies)
            residents.append(Resident(pin.name, 4, None, stores, False))
        free = self.stowage.free
        room = Room(ledger.spare + self._leaving, free(Place.HOST), free(Place.DISK))
        policy = self.policy
        if large:  # the allocation itself has its room: only the reserve is wanting
            policy = Policy(policy.reserve, 0, policy.idle_ns)
        return choose(need, now, room, residents, contents, policy), owners, may

    def _make_room(self, chosen: tuple[Plan, dict[int, tuple[Session, int]], list[str]], for_whom: Session) -> bool:
        """Have the plan's victims leave; whether there are any."""
        plan, owners, eligible = chosen
        if plan.short or not plan.victims:
            return False
        rest = [name for name in eligible if name not in plan.victims]
        log.info("room for %s: %s leave; %s could have", for_whom.id, self._named(plan.victims), self._named(rest))
        urgency = self._priority(for_whom)
        left: dict[str, list[tuple[object, Tensor, Place, int]]] = {name: [] for name in plan.victims}
        for move in plan.moves:
            if move.content < 0:
                session, buffer = owners[move.content]
                base = session.buffers[buffer].base
                if base is not None:  # what failed to be computed has no bytes
                    nbytes = session.buffers[buffer].nbytes
                    left[session.id].append((("own", buffer), flat(base, nbytes), move.to, nbytes))
            elif move.to is not Place.NOWHERE:
                last = [n for n in plan.victims if move.content in self._sessions[n].account.shared.values()][-1]
                source = self.contents.here[move.content]
                left[last].append((("store", move.content), source, move.to, len(source)))
        for name, blocks in left.items():
            self._choices += 1
            self._sessions[name].chosen = self._choices
            self._leave(self._sessions[name], blocks, urgency)
        return True

    def _named(self, names: Iterable[str]) -> str:
        return ", ".join([f"{name} (P{self._priority(self._sessions[name])})" for name in names]) or "nobody else"

    def _leave(self, session: Session, blocks: list[tuple[object, Tensor, Place, int]], urgency: int) -> None:
        file = None
        if any(to is Place.DISK for _, _, to, _ in blocks):
            try:
                file = self.stowage.open()
            except OSError as e:
                log.warning("session %s stays: nothing can be swapped to disk: %s", session.id, e)
                self.stowage.full(Place.DISK)
                self.due = True
                return
        pieces = [Saving(key, source, self.stowage.take(to, n, file)) for key, source, to, n in blocks]
        session.residence = Residence.LEAVING
        session.leaving_bytes = self.ledger.pool.held(session.id)
        self._leaving += session.leaving_bytes

        def left(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._left(session, job, error))

        session.job = SaveJob(urgency, left, pieces=pieces)
        self.mover.submit(session.job)

    def _stay(self, session: Session) -> None:
        """A session that leaves has work: it has lost nothing yet, and stays."""
        if session.job is not None:
            session.job.cancelled = True
        session.residence = Residence.HERE
        self._leaving -= session.leaving_bytes
        session.leaving_bytes = 0

    def _left(self, session: Session, job: Job, error: Exception | None) -> None:
        assert isinstance(job, SaveJob)
        if session.job is job:
            session.job = None
        if session.residence is Residence.LEAVING:
            self._leaving -= session.leaving_bytes
            session.leaving_bytes = 0
        if session.buried or job.cancelled or error is not None:
            for piece in job.pieces:
                self.stowage.drop(piece.copy)
            if session.buried:
                self._bury(session)
            elif error is not None and not job.cancelled:
                session.residence = Residence.HERE
                self._failed_to_leave(session, job, error)
            self.due = True
            return
        account = session.account
        saved = {piece.key: piece for piece in job.pieces}
        more = [
            s for s in self.ledger.sole_stores(account) if ("store", s) not in saved and s not in self.contents.copies
        ]
        for piece in job.pieces:
            kind, key = piece.key  # type: ignore[misc]
            if kind == "own":
                if key in account.own:
                    session.copies[key] = piece.copy
                else:
                    self.stowage.drop(piece.copy)
            elif key in self.contents.here and key not in self.contents.copies:
                self.contents.copies[key] = piece.copy
            else:
                self.stowage.drop(piece.copy)
        for buffer in account.own:
            known = session.buffers.get(buffer)
            if known is not None:
                if known.base is not None:
                    self.pages.give(known.base)
                known.base, known.view = None, None
        for buffer in account.shared:
            session.buffers[buffer].base = session.buffers[buffer].view = None
        for leaving in self.ledger.swap_out(account, self.clock()):
            if leaving.store in more:  # whoever shared it has gone since: it follows
                self.contents.orphan(leaving)
            else:
                self.pages.give(self.contents.here.pop(leaving.store))
        session.residence = Residence.AWAY
        self.swapped_out += 1
        session.swaps += 1
        if session.spans is not None:
            session.spans.swapped("out", job.begun_ns, job.moved)
        log.info("session %s is swapped out: %d bytes", session.id, job.moved)
        self._dispatch.swapped_out(session)
        self.due = True

    def _failed_to_leave(self, session: Session, job: SaveJob, error: Exception) -> None:
        log.warning("session %s stays: it could not be swapped out: %s", session.id, error)
        if isinstance(error, OSError):
            self.stowage.full(Place.DISK)

    def _drop_workspaces(self, but: Session) -> None:
        """Take back what sessions keep between programs."""
        for session in self._sessions.values():
            if session.account.workspace and session is not but and not session.running:
                self.ledger.settle(session.account, self.clock())
                self.ledger.drop_workspace(session.account)

    # -- figures -----------------------------------------------------------------------------------------------------

    def stats(self, session: Session) -> dict[str, int]:
        """What a session may know of its memory. Bytes."""
        ledger, account = self.ledger, session.account
        held, part = ledger.pool.held(session.id), ledger.book.bears(session.id)
        others = sum(
            ledger.pool.held(s.id) + ledger.book.bears(s.id)
            for s in self._sessions.values()
            if s is not session and s.swappable and s.residence is Residence.HERE
        )
        return {
            "reserved_bytes": held + ledger.book.has(session.id),
            "reserved_peak_bytes": account.peak + ledger.book.has(session.id),
            "own_bytes": held,
            "shared_bytes": part,
            "workspace_bytes": account.workspace,
            "available_bytes": max(0, min(session.quota - session.bytes, ledger.spare + others)),
            "quota_bytes": session.quota,
            "out_of_memory": account.ooms,
            "sealing": len(session.sealing),
        }

    def stowed(self, session: Session) -> tuple[int, int]:
        """Bytes of a session in host memory and on disk."""
        host = sum(c.nbytes for c in session.copies.values() if c.place is Place.HOST)
        disk = sum(c.nbytes for c in session.copies.values() if c.place is Place.DISK)
        return host, disk

    def check(self) -> None:
        """Prove that the accounts, the bytes on the device and the copies elsewhere tell one story.

        Raises:
            AssertionError: they do not.
        """
        ledger, stowage = self.ledger, self.stowage
        ledger.check()
        coming = any(s.residence is Residence.COMING for s in self._sessions.values())
        for store in ledger.stores():
            assert store in self.contents.here or coming, f"store {store} has a block and no bytes"
        assert set(self.contents.here) <= set(ledger.stores()), "bytes without a block"
        moving = [s.job for s in self._sessions.values() if s.job is not None]
        if not moving:
            copies = [*self.contents.copies.values(), *[c for s in self._sessions.values() for c in s.copies.values()]]
            for place, used in stowage.used.items():
                assert used >= sum(c.nbytes for c in copies if c.place is place), (
                    f"copies in {place} that nobody pays for"
                )
        for session in self._sessions.values():
            away = session.residence in (Residence.AWAY, Residence.COMING)
            assert away or not session.copies, f"{session.id} is here and has copies elsewhere"
            if session.residence is Residence.HERE:
                for buffer, store in session.account.shared.items():
                    base = session.buffers[buffer].base
                    known = self.contents.here[store]
                    assert base is None or base.untyped_storage().data_ptr() == known.untyped_storage().data_ptr()

    def state(self) -> MemoryState:
        """Where every byte of the device is, and whose."""
        facts, promised, stowage = self.ledger.facts(), promises(self.commitments()), self.stowage
        return MemoryState(
            capacity=facts.capacity,
            own=facts.own,
            contents=facts.contents,
            slots=facts.slots,
            reserve=facts.reserve,
            free=facts.free,
            host=stowage.used[Place.HOST],
            host_budget=stowage.used[Place.HOST] + stowage.free(Place.HOST),
            disk=stowage.used[Place.DISK],
            disk_budget=stowage.used[Place.DISK] + stowage.free(Place.DISK),
            overcommit_percent=self.overcommit_percent,
            fixed=promised.fixed,
            movable=promised.movable,
            largest=promised.largest,
            swapped_out=self.swapped_out,
            swapped_in=self.swapped_in,
            sessions=tuple(
                [*map(self._memory_of, self._sessions.values()), *map(self._pinned, self.pins.accounts.values())][:1000]
            ),
        )

    def _memory_of(self, session: Session) -> SessionMemory:
        host, disk = self.stowed(session)
        return SessionMemory(
            session_id=session.id,
            tenant=session.account.tenant,
            own=self.ledger.pool.held(session.id),
            shared=self.ledger.book.bears(session.id),
            host=host,
            disk=disk,
            promised=session.promised,
            swappable=session.swappable,
            residence=session.residence.value,
            swaps=session.swaps,
        )

    def _pinned(self, pin: Account) -> SessionMemory:
        book = self.ledger.book
        return SessionMemory(
            session_id=pin.name,
            tenant=pin.tenant,
            shared=book.bears(pin.name),
            promised=book.has(pin.name),
            swappable=False,
        )

    def samples(self) -> list[Sample]:
        """What every session and pin bore since it was last asked, those that ended included."""
        sessions = [(s.account, self.stowed(s)) for s in self._sessions.values()]
        return self._samples.take([*sessions, *[(pin, (0, 0)) for pin in self.pins.accounts.values()]])


def _written(frame: Frame, slots: frozenset[int]) -> list[int]:
    try:
        bindings = unpack_run(frame.payload).bindings
    except Exception:
        return []  # that is an error of its own
    return [bindings[slot] for slot in slots if slot < len(bindings)]
