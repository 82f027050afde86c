"""Takes cuts of sessions and restores them. The device loop's thread owns this module.

A CUT frame takes a cut at its place among the session's frames: all frames before it are processed, and no frame after it. The
session waits while the buffers that changed since its last cut are copied to host memory. Then it goes on, and the copies are
stored in the background.

A RESTORE frame, the first one of a session, fills the session with the buffers of a cut.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from wooly_wis.messages import StoredCheckpoint

from wooly_executor.checkpoints.files import Checkpoints, SavedBuffer, Table
from wooly_executor.checkpoints.jobs import Copied, CopyJob, FilesJob, FillJob, ReadJob, StoreJob
from wooly_executor.checkpoints.state import Restoring, SessionCuts
from wooly_executor.errors import CheckpointError, ExecutorError, OutOfMemoryError
from wooly_executor.flow import Signal
from wooly_executor.mover import LEAST_URGENT, Job, Mover
from wooly_executor.post import Post
from wooly_executor.runtime.buffers import Buffer, bytes_of
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.session import Session
from wooly_executor.swap_space import Pages
from wooly_executor.vram import Vram

log = logging.getLogger("wooly.executor")
#: Maximum number of buffers of a cut.
BUFFERS_AT_MOST = 1 << 17


class Cuts:
    """The cuts of all sessions of one device.

    Args:
        vram: the device's memory.
        device: the device.
        call: runs a function in the device's thread; any thread may use it.
        post: queue of events of sessions.
        settle: waits until the device has done all work of finished runs.
        checkpoints: where cuts are stored; None: nowhere.
        budget: maximum bytes of host memory that cuts use until they are stored.
    """

    def __init__(
        self,
        vram: Vram,
        device: TorchDevice,
        call: Callable[[Callable[[], None]], Any],
        post: Post,
        settle: Callable[[], None],
        checkpoints: Checkpoints | None,
        budget: int,
    ) -> None:
        self._vram, self._device, self._call, self._post, self._settle = vram, device, call, post, settle
        self._checkpoints, self._budget = checkpoints, budget
        self._pages = Pages(budget // 2, device.host_memory)
        self._staged = 0
        #: Stores and reads in another thread than the one that swaps, and outside the device's contexts: stores may be slow.
        self._files = Mover()

    def stop(self) -> None:
        """End the thread that stores and reads."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._files.stop()

    # -- cuts --------------------------------------------------------------------------------------------------------

    def reach(self, session: Session, number: int, known: int, wait: bool) -> bool:
        """Take a cut, if the frame asks for a new one. Returns False while the session must wait; MEMORY_CAME follows.

        Args:
            session: the session.
            number: number of the new cut; 0: no cut.
            known: the newest cut that the client knows to be stored.
            wait: wait until the newest cut is stored.
        """
        if self._checkpoints is None or session.failure is not None:
            return True
        cuts = session.cuts
        if cuts is None:
            cuts = session.cuts = self._begun(session)
        if number <= cuts.number:
            cuts.waits = wait and cuts.storing is not None
            return not cuts.waits
        if cuts.copying:
            return False
        if cuts.storing is not None:
            cuts.waits = True
            return False
        if not self._vram.present(session):
            return False
        return self._copy(session, cuts, number, known)

    def _begun(self, session: Session) -> SessionCuts:
        assert self._checkpoints is not None
        return SessionCuts(self._checkpoints.of(session.tenant, session.id, session.part), set(session.buffers))

    def _copy(self, session: Session, cuts: SessionCuts, number: int, known: int) -> bool:
        """Start to copy the buffers that have changed. Returns True if there is nothing to wait for."""
        self._settle()
        kept: Table = {}
        copied: list[Copied] = []
        nbytes = 0
        for buffer, each in session.buffers.items():
            before = cuts.table.get(buffer)
            if each.base is None:
                kept[buffer] = SavedBuffer(each.nbytes, poison=each.poison)
            elif before is not None and buffer not in cuts.changed:
                kept[buffer] = before
            else:
                copied.append(Copied(buffer, bytes_of(each.base, 0, each.nbytes)))
                nbytes += each.nbytes
        if len(session.buffers) > BUFFERS_AT_MOST:
            cuts.error = f"the session has {len(session.buffers)} buffers, a checkpoint at most {BUFFERS_AT_MOST}"
        elif self._staged + nbytes > self._budget:
            cuts.error = (
                f"a checkpoint needs {nbytes} bytes of host memory until it is stored, and {self._budget - self._staged} of "
                f"{self._budget} are free (WOOLY_EXECUTOR_CHECKPOINT_HOST)"
            )
        else:
            cuts.error = ""
        if cuts.error:
            return True
        changed, cuts.changed = cuts.changed, set()
        cuts.copying, cuts.staged = number, nbytes
        cuts.used = session.used.mark()
        self._staged += nbytes
        begun = time.perf_counter_ns()

        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._copied(session, cuts, job, error, kept, known, changed, begun))

        job = CopyJob(self._vram.priority(session), done, buffers=copied, pages=self._pages)
        session.holdings.jobs.append(job)
        self._vram.mover.submit(job)
        return False

    def _copied(
        self,
        session: Session,
        cuts: SessionCuts,
        job: Job,
        error: Exception | None,
        kept: Table,
        known: int,
        changed: set[int],
        begun: int,
    ) -> None:
        """The buffers are copied, so the session goes on. Store the copies."""
        assert isinstance(job, CopyJob)
        session.holdings.jobs.remove(job)
        number, cuts.copying = cuts.copying, 0
        cuts.number, cuts.pause_ns = number, time.perf_counter_ns() - begun
        closed = session.holdings.closed
        if closed:
            self._vram.release(session)
        self._post.add(session, Signal.MEMORY_CAME)
        if error is not None or job.cancelled or closed:
            self._over(cuts, job.buffers, changed, str(error or "the session has ended"))
            return
        begun = time.perf_counter_ns()

        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._stored(session, cuts, job, error, changed, begun))

        cuts.storing = StoreJob(
            LEAST_URGENT, done, files=cuts.files, number=number, known=known, buffers=job.buffers, table=kept
        )
        self._files.submit(cuts.storing)

    def _stored(
        self, session: Session, cuts: SessionCuts, job: Job, error: Exception | None, changed: set[int], begun: int
    ) -> None:
        assert isinstance(job, StoreJob)
        cuts.storing = None
        cuts.store_ns = time.perf_counter_ns() - begun
        failed = error is not None or job.cancelled
        why = str(error or "the session has ended") if failed else ""
        known, cuts.logged = cuts.logged == why, why  # a full disk fails each checkpoint of each session
        self._over(cuts, job.buffers, changed if failed else set(), why)
        if failed:
            level = logging.INFO if error is None else logging.DEBUG if known else logging.WARNING
            log.log(level, "checkpoint %d of session %s is not stored: %s", job.number, session.id, why)
        else:
            cuts.table, cuts.kept = job.table, job.number
            if cuts.used is not None:
                session.used.saved(cuts.used)
            cuts.stored = StoredCheckpoint(
                number=job.number,
                at=time.time(),
                nbytes=sum([saved.nbytes for saved in job.table.values()]),
                written=job.written,
                pause_s=cuts.pause_ns / 1e9,
            )
        session.used.decoded(job.core_ns)
        if cuts.waits:
            cuts.waits = False
            self._post.add(session, Signal.MEMORY_CAME)

    def _over(self, cuts: SessionCuts, buffers: list[Copied], changed: set[int], error: str) -> None:
        """Release the host memory of a cut that is stored or has failed."""
        cuts.changed |= changed
        cuts.error = error
        for each in buffers:
            if each.copy is not None:
                self._pages.give(each.copy)
        self._staged -= cuts.staged
        cuts.staged = 0

    def answer(self, session: Session) -> dict[str, Any]:
        """The answer to a CUT."""
        cuts = session.cuts
        if self._checkpoints is None:
            error = "this executor stores no checkpoints (WOOLY_EXECUTOR_CHECKPOINTS=off)"
            return {"taken": 0, "stored": 0, "held": session.held_bytes, "error": error, "never": True}
        if cuts is None:  # the session has a failure, which is the answer
            return {"taken": 0, "stored": 0, "held": session.held_bytes, "error": ""}
        return {
            "taken": cuts.number,
            "stored": cuts.kept,
            "held": session.held_bytes,
            "pause_ns": cuts.pause_ns,
            "store_ns": cuts.store_ns,
            "error": cuts.error,
        }

    # -- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, session: Session, number: int) -> bool:
        """Restore a cut. Returns False while the session must wait; MEMORY_CAME follows. `restored` tells the outcome."""
        if self._checkpoints is None or (session.buffers and session.cuts is None):
            return True
        cuts = session.cuts
        if cuts is None:
            cuts = session.cuts = self._begun(session)
            cuts.restoring = Restoring()
            self._read(session, cuts, cuts.restoring, number)
            return False
        restoring = cuts.restoring
        if restoring is None or restoring.done or restoring.error is not None:
            return True
        if restoring.table is None or session.holdings.jobs:
            return False
        return self._fill(session, cuts, restoring, restoring.table)

    def _read(self, session: Session, cuts: SessionCuts, restoring: Restoring, number: int) -> None:
        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: read(job, error))

        def read(job: Job, error: Exception | None) -> None:
            assert isinstance(job, ReadJob)
            if error is None:
                restoring.table, restoring.holder = job.table, job.holder
                cuts.number = cuts.kept = number
            else:
                restoring.error = error if isinstance(error, ExecutorError) else CheckpointError(str(error))
            self._post.add(session, Signal.MEMORY_CAME)

        self._files.submit(ReadJob(self._vram.priority(session), done, files=cuts.files, number=number))

    def _fill(self, session: Session, cuts: SessionCuts, restoring: Restoring, table: Table) -> bool:
        """Reserve the memory of the cut's buffers, and start to fill it. Returns True if there is no room."""
        sizes = [(buffer, saved.nbytes) for buffer, saved in table.items() if not saved.poison]
        total = sum([nbytes for _, nbytes in sizes])
        ledger, holdings = self._vram.ledger, session.holdings
        if total > session.quota:
            restoring.error = OutOfMemoryError(ledger.out_of_memory(holdings.account, total, session.quota, 0))
            return True
        if not self._vram.room_for(session, total):
            return False
        try:
            ledger.begin(holdings.account, sizes, 0, self._vram.clock())
        except ExecutorError as e:
            restoring.error = e
            return True

        def done(job: Job, error: Exception | None) -> None:
            self._call(lambda: self._filled(session, cuts, restoring, job, error))

        priority = self._vram.priority(session)
        job = FillJob(priority, done, files=restoring.holder, table=table, device=self._device)
        session.holdings.jobs.append(job)
        self._files.submit(job)
        return False

    def _filled(
        self, session: Session, cuts: SessionCuts, restoring: Restoring, job: Job, error: Exception | None
    ) -> None:
        assert isinstance(job, FillJob)
        made, job.made = job.made, {}
        session.holdings.jobs.remove(job)
        if session.holdings.closed:
            self._vram.release(session)
            return
        if error is not None or job.cancelled:
            restoring.error = error if isinstance(error, ExecutorError) else CheckpointError(str(error))
            self._vram.free(session, list(session.holdings.account.own))
        else:
            restoring.done = True
            for buffer, saved in job.table.items():
                session.buffers[buffer] = Buffer(saved.nbytes, made.get(buffer), None, saved.poison)
            session.held_bytes = sum([saved.nbytes for saved in job.table.values()])
            # The files of an earlier key have no part in the next cut.
            cuts.table, cuts.changed = job.table, set() if restoring.holder is cuts.files else set(job.table)
        self._post.add(session, Signal.MEMORY_CAME)

    def restored(self, session: Session) -> dict[str, Any]:
        """The answer to a RESTORE.

        Raises:
            ExecutorError: the cut could not be restored.
        """
        cuts = session.cuts
        if self._checkpoints is None:
            raise CheckpointError("this executor stores no checkpoints (WOOLY_EXECUTOR_CHECKPOINTS=off)")
        if cuts is None or cuts.restoring is None:
            raise CheckpointError("a session restores a checkpoint before it does anything else")
        if cuts.restoring.error is not None:
            raise cuts.restoring.error
        return {"buffers": len(session.buffers), "held": session.held_bytes}

    # -- the end -----------------------------------------------------------------------------------------------------

    def closed(self, session: Session, *, passing: bool) -> None:
        """A session has ended here. Unless it may go on in another executor (`passing`), its files are removed."""
        cuts = session.cuts
        if cuts is None or passing:
            return
        if cuts.storing is not None:
            cuts.storing.cancel()
        self._files.submit(FilesJob(LEAST_URGENT, _ended, work=cuts.files.remove))

    def keep(self, kept: list[tuple[str, str, int]], dropped: list[tuple[str, str, int]]) -> None:
        """Keep the files of some sessions that nobody has open, and remove those of others.

        Args:
            kept: tenant, session id and index of the device.
            dropped: the same.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            return

        def work() -> None:
            for named in kept:
                checkpoints.of(*named).touch()
            for named in dropped:
                checkpoints.of(*named).remove()

        self._files.submit(FilesJob(LEAST_URGENT, _ended, work=work))

    def sweep(self, sessions: list[Session]) -> None:
        """Remove the files of sessions that ended long ago without their client."""
        if self._checkpoints is None:
            return
        checkpoints = self._checkpoints
        open_files = [session.cuts.files for session in sessions if session.cuts is not None]

        def work() -> None:
            for files in open_files:
                files.touch()
            checkpoints.sweep()

        self._files.submit(FilesJob(LEAST_URGENT, _ended, work=work))


def _ended(job: Job, error: Exception | None) -> None:
    if error is not None:
        log.warning("files of checkpoints cannot be removed: %s", error)
