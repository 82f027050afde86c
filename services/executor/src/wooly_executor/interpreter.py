"""Carries out the instructions of the fold of a session's life (`flow`). The device loop's thread owns this module.

interpreter.go_on(session, event)       feeds an event and carries out instructions until the session waits for another event
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from wooly_wis.codec import DIGEST_SIZE, digest
from wooly_wis.errors import DecodeError
from wooly_wis.frames import IPC_EXPORT, Kind, unpack_content, unpack_cut, unpack_ipc, unpack_restore, unpack_run

from wooly_executor.answers import Answers
from wooly_executor.billing.core_speed import FULL, CoreSpeed
from wooly_executor.checkpoints.cuts import Cuts
from wooly_executor.collectives.service import Collectives
from wooly_executor.decoding import Decoders, Decoding
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import ContextLostError, ExecutorError, forget_frames
from wooly_executor.estimates import UNKNOWN
from wooly_executor.flow import Event, Instruction, Signal, note, step
from wooly_executor.frames import Frame, awaited
from wooly_executor.post import Calls, Post
from wooly_executor.processing import Processing
from wooly_executor.programs import ProgramStore
from wooly_executor.session import Session
from wooly_executor.sessions import Sessions
from wooly_executor.vram import Vram

#: Maximum size, in bytes, of a definition that the device's thread decodes itself while only one session is open. This takes less
#: than 10 ms; a decoder's answer would arrive 0.2 ms later.
DECODED_HERE = 8 << 10
#: Maximum size, in bytes, of a definition that the device's thread looks up in the store. The digest takes about 60 us.
LOOKED_UP_HERE = 64 << 10
#: Time, in ns, that one frame counts for in a session's turn. A definition that takes longer counts as several frames.
FRAME_NS = 50_000
#: Members of enumerations on the way of every run: looked up on its class, a member costs as much as a call.
_SUBMITTED = Signal.SUBMITTED
_PROCESSED = Signal.PROCESSED
_RUN = Kind.RUN
_READ = Kind.READ
_DEFINITION_READY = Signal.DEFINITION_READY
_MEMORY_READY = Signal.MEMORY_READY
_COPYING = frozenset((Kind.CUT, Kind.RESTORE))


class Interpreter:
    """Carries out instructions.

    Args:
        sessions: the open sessions.
        processing: processes frames when their turn has come.
        vram: the device's memory.
        cuts: takes and restores the cuts of sessions.
        collectives: brings the ranks of groups together.
        dispatch: orders the runs.
        store: has the programs of all sessions.
        decoders: decode definitions outside this thread.
        answers: sends answers to clients.
        post: queue of events of sessions, for this thread.
        calls: queue of functions that other threads run in this thread.
        pace: measures the speed of a core; None: full speed.

    Attributes:
        served: sessions of which frames were processed in this turn.
        yielding: whether one of them has more frames.
    """

    def __init__(
        self,
        sessions: Sessions,
        processing: Processing,
        vram: Vram,
        cuts: Cuts,
        collectives: Collectives,
        dispatch: Dispatch,
        store: ProgramStore,
        decoders: Decoders,
        answers: Answers,
        post: Post,
        calls: Calls,
        pace: CoreSpeed | None,
    ) -> None:
        self._sessions, self._processing, self._vram, self._dispatch = sessions, processing, vram, dispatch
        self._cuts, self._collectives = cuts, collectives
        self._store, self._decoders, self._answers = store, decoders, answers
        self._post, self._calls, self._pace = post, calls, pace
        self.served: dict[Session, None] = {}
        self.yielding = False
        carry_out: dict[Instruction, Callable[[Session], Signal]] = {
            Instruction.CHECK_KERNELS: self._check_kernels,
            Instruction.CHECK_PLAN: self._check_plan,
            Instruction.SUBMIT: self._submit,
            Instruction.DECODE: self._decode,
            Instruction.REACH: self._reach,
            Instruction.RESUME: self._resume,
            Instruction.PROCESS: self._process,
            Instruction.YIELD: self._yield,
            Instruction.REFUSE: self._refuse,
            Instruction.STOP_READING: self._stop_reading,
            Instruction.READ_ON: self._read_on,
            Instruction.END: self._end,
        }
        self._carry_out = tuple([carry_out[instruction] for instruction in Instruction])

    def go_on(self, session: Session, event: Event) -> None:
        """Feed an event to a session, and carry out all instructions that follow."""
        flow, carry_out = session.flow, self._carry_out
        found = step(flow, event)
        while found is not None:
            found = step(flow, carry_out[found](session))

    def next_turn(self) -> None:
        """Start a new turn: sessions that had used up their last turn continue."""
        if self.served:
            served, self.served, self.yielding = self.served, {}, False
            for session in served:
                self.go_on(session, Signal.TURN_CAME)

    def ppm(self) -> int:
        """The current speed of a core, in millionths of full speed."""
        return FULL if self._pace is None else self._pace.ppm

    # -- what a run needs before it is submitted ---------------------------------------------------------------------

    def _check_kernels(self, session: Session) -> Signal:
        ready = session.programs.get(bytes(_next(session).payload[:DIGEST_SIZE]))

        def built() -> None:
            self._calls.call(lambda: self._post.add(session, Signal.KERNELS_BUILT))

        waits = ready is not None and any(kernel.then(built) for kernel in ready.kernels)
        return Signal.KERNELS_AWAITED if waits else Signal.KERNELS_READY

    def _check_plan(self, session: Session) -> Signal:
        tiers, frame = session.tiers, _next(session)
        try:
            run = unpack_run(frame.payload)
            ready = session.programs.get(run.digest)
            params = ready.unpack_params(run.params) if ready is not None else []
        except (DecodeError, ExecutorError):
            return Signal.PLAN_READY  # processing refuses the frame later
        if tiers is None or ready is None:
            return Signal.PLAN_READY

        def known() -> None:
            self._post.add(session, Signal.PLAN_KNOWN)

        waits = tiers.awaits(ready, params, known, session.spans)
        return Signal.PLAN_AWAITED if waits else Signal.PLAN_READY

    def _submit(self, session: Session) -> Signal:
        inbox = session.flow.inbox
        frame = inbox.frames[inbox.submitted]
        if session.flow.aside is not None and _uses(frame, session.holdings.travelling):
            return Signal.PEERS_AWAITED
        ready = session.programs.get(bytes(frame.payload[:DIGEST_SIZE]))
        if not self._vram.admit(session, frame, ready):
            return Signal.ROOM_AWAITED
        frame.cut = UNKNOWN if ready is None else ready.estimate.cut
        self._dispatch.submit(session, frame)
        return _SUBMITTED

    # -- definitions -------------------------------------------------------------------------------------------------

    def _decode(self, session: Session) -> Signal:
        """Decode a definition at once if that is quick. Otherwise queue it for a decoder."""
        frame = _next(session)
        work = self._decoding_of(session, frame)
        nbytes, program = frame.nbytes, frame.kind == Kind.DEFINE
        if not session.flow.inbox.submitted:
            alone = len(self._sessions) == 1 and nbytes <= DECODED_HERE
            if alone or (program and nbytes <= LOOKED_UP_HERE and self._store.known(digest(frame.payload))):
                self._decode_here(session, frame, work)
                return _DEFINITION_READY

        def done(result: Any, error: Exception | None, core_ns: int) -> None:
            self._calls.call(lambda: self._decoded(session, frame, result, error, core_ns))

        priority = self._dispatch.priority_of(session.id)
        session.decoding = Decoding(session.tenant or session.id, priority, nbytes, work, done)
        self._decoders.submit(session.decoding)
        return Signal.DEFINITION_AWAITED

    def _decode_here(self, session: Session, frame: Frame, work: Callable[[], Any]) -> None:
        begun = time.thread_time_ns()
        try:
            frame.decoded = work(), None
        except ContextLostError:
            raise
        except Exception as e:
            forget_frames(e)
            frame.decoded = None, e
        took = time.thread_time_ns() - begun
        session.used.decoded(took, self.ppm())
        frame.turns += took // FRAME_NS

    def _decoded(self, session: Session, frame: Frame, result: Any, error: Exception | None, core_ns: int) -> None:
        """Take the result of a decoder."""
        session.used.decoded(core_ns, self.ppm())
        session.decoding, frame.decoded = None, (result, error)
        self._post.add(session, Signal.DECODED)

    def _decoding_of(self, session: Session, frame: Frame) -> Callable[[], Any]:
        """The function that decodes a frame. It may run in any thread."""
        frame.begun_ns = time.time_ns()
        take = session.programs.define if frame.kind == Kind.DEFINE else session.programs.take_source

        def work() -> Any:
            with torch.inference_mode():
                return take(bytes(frame.payload))

        return work

    # -- frames in processing ----------------------------------------------------------------------------------------

    def _reach(self, session: Session) -> Signal:
        """Check that the memory a frame touches is on the device, with room for copies; for a PIN, that all contents are hashed;
        for a CUT and a RESTORE, that the memory is copied; for a COLLECTIVE, that all ranks are there; for an IPC, that it has
        room for a copy.
        """
        frame = _next(session)
        self._processing.check(session)
        if frame.kind == _READ:
            return _MEMORY_READY if self._vram.present(session) else Signal.MEMORY_AWAITED
        if frame.kind == Kind.COLLECTIVE:
            try:
                return self._collectives.reach(session, frame)
            except DecodeError:
                return _MEMORY_READY  # processing refuses the frame later
        if frame.kind in _COPYING:
            return self._reach_copied(session, frame)
        if frame.kind == Kind.PIN:
            return Signal.MEMORY_AWAITED if session.holdings.sealing else _MEMORY_READY
        if frame.kind == Kind.IPC:
            try:
                what, buffer, _, _ = unpack_ipc(frame.payload)
            except DecodeError:
                return _MEMORY_READY  # processing refuses the frame later
            if what == IPC_EXPORT:
                return _MEMORY_READY if self._vram.writable(session, buffer) else Signal.MEMORY_AWAITED
        if frame.kind == Kind.OFFER:
            try:
                buffer, _, head, _ = unpack_content(frame.payload)
            except DecodeError:
                return _MEMORY_READY  # processing refuses the frame later
            if not head:
                return _MEMORY_READY if self._vram.writable(session, buffer) else Signal.MEMORY_AWAITED
        return _MEMORY_READY if self._vram.present(session) else Signal.MEMORY_AWAITED

    def _resume(self, session: Session) -> Signal:
        """Go on with the collective that was set aside."""
        frame = session.flow.aside
        assert isinstance(frame, Frame)
        return self._collectives.reach(session, frame)

    def _reach_copied(self, session: Session, frame: Frame) -> Signal:
        try:
            if frame.kind == Kind.CUT:
                ready = self._cuts.reach(session, *unpack_cut(frame.payload))
            else:
                ready = self._cuts.restore(session, unpack_restore(frame.payload))
        except DecodeError:
            return _MEMORY_READY  # processing refuses the frame later
        return _MEMORY_READY if ready else Signal.MEMORY_AWAITED

    def _process(self, session: Session) -> Signal:
        conn, frame = session.conn, session.flow.current
        assert isinstance(frame, Frame)
        if conn is not None and not conn.closed:
            self._processing.process(session, conn, frame)
            if frame.kind != _RUN and session.conn is not None:
                self.served[session] = None
        if conn is None or conn.closed:
            note(session.flow, Signal.LINK_BROKEN)
        return _PROCESSED

    def _yield(self, session: Session) -> Signal:
        self.yielding = True
        return Signal.YIELDED

    def _refuse(self, session: Session) -> Signal:
        """Answer the frames for which the client of a held session waits, with the reason of the hold. Submitted runs are kept
        for later.
        """
        conn, flow = session.conn, session.flow
        for frame in flow.refusing:
            if conn is not None and not conn.closed and awaited(frame):
                frame.refused = True
                self._answers.refuse(conn, frame, "executor.held", flow.hold.reason)
        return Signal.REFUSED

    def _stop_reading(self, session: Session) -> Signal:
        if session.conn is not None:
            session.conn.pause()
        return Signal.READING_STOPPED

    def _read_on(self, session: Session) -> Signal:
        if session.conn is not None:
            session.conn.resume()
        return Signal.READING

    def _end(self, session: Session) -> Signal:
        self._sessions.end(session, session.flow.overdue)
        return Signal.CLOSED


def _uses(frame: Frame, buffers: frozenset[int]) -> bool:
    """Whether a run names or frees one of these buffers."""
    try:
        run = unpack_run(frame.payload)
    except DecodeError:
        return False  # processing refuses the frame later
    return not buffers.isdisjoint(run.bindings) or not buffers.isdisjoint(run.frees)


def _next(session: Session) -> Frame:
    frame = session.flow.next
    assert isinstance(frame, Frame)
    return frame
