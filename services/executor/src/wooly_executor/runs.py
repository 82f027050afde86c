"""Runs the programs of sessions: checks a run, finds its memory, and updates the session's account afterwards.

The device loop's thread owns this module.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor
from wooly_wis.frames import Run

from wooly_executor.errors import BindingError, ExecutorError, OutOfMemoryError, PoisonedError
from wooly_executor.frames import Running
from wooly_executor.memory.ledger import WORKSPACE_KEPT
from wooly_executor.plans.tiers import choose
from wooly_executor.programs import ReadyProgram
from wooly_executor.recording import MeasuredExecution
from wooly_executor.runtime.buffers import Buffer, bytes_of
from wooly_executor.runtime.protocol import Outcome, Runtime
from wooly_executor.session import Session
from wooly_executor.vram import Vram

#: Maximum number of buffers of a session, poisoned buffers included.
BUFFERS_KEPT = 1 << 20
#: Maximum number of unknown buffers that one run of an unknown program may poison. Each costs a microsecond and some memory.
LOST_AT_ONCE = 1 << 15


class Runs:
    """Runs programs on one device.

    Args:
        runtime: runs programs.
        vram: the device's memory.
    """

    def __init__(self, runtime: Runtime, vram: Vram) -> None:
        self._runtime, self._vram = runtime, vram

    # -- programs ----------------------------------------------------------------------------------------------------

    def begin(self, session: Session, run: Run, seq: int) -> Running:
        """Begin to run a program. `finish` or `abandon` must follow, and no other frame of this session is processed before.

        Raises:
            ExecutorError: the run could not begin. Nothing was executed, but the buffers in the run's free list are freed.
        """
        try:
            return self._begin(session, run, seq)
        except Exception as e:
            self.check(session)
            if isinstance(e, ExecutorError):
                self._poison(session, run, str(e))
            self.free(session, run.frees)
            raise

    def check(self, session: Session) -> None:
        """Wait until it is known whether the session's finished runs have failed. Everything but a run needs to know it."""
        if session.unchecked is not None:
            self._runtime.settle()
            self._checked(session)

    def _checked(self, session: Session) -> None:
        """Report the failure of the last run, whose work has landed."""
        running, session.unchecked = session.unchecked, None
        if running is None:
            return
        if running.execution.unchecked:
            self._runtime.settle()
        outcome = running.execution.outcome
        if outcome.failed_at is not None:
            session.fail(outcome.code, outcome.error, running.seq, outcome.failed_at)

    def finish(self, session: Session, running: Running) -> Outcome:
        """Finish a program that has ended, and free the buffers in the run's free list.

        Raises:
            OutOfMemoryError: the results exceed the session's quota.
        """
        try:
            return self._finish(session, running)
        except ExecutorError as e:
            self._poison(session, running.run, str(e))
            raise
        finally:
            if running.run.frees:
                self.free(session, running.run.frees)

    def abandon(self, session: Session, running: Running) -> None:
        """Clean up after a program during which the executor itself failed."""
        session.running = False
        for slot, _ in running.ready.kept:
            buffer = running.run.bindings[slot]
            if buffer not in session.buffers:
                self._vram.free(session, [buffer])
        self.free(session, running.run.frees)

    def _begin(self, session: Session, run: Run, seq: int) -> Running:
        ready = session.programs.use(run.digest)
        params = ready.unpack_params(run.params)
        self._check_bindings(session, ready, run.bindings)
        bindings, vram, holdings, prepared = run.bindings, self._vram, session.holdings, ready.prepared
        if holdings.guarded:
            vram.contents.unshare(session, [bindings[slot] for slot in ready.written])
        if session.cuts is not None:
            session.cuts.changed.update([bindings[slot] for slot in ready.written])
        before = session.held_bytes
        freed = 0
        for slot in prepared.dropped:
            freed += session.buffers[bindings[slot]].nbytes
        recording = session.recording
        # Plans of mode `full` have other bits than the library, so they stay. Otherwise the library's calls are measured.
        tiers = session.tiers if recording is None or session.jit == "full" else None
        prepared, trial = choose(tiers, ready, session.jit, params, session.spans)
        if ready.kept or ready.workspace > holdings.account.workspace:
            kept = [(bindings[slot], nbytes) for slot, nbytes in ready.kept]
            vram.ledger.begin(holdings.account, kept, ready.workspace, vram.clock())
        session.running = True
        if recording is not None:
            single = self._runtime.begin(prepared, session.buffers, bindings, params, single=True)
            measured = MeasuredExecution(single, prepared, seq, recording)
            return Running(run, seq, ready, measured, before, freed, prepared, trial, measured=True)
        execution = self._runtime.begin(prepared, session.buffers, bindings, params)
        return Running(run, seq, ready, execution, before, freed, prepared, trial)

    def _finish(self, session: Session, running: Running) -> Outcome:
        run, ready, before, outcome = running.run, running.ready, running.before, running.execution.outcome
        vram, account, counters = self._vram, session.holdings.account, session.counters
        if session.unchecked is not None:
            self._checked(session)
        if running.execution.unchecked and outcome.failed_at is None:
            session.unchecked = running
        session.running = False
        session.held_bytes += ready.facts.kept_bytes - running.freed
        dropped = ready.prepared.dropped
        if dropped:
            vram.free(session, [run.bindings[slot] for slot in dropped])
        if account.workspace > WORKSPACE_KEPT:
            vram.ledger.end(account, vram.clock())
        for slot in ready.dynamic:
            made = session.buffers.get(run.bindings[slot])
            if made is not None:
                session.held_bytes += made.nbytes
        peak = max(before + ready.peak_bytes, session.held_bytes)
        if peak > counters.peak_bytes:
            counters.peak_bytes = peak
        counters.programs += 1
        counters.instructions += len(ready.prepared.program.body)
        if outcome.failed_at is not None:
            session.fail(outcome.code, outcome.error, running.seq, outcome.failed_at)
        if ready.dynamic:
            self._charge_results(session, run, ready, before)
        return outcome

    def _charge_results(self, session: Session, run: Run, ready: ReadyProgram, before: int) -> None:
        """Put results of unknown size on the account.

        Raises:
            OutOfMemoryError: they exceed the session's quota or the free memory.
        """
        vram, account = self._vram, session.holdings.account
        try:
            if session.held_bytes > session.quota:
                raise self._out_of_memory(session, session.held_bytes - before, before)
            for slot in ready.dynamic:
                made = session.buffers.get(run.bindings[slot])
                if made is not None:
                    vram.ledger.allocate(account, run.bindings[slot], made.nbytes, vram.clock())
        except OutOfMemoryError:
            self.free(session, [run.bindings[slot] for slot in ready.dynamic])
            raise

    def _check_bindings(self, session: Session, ready: ReadyProgram, bindings: list[int]) -> None:
        buffers = session.buffers
        if not ready.bindings.satisfied(buffers, bindings):
            self._check_each_binding(session, ready, bindings)
        if len(buffers) + len(ready.kept) + len(ready.dynamic) > BUFFERS_KEPT:
            raise OutOfMemoryError(
                f"the session has {len(buffers)} buffers, and with this run more than the limit of {BUFFERS_KEPT}"
            )
        if session.held_bytes + ready.peak_bytes > session.quota:
            raise self._out_of_memory(session, ready.peak_bytes, session.held_bytes)

    def _check_each_binding(self, session: Session, ready: ReadyProgram, bindings: list[int]) -> None:
        """Find the first wrong binding. The run may have poisoned buffers.

        Raises:
            BindingError: there is one.
        """
        facts, buffers = ready.facts, session.buffers
        if len(bindings) != len(facts.slot_bytes):
            raise BindingError(f"the run has {len(bindings)} bindings, the program has {len(facts.slot_bytes)} slots")
        if len(set(bindings)) != len(bindings):
            raise BindingError("the run binds one buffer to two slots")
        get, made = buffers.get, facts.slot_alloc
        if ready.dynamic:
            made = tuple([0 if slot in ready.dynamic else size for slot, size in enumerate(made)])
        for buffer, need, size in zip(bindings, facts.slot_bytes, made, strict=True):
            known = get(buffer)
            if size is not None:
                if known is not None:
                    if not known.poison:
                        raise BindingError(f"buffer {buffer} already exists, and the program allocates it again")
                    self.free(session, [buffer])
            elif known is None:
                raise BindingError(f"buffer {buffer} does not exist")
            elif known.nbytes < need and not known.poison:
                raise BindingError(f"buffer {buffer} has {known.nbytes} bytes, the program accesses {need} bytes")

    def require_room_for_buffer(self, session: Session, nbytes: int) -> None:
        """Check that the session may have one more buffer.

        Raises:
            OutOfMemoryError: it exceeds its quota, or has too many buffers.
        """
        if len(session.buffers) >= BUFFERS_KEPT:
            raise OutOfMemoryError(f"the session has {len(session.buffers)} buffers, which is the limit")
        if session.held_bytes + nbytes > session.quota:
            raise self._out_of_memory(session, nbytes, session.held_bytes)

    def _out_of_memory(self, session: Session, wanted: int, held: int) -> OutOfMemoryError:
        account = session.holdings.account
        account.ooms += 1
        return OutOfMemoryError(self._vram.ledger.out_of_memory(account, wanted, session.quota, held))

    def settle(self) -> None:
        """Wait until the device has done all work of finished runs."""
        self._runtime.settle()

    # -- buffers -----------------------------------------------------------------------------------------------------

    def free(self, session: Session, buffers: Sequence[int]) -> None:
        """Free buffers. Unknown ids are ignored, because a failed program may not have created its buffers."""
        known = session.buffers
        for buffer in buffers:
            gone = known.pop(buffer, None)
            if gone is not None:
                session.held_bytes -= gone.nbytes
        if buffers:
            self._vram.free(session, buffers)

    def poison(self, session: Session, buffers: Sequence[int], why: str) -> None:
        """Poison buffers that a failed operation should have written. Unknown ids are ignored."""
        for buffer in buffers:
            known = session.buffers.get(buffer)
            if known is not None:
                known.base, known.view, known.poison = None, None, known.poison or why
        if session.cuts is not None:
            session.cuts.changed.update(buffers)

    def _poison(self, session: Session, run: Run, why: str) -> None:
        """Poison the buffers that a failed run should have written, and free the buffers that it should have freed.

        If nothing is known about the program, all buffers that the run names are poisoned.
        """
        ready, buffers, refusal = (
            session.programs.get(run.digest),
            session.buffers,
            session.programs.refusal(run.digest),
        )
        if ready is not None and len(run.bindings) == len(ready.facts.slot_bytes):
            freed: Container[int] = {slot for slot, gone in enumerate(ready.facts.slot_freed) if gone}
            written: Container[int] | None = ready.written
        elif refusal is not None and refusal.slots is not None and len(run.bindings) == refusal.slots.number:
            freed, written = refusal.slots.freed, refusal.slots.written
        else:
            freed, written = (), None
        if session.cuts is not None:
            session.cuts.changed.update(run.bindings)
        for slot, buffer in enumerate(run.bindings):
            if slot in freed:
                self.free(session, [buffer])
                continue
            if written is not None and slot not in written:
                continue
            known = buffers.get(buffer)
            if known is None and (len(buffers) >= BUFFERS_KEPT or (written is None and slot >= LOST_AT_ONCE)):
                continue  # a later read reports that the buffer does not exist
            if known is None:
                buffers[buffer] = Buffer(0, None, None, why)
            else:
                known.base, known.view, known.poison = None, None, known.poison or why

    def memory(self, session: Session, buffer: int, offset: int, nbytes: int, *, writing: bool) -> Tensor:
        """The bytes of a buffer on the device, to read or to write.

        Raises:
            ExecutorError: the buffer does not exist or is poisoned, or the range is out of bounds.
        """
        known = self._located(session, buffer, offset, nbytes, writing=writing)
        if writing and session.cuts is not None:
            session.cuts.changed.add(buffer)
        if writing and session.holdings.guarded:
            self._vram.contents.unshare(session, [buffer], whole=nbytes == known.nbytes)
        if known.base is None:
            shared = self._vram.ipc.memory(session, buffer)
            known.base, known.poison = self._runtime.device.zeroed(known.nbytes) if shared is None else shared, ""
        return bytes_of(known.base, offset, nbytes)

    def copied(self, session: Session, buffer: int, offset: int, nbytes: int) -> bytes:
        """A copy of a few bytes of a buffer on the device.

        Raises:
            ExecutorError: as `memory`.
        """
        known = self._located(session, buffer, offset, nbytes, writing=False)
        assert known.base is not None
        return self._runtime.device.copied(known.base, offset, nbytes)

    def _located(self, session: Session, buffer: int, offset: int, nbytes: int, *, writing: bool) -> Buffer:
        self.check(session)
        known = session.buffers.get(buffer)
        if known is None:
            raise BindingError(f"buffer {buffer} does not exist")
        if known.base is None and (not writing or nbytes != known.nbytes):
            raise PoisonedError(known.poison)
        if offset + nbytes > known.nbytes:
            raise BindingError(
                f"bytes {offset} to {offset + nbytes} are out of bounds: buffer {buffer} has {known.nbytes} bytes"
            )
        return known
