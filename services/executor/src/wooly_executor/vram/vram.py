"""The device's memory, for the device loop: whether a session may open, a program may begin, a buffer may be written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from wooly_bus.host import spare
from wooly_dispatch.overcommit import Commitment, counted, promises
from wooly_wis.frames import unpack_run
from wooly_wis.messages import MemoryState

from wooly_executor.billing.memory_samples import MemorySample, MemorySamples
from wooly_executor.dispatch import Dispatch
from wooly_executor.flow import Residence
from wooly_executor.frames import Frame
from wooly_executor.holdings import Holdings
from wooly_executor.ipc import IpcBuffers
from wooly_executor.memory.accounts import Account
from wooly_executor.memory.book import Scope
from wooly_executor.memory.ledger import Ledger
from wooly_executor.memory.swap import admit
from wooly_executor.mover import PIECE, Mover
from wooly_executor.post import Post
from wooly_executor.programs import ReadyProgram
from wooly_executor.runtime.device import HOST, TorchDevice
from wooly_executor.session import Session
from wooly_executor.swap_space import Pages, SwapSpace
from wooly_executor.vram.figures import check, state_of, stats_of
from wooly_executor.vram.residents import Residents
from wooly_executor.vram.settings import SwapSettings
from wooly_executor.vram.swapping import Swapping
from wooly_executor.vram.victims import Victims
from wooly_executor.vram.waiting import Waiting
from wooly_executor.weights.contents import Contents
from wooly_executor.weights.pinned_files import PinnedFiles
from wooly_executor.weights.pinned_weights import PinnedWeights

#: Maximum reserve, as a fraction of the device: one part in so many.
RESERVE_SHARE = 8
#: Memory that is kept for reuse, as a fraction of the device, or of the budget of locked host memory: one part in so many.
PAGES_SHARE = 4
#: Minimum time, in ns, between two attempts to restore the reserve.
RETRY_NS = 100_000_000
#: Members of enumerations on the way of every run: looked up on its class, a member costs as much as a call.
_HERE = Residence.HERE
_LEAVING = Residence.LEAVING


class Vram:
    """The memory of one device.

    Args:
        capacity: bytes of the device.
        dispatch: knows which sessions the core can pass over.
        settings: settings of swapping.
        call: runs a function in the device loop's thread; any thread may use it.
        tell: as `call`, but without a result: an error ends the device loop.
        post: queue of events of sessions.
        clock: returns monotonic ns.
        device: the device.
        settle: waits until the device has done all work of finished runs.
        pinned: where pinned weights are saved; None: nowhere.
    """

    def __init__(
        self,
        capacity: int,
        dispatch: Dispatch,
        settings: SwapSettings,
        call: Callable[[Callable[[], None]], Any],
        tell: Callable[[Callable[[], None]], None],
        post: Post,
        clock: Callable[[], int] = time.monotonic_ns,
        device: TorchDevice = HOST,
        settle: Callable[[], None] = lambda: None,
        pinned: PinnedFiles | None = None,
    ) -> None:
        given = settings.policy
        reserve = min(given.reserve, capacity // RESERVE_SHARE)
        self.policy = policy = replace(given, reserve=reserve)
        self.ledger = Ledger(capacity, reserve=reserve)
        self.clock = clock
        self.overcommit_percent = 0
        # if host memory is locked, kept pages count against its budget, and copies to files need a few pages
        kept = capacity // PAGES_SHARE if device.host else max(settings.host // PAGES_SHARE, 2 * PIECE)
        host = Pages(kept, device.host_memory)
        pages = host if device.host else Pages(0, device.copy_target)  # torch itself reuses a GPU's memory
        self.swap_space = SwapSpace(
            settings.host, settings.disk, settings.folder, host, in_place=device.host, clock=clock
        )
        self.mover = Mover(device)
        self.contents = Contents(self.ledger, self.swap_space, self.mover, clock, tell, self.changed, post)
        self._samples = MemorySamples(self.ledger, clock)
        self.pins = PinnedWeights(self.ledger, self.contents, self._samples, clock, pinned, call, device)
        self._residents = Residents(self.ledger, policy, dispatch, self.contents, self.pins, clock)
        self._sessions = self._residents.sessions
        self.ipc = IpcBuffers(self.ledger, self.contents, clock, self._require_room_to_stay)
        self._swapping = Swapping(self._residents, self.swap_space, pages, self.mover, dispatch, tell, self.ipc)
        self._victims = Victims(self._residents, self._swapping, self.swap_space, settle)
        patience = max(policy.idle_ns, settings.patience_ns)
        self._waiting = Waiting(self._residents, self._victims, self._swapping, dispatch, patience, post)
        self._dispatch = dispatch
        self._of_machine = device.host
        self._retry = 0

    @property
    def capacity(self) -> int:
        """Bytes of the device."""
        return self.ledger.pool.capacity

    @property
    def due(self) -> bool:
        """Whether `arrange` has something to do."""
        return self._residents.due

    def changed(self) -> None:
        """Note that memory has become free, or that a session may leave the device that could not before."""
        if self._waiting.wants:
            self._residents.due = True

    def stop(self) -> None:
        """End the mover's thread."""
        self.mover.stop()

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(
        self, session_id: str, tenant: str, scope: Scope, *, swappable: bool, declared: int | None, claim: int = 0
    ) -> Holdings:
        """Create the empty holdings of a new session. `enter` follows.

        Args:
            session_id: its id.
            tenant: its tenant.
            scope: with whom it shares contents.
            swappable: it may be swapped out.
            declared: bytes that it declares; None: no declaration.
            claim: bytes with which it counts at least without a declaration.
        """
        now = self.clock()
        account = self.ledger.open(session_id, tenant=tenant, scope=scope, now=now)
        self._samples.open(account, now)
        return Holdings(account, swappable, declared, claim, idle_since=now)

    def enter(self, session: Session) -> None:
        """Register a session that is open."""
        self._sessions[session.id] = session

    def borne(self, account: Account, now: int) -> tuple[int, int]:
        """The device memory that an account is charged for: bytes now, and the integral in bytes times ns."""
        return self.ledger.borne(account, now)

    def close(self, session: Session) -> None:
        """Free the memory of a session that has ended, on the device and elsewhere."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._waiting.wants.pop(session.id, None)
        self._samples.close(session.holdings.account, self._residents.swapped_bytes(session))
        for job in session.holdings.sealing.values():
            job.cancel()
        session.holdings.sealing.clear()
        session.holdings.closed = True
        for job in session.holdings.jobs:
            job.cancelled = True  # the blocks become free when the last one has ended
        self._swapping.release(session)
        self._residents.due = True

    def quota(self, session_id: str, required: int | None, swappable: bool, claim: int = 0) -> int:
        """The quota of a new session that declares `required` bytes, or None; then it counts with `claim` bytes.

        The quota of a session without a declaration is the memory that is not promised to sessions with one.

        Raises:
            AdmissionError: the session is refused. The message has the numbers.
        """
        asked = Commitment(session_id, counted(required, claim, 0), swappable)
        admit(asked, self._residents.commitments(), self.capacity, self.overcommit_percent)
        if required is not None:
            return required
        promised = promises(self._residents.declarations())
        return self.capacity - promised.fixed - (0 if swappable else promised.movable)

    def _require_room_to_stay(self, session: Session) -> None:
        """Check that a session may stay on the device from now on, although it was admitted as one that can be swapped out.

        Raises:
            AdmissionError: the memory is promised to other sessions. The message has the numbers.
        """
        asked = Commitment(session.id, self._residents.counted(session), swappable=False)
        others = [c for c in self._residents.commitments() if c.session != session.id]
        admit(asked, others, self.capacity, self.overcommit_percent)

    def release(self, session: Session) -> None:
        """Free the memory of a session that has ended while a job used it, after the end of a job: see `Swapping.release`."""
        self._swapping.release(session)

    def priority(self, session: Session) -> int:
        """The class of a session."""
        return self._residents.priority(session)

    # -- programs ----------------------------------------------------------------------------------------------------

    def admit(self, session: Session, frame: Frame, ready: ReadyProgram | None) -> bool:
        """Whether a run may be submitted to the dispatch core now. If not, the caller tries again when the runs before it have
        ended.
        """
        if ready is None:
            return True  # the run fails later with its own error
        need = ready.room
        if session.holdings.guarded:
            need += self.ledger.cost_of_writing(session.holdings.account, _written(frame, ready.written))
        residence = session.flow.residence
        if residence is not _HERE:
            if residence is _LEAVING:
                self._swapping.stay(session)
            elif session.flow.inbox.submitted:
                return False
            else:
                frame.need = need
                return True
        if not need:
            return True
        ledger = self.ledger
        if ledger.spare - need >= (self.policy.reserve if need >= self.policy.large else 0):
            ledger.reserve_for(session.holdings.account, need)
            frame.reserved = need
            return True
        return self._admit_tightly(session, frame, need, ready.peak_bytes)

    def _admit_tightly(self, session: Session, frame: Frame, need: int, peak: int) -> bool:
        if session.flow.inbox.submitted:
            return False
        if session.held_bytes + peak > session.quota:
            return True  # the run exceeds its quota and will fail, so no session need leave
        ledger, now = self.ledger, self.clock()
        if ledger.spare - need < self.policy.reserve:
            self._residents.drop_workspaces(session)
        if ledger.spare >= need:
            ledger.reserve_for(session.holdings.account, need)
            frame.reserved = need
            if need >= self.policy.large and ledger.spare < self.policy.reserve and now >= self._retry:
                self._retry = now + RETRY_NS
                self._victims.restore_reserve(session, now)
            return True
        if not self._residents.can_make_room(session, need):
            return True
        frame.need = need
        session.holdings.lacking = now
        self._dispatch.swapped_out(session)
        return True

    def begun(self, session: Session, frame: Frame) -> None:
        """Release the reservation of a run that begins: the run allocates this memory now."""
        if frame.reserved:
            self.ledger.unreserve(session.holdings.account, frame.reserved)
            frame.need = frame.reserved = 0

    @property
    def preempting(self) -> bool:
        """Whether a request may get its memory when some session is between two programs."""
        return self._waiting.preempting

    def run_ended(self) -> None:
        """Note that a run has ended, before the core decides the next launch: its session may be preempted now."""
        if self._waiting.preempting:
            self._waiting.arrange()

    def idle(self, session: Session) -> None:
        """Note that a session has no more work."""
        session.holdings.idle_since = self.clock()
        if self._waiting.wants:
            self._residents.due = True

    def present(self, session: Session) -> bool:
        """Whether the session's memory is on the device. If not, the memory is requested, and the event MEMORY_CAME follows."""
        if session.flow.residence is _LEAVING:
            self._swapping.stay(session)
        if session.flow.residence is _HERE:
            return True
        self._waiting.ask(session)
        return False

    def writable(self, session: Session, buffer: int) -> bool:
        """Whether the client may write a buffer now.

        If not, the session's memory or room for a copy is requested, and the event MEMORY_CAME follows.
        """
        if not self.present(session):
            return False
        guarded = buffer in session.holdings.guarded
        return self.room_for(session, self.ledger.cost_of_writing(session.holdings.account, [buffer]) if guarded else 0)

    def room_for(self, session: Session, nbytes: int) -> bool:
        """Whether a session whose memory is here may take more bytes now, or will not get them.

        If not, room is requested, and the event MEMORY_CAME follows.
        """
        if nbytes > self.ledger.spare and not session.holdings.given_up:
            self._residents.drop_workspaces(session)
            if nbytes > self.ledger.spare and self._residents.room_without_others(session) >= nbytes:
                session.holdings.writing = nbytes
                session.holdings.lacking = session.holdings.lacking or self.clock()
                self._waiting.ask(session)
                return False
        if session.holdings.writing:
            session.holdings.writing = session.holdings.lacking = 0
            session.holdings.given_up = False
            self._waiting.wants.pop(session.id, None)
        return True

    # -- buffers -----------------------------------------------------------------------------------------------------

    def free(self, session: Session, buffers: Iterable[int]) -> None:
        """Free buffers. Unknown ids are ignored."""
        ledger, account = self.ledger, session.holdings.account
        own, give_back = account.own, ledger.pool.free
        now = self.clock()
        ledger.settle(account, now)
        plain = not session.holdings.guarded and not session.holdings.copies
        for buffer in buffers:
            offset = own.pop(buffer, None)
            if offset is not None:
                give_back(offset)
                if plain:
                    continue
            self._free_shared_or_away(session, buffer, now)

    def _free_shared_or_away(self, session: Session, buffer: int, now: int) -> None:
        """Free a buffer that may be shared, in hashing, or swapped out."""
        session.holdings.guarded.discard(buffer)
        job = session.holdings.sealing.pop(buffer, None)
        if job is not None:
            job.cancel()
        copy = session.holdings.copies.pop(buffer, None)
        if copy is not None:
            self.swap_space.drop(copy)
        if buffer in session.holdings.ipc:
            self.ipc.free(session, buffer)
            return
        found = self.ledger.free(session.holdings.account, buffer, now)
        if found:
            self.contents.drop_released(found)

    # -- requests for memory -----------------------------------------------------------------------------------------

    def ask(self, session_id: str) -> None:
        """Request a session's memory, because its turn in the dispatch core has come."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._waiting.ask(session)

    def timeout(self) -> float | None:
        """Seconds until `arrange` should run again, because a session may have become eligible as a victim. None: no session
        waits.
        """
        wait, again = self._waiting.timeout(), self.contents.again
        if again is None:
            return wait
        left = max(0.0, (again - self.clock()) / 1e9)
        return left if wait is None else min(wait, left)

    def arrange(self) -> None:
        """Serve the sessions that wait for memory, the highest class first."""
        self.contents.copy_orphans()
        self._waiting.arrange()

    # -- figures -----------------------------------------------------------------------------------------------------

    def stats(self, session: Session, wanted: int) -> dict[str, Any]:
        """The figures that a session may know of its memory, in bytes.

        Args:
            session: the session.
            wanted: bytes that it wants to allocate. If they are not there, the key "shortage" has the error's text.

        Returns:
            The figures. If nothing is wanted, and the device's memory is the machine's, the key "machine_bytes" has what other
            processes leave of it.
        """
        found = stats_of(session, self._residents, wanted)
        left = spare() if self._of_machine and not wanted else None
        return found if left is None else found | {"machine_bytes": left}

    def check(self) -> None:
        """Check that the accounts, the bytes on the device and the copies elsewhere agree.

        Raises:
            AssertionError: they disagree.
        """
        check(self._residents, self.swap_space)
        self.ipc.check(self._sessions.values())

    def state(self) -> MemoryState:
        """Where every byte of the device is, and which session has it."""
        return state_of(self._residents, self.swap_space, self._swapping, self.overcommit_percent)

    def samples(self) -> list[MemorySample]:
        """The charges of every session and pin since the last call, closed ones included."""
        sessions = [(s.holdings.account, self._residents.swapped_bytes(s)) for s in self._sessions.values()]
        return self._samples.take([*sessions, *[(pin, (0, 0)) for pin in self.pins.accounts.values()]])


def _written(frame: Frame, slots: frozenset[int]) -> list[int]:
    try:
        bindings = unpack_run(frame.payload).bindings
    except Exception:
        return []  # the run fails later with its own error
    return [bindings[slot] for slot in slots if slot < len(bindings)]
