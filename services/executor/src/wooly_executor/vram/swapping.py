"""Copies the memory of sessions off the device and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from wooly_executor.dispatch import Dispatch
from wooly_executor.flow import Residence, Signal, note
from wooly_executor.ipc import IpcBuffers
from wooly_executor.memory.swap import Place
from wooly_executor.mover import Job, Loading, LoadJob, Mover, SaveJob, Saving
from wooly_executor.session import Session
from wooly_executor.swap_space import Pages, SwapSpace
from wooly_executor.vram.residents import Residents

log = logging.getLogger("wooly.executor")


class Swapping:
    """Swaps sessions out and in.

    Args:
        residents: the sessions.
        swap_space: holds the copies.
        pages: the device's memory for reuse.
        mover: copies the bytes.
        dispatch: is told when a session's memory has left.
        call: runs a function in the device loop's thread; any thread may use it.
        ipc: the buffers that sessions share for writing.

    Attributes:
        swapped_out: number of swap-outs.
        swapped_in: number of swap-ins.
    """

    def __init__(
        self,
        residents: Residents,
        swap_space: SwapSpace,
        pages: Pages,
        mover: Mover,
        dispatch: Dispatch,
        call: Callable[[Callable[[], None]], Any],
        ipc: IpcBuffers,
    ) -> None:
        self._ipc = ipc
        self._residents, self._swap_space, self._pages, self._mover = residents, swap_space, pages, mover
        self._dispatch, self._call = dispatch, call
        self._ledger, self._contents = residents.ledger, residents.contents
        self.swapped_out = self.swapped_in = 0

    # -- out ---------------------------------------------------------------------------------------------------------

    def leave(
        self, session: Session, blocks: list[tuple[tuple[str, int], Tensor, Place, int]], urgency: int, how: Signal
    ) -> None:
        """Start to swap a session out.

        Args:
            session: the victim.
            blocks: per block: key, bytes, target place, size.
            urgency: class of the session that needs the room.
            how: LEAVING; or PREEMPTED, if the session leaves although it has work or may get work at any time.
        """
        file = None
        if any(to is Place.DISK for _, _, to, _ in blocks):
            try:
                file = self._swap_space.open()
            except OSError as e:
                log.warning(
                    "session %s stays on the device, because no swap file can be created: %s; check WOOLY_EXECUTOR_SWAP_DIR",
                    session.id,
                    e,
                )
                self._swap_space.full(Place.DISK)
                self._residents.due = True
                return
        pieces = [Saving(key, source, self._swap_space.take(to, n, file)) for key, source, to, n in blocks]
        note(session.flow, how)
        if how is Signal.PREEMPTED:  # from now on, the core passes its queued runs over
            self._residents.give_back(session)
            self._dispatch.swapped_out(session)
        session.holdings.leaving_bytes = self._ledger.pool.held(session.id)
        self._residents.leaving += session.holdings.leaving_bytes

        def left(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._saved(session, job, error))

        self._begin(session, SaveJob(urgency, left, pieces=pieces))

    def stay(self, session: Session) -> None:
        """Cancel the swap-out of a session that has work. Its memory is still on the device."""
        for job in session.holdings.jobs:
            job.cancelled = True
        note(session.flow, Signal.STAYED)
        self._residents.leaving -= session.holdings.leaving_bytes
        session.holdings.leaving_bytes = 0

    def _saved(self, session: Session, job: Job, error: Exception | None) -> None:
        assert isinstance(job, SaveJob)
        pieces, job.pieces = job.pieces, []
        session.holdings.jobs.remove(job)
        if session.flow.residence in (Residence.LEAVING, Residence.PREEMPTED):
            self._residents.leaving -= session.holdings.leaving_bytes
            session.holdings.leaving_bytes = 0
        if session.holdings.closed or job.cancelled or error is not None:
            for piece in pieces:
                self._swap_space.drop(piece.copy)
            if session.holdings.closed:
                self.release(session)
            elif error is not None and not job.cancelled:
                note(session.flow, Signal.STAYED)
                self._failed_to_leave(session, error, job.place)
            self._residents.due = True
            return
        self._keep_copies(session, pieces)
        note(session.flow, Signal.LEFT)
        self.swapped_out += 1
        session.holdings.swaps += 1
        if session.spans is not None:
            session.spans.swapped("out", job.begun_ns, job.moved)
        log.info("session %s is swapped out: %d bytes", session.id, job.moved)
        self._dispatch.swapped_out(session)
        self._residents.due = True

    def _keep_copies(self, session: Session, pieces: list[Saving]) -> None:
        """Make the copies the session's memory, and free its memory on the device."""
        account = session.holdings.account
        saved = {piece.key for piece in pieces}
        more = [
            s for s in self._ledger.sole_stores(account) if ("store", s) not in saved and s not in self._contents.copies
        ]
        for piece in pieces:
            kind, key = piece.key
            if kind == "own":
                if key in account.own:
                    session.holdings.copies[key] = piece.copy
                else:
                    self._swap_space.drop(piece.copy)
            elif key in self._contents.here and key not in self._contents.copies:
                self._contents.copies[key] = piece.copy
            else:
                self._swap_space.drop(piece.copy)
        for buffer in account.own:
            known = session.buffers.get(buffer)
            if known is not None:
                if known.base is not None:
                    self._pages.give(known.base)
                known.base, known.view = None, None
        for buffer in account.shared:
            session.buffers[buffer].base = session.buffers[buffer].view = None
        for leaving in self._ledger.swap_out(account, self._residents.clock()):
            if leaving.store in more:  # the last other sharer has left meanwhile, so this content leaves, too
                self._contents.orphan(leaving)
            elif (memory := self._contents.here.pop(leaving.store, None)) is not None:  # else its bytes are lost
                self._pages.give(memory)

    def _failed_to_leave(self, session: Session, error: Exception, place: Place | None) -> None:
        """Use no more of the place that could not take a copy. Otherwise, the same victim would be chosen again at once."""
        log.warning("session %s stays on the device, because it could not be swapped out: %s", session.id, error)
        if place is not None:
            self._swap_space.full(place)

    def release(self, session: Session) -> None:
        """Free the memory of a session that has ended, if no job uses it any more. Otherwise the last job's end does this."""
        if session.holdings.jobs:
            return
        self._contents.drop_released(self._ledger.close(session.holdings.account, self._residents.clock()))
        for copy in session.holdings.copies.values():
            self._swap_space.drop(copy)
        session.holdings.copies.clear()
        self._ipc.closed(session)
        self._residents.due = True

    # -- in ----------------------------------------------------------------------------------------------------------

    def bring(self, session: Session, stores: Iterable[int], urgency: int, then: Callable[[Session], None]) -> None:
        """Start to swap a session in, to the blocks that the ledger has given it.

        Args:
            session: the session.
            stores: shared contents that must also be brought back.
            urgency: class of the session.
            then: called when the memory is back.
        """
        note(session.flow, Signal.COMING)
        pieces = [Loading(("own", b), copy) for b, copy in session.holdings.copies.items()]
        wanted = {*stores, *[s for s in session.holdings.account.shared.values() if s not in self._contents.here]}
        pieces += [
            Loading(("store", s), self._contents.copies[s]) for s in sorted(wanted) if s in self._contents.copies
        ]

        def came(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._loaded(session, job, error, then))

        self._begin(session, LoadJob(urgency, came, pieces=pieces, pages=self._pages))

    def _begin(self, session: Session, job: Job) -> None:
        session.holdings.jobs.append(job)
        self._mover.submit(job)

    def _loaded(self, session: Session, job: Job, error: Exception | None, then: Callable[[Session], None]) -> None:
        assert isinstance(job, LoadJob)
        pieces, job.pieces = job.pieces, []
        session.holdings.jobs.remove(job)
        if session.holdings.closed:
            self.release(session)
            return
        self._install_loaded(session, pieces, error)
        note(session.flow, Signal.ARRIVED)
        flow = session.flow
        session.holdings.idle_since = None if flow.inbox.frames or flow.aside is not None else self._residents.clock()
        self.swapped_in += 1
        if session.spans is not None:
            session.spans.swapped("in", job.begun_ns, job.moved)
        log.info("session %s is back: %d bytes", session.id, job.moved)
        then(session)

    def _install_loaded(self, session: Session, pieces: list[Loading], error: Exception | None) -> None:
        """Make the copied bytes the session's memory. Bytes that were lost poison their buffers."""
        lost: dict[int, str] = {}
        for piece in pieces:
            kind, key = piece.key
            if kind == "own":
                known = session.buffers[key]
                known.base, known.view = piece.target, None
                if piece.target is None:
                    known.poison = piece.lost or f"the buffer was swapped out and could not be copied back: {error}"
            elif piece.target is not None:
                self._contents.here.setdefault(key, piece.target)
                self._ledger.arrived(key)
            else:
                lost[key] = piece.lost or f"the buffer was swapped out and could not be copied back: {error}"
        for buffer, store in session.holdings.account.shared.items():
            known = session.buffers[buffer]
            known.base, known.view = self._contents.here.get(store), None
            if known.base is None:
                known.poison = lost.get(store, "the buffer's shared content was lost while it was swapped out")
        for copy in session.holdings.copies.values():
            self._swap_space.drop(copy)
        session.holdings.copies.clear()
