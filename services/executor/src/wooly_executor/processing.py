"""Processes a frame when its turn has come, and answers it. The device loop's thread owns this module."""

from __future__ import annotations

import heapq
import logging
import time
from base64 import b64encode
from typing import Any

from wooly_bus.channel import Connection
from wooly_wis.errors import DecodeError
from wooly_wis.frames import (
    ANSWER_COPIED,
    ANSWER_DATA,
    BUFFERS_AT_ONCE,
    IPC_EXPORT,
    IPC_IMPORT,
    PROFILE_BEGIN,
    PROFILE_END,
    Kind,
    unpack_buffers,
    unpack_content,
    unpack_cut,
    unpack_ipc,
    unpack_json,
    unpack_profile,
    unpack_read,
    unpack_restore,
    unpack_stats,
)

from wooly_executor.answers import Answers, require_place
from wooly_executor.billing.busy_time import BusyTime
from wooly_executor.checkpoints.cuts import Cuts
from wooly_executor.collectives.peers import MAX_REASON
from wooly_executor.collectives.service import Collectives
from wooly_executor.counters import Work
from wooly_executor.errors import ContextLostError, ExecutorError, InternalError, forget_frames
from wooly_executor.flow.state import DEFINITIONS
from wooly_executor.frames import Frame
from wooly_executor.recording import Recording
from wooly_executor.runs import Runs
from wooly_executor.session import Session
from wooly_executor.sessions import Sessions
from wooly_executor.upload_targets import finish_upload
from wooly_executor.vram import Vram

log = logging.getLogger("wooly.executor")
#: Maximum size of a PIN frame, in bytes.
PIN_BYTES = 4096
#: Members of enumerations on the way of every run: looked up on its class, a member costs as much as a call.
_RUN = Kind.RUN
_WRITE = Kind.WRITE
_READ = Kind.READ
_SYNC = Kind.SYNC
_OFFER = Kind.OFFER
_SEAL = Kind.SEAL
_STATS = Kind.STATS
_PROFILE = Kind.PROFILE
#: Frames that repeat what a session did before it lost its executor. Any other frame comes after them.
_REPEATED = frozenset((Kind.SOURCE, Kind.DEFINE, Kind.RESTORE, Kind.RUN, Kind.WRITE, Kind.SEAL, Kind.READ))


class Processing:
    """Processes frames.

    Args:
        sessions: the open sessions.
        runs: finishes runs, and has the sessions' buffers.
        vram: the device's memory.
        answers: sends answers to clients.
        busy: knows how busy the device is.
        cuts: takes and restores the cuts of sessions.
        collectives: brings the ranks of groups together.

    Attributes:
        work: how the programs of all sessions ran.
    """

    def __init__(
        self,
        sessions: Sessions,
        runs: Runs,
        vram: Vram,
        answers: Answers,
        busy: BusyTime,
        cuts: Cuts,
        collectives: Collectives,
    ) -> None:
        self._cuts, self._collectives = cuts, collectives
        self._sessions, self._runs, self._vram, self._answers, self._busy = sessions, runs, vram, answers, busy
        self.work = Work()

    def process(self, session: Session, conn: Connection, frame: Frame) -> None:
        """Process a frame whose turn has come or whose run has ended, and answer it. An error becomes the session's failure."""
        frame.ended = True
        error, frame.error = frame.error, None
        try:
            if error is not None:
                raise error
            if frame.kind != _RUN:
                self._runs.check(session)
            self._do(session, conn, frame)
            if session.used.repeating and frame.kind not in _REPEATED:
                session.used.repeating = False
        except ContextLostError:
            raise
        except (MemoryError, RecursionError) as e:
            forget_frames(e)
            self._sessions.exhausted(conn, e)
            return
        except (ExecutorError, DecodeError) as e:
            forget_frames(e)
            session.fail(e.code, str(e), frame.seq, getattr(e, "instruction", None))
            self._answers.failure_if_awaited(session, conn, frame)
        except Exception as e:
            log.exception("session %s: unexpected error in frame %d", session.id, frame.seq)
            forget_frames(e)
            session.fail(InternalError.code, f"{type(e).__name__}: {e}", frame.seq)
            self._answers.failure_if_awaited(session, conn, frame)
        if session.flow.aside is None and not session.done_early:
            conn.ack(frame.seq)
        else:
            self._ack_in_order(session, conn, frame)
        if not session.flow.inbox.frames and session.flow.aside is None:
            self._vram.idle(session)

    @staticmethod
    def _ack_in_order(session: Session, conn: Connection, frame: Frame) -> None:
        """Acknowledge frames only as far as all are processed: not those that a collective, which was set aside, is before."""
        session.done_early = max(session.done_early, frame.seq)
        if session.flow.aside is None:
            conn.ack(session.done_early)
            session.done_early = 0

    def check(self, session: Session) -> None:
        """See `Runs.check`."""
        self._runs.check(session)

    def _do(self, session: Session, conn: Connection, frame: Frame) -> None:
        kind, answers = frame.kind, self._answers
        if kind == _RUN:
            self._finish(session, conn, frame)
        elif kind == _WRITE:
            begun = time.perf_counter_ns()
            finish_upload(session)  # the data is in place or on its way, or the session keeps the failure
            if session.recording is not None:
                session.recording.copied(frame.seq, begun)
        elif kind in DEFINITIONS:
            self._keep(session, frame)
        elif frame.refused:
            return
        elif kind == _READ:
            buffer, offset, nbytes, place = unpack_read(frame.payload)
            if place is not None:
                require_place(conn, place, nbytes)
            if not answers.failure(session, conn):
                begun = time.perf_counter_ns()
                if nbytes <= ANSWER_COPIED:
                    answers.copied(session, conn, self._runs.copied(session, buffer, offset, nbytes))
                else:
                    memory = self._runs.memory(session, buffer, offset, nbytes, writing=False)
                    answers.data(session, conn, memory, place)
                if session.recording is not None:
                    session.recording.copied(frame.seq, begun)
        elif kind == _SYNC:
            self._runs.settle()
            if not answers.failure(session, conn):
                answers.say(conn, {})
        elif kind == _STATS:
            self._runs.settle()
            answers.say(conn, self._stats(session, unpack_stats(frame.payload)))
        elif kind == _PROFILE:
            self._runs.settle()
            answers.records(conn, self._profile(session, unpack_profile(frame.payload)))
        elif kind == Kind.BUFFERS:
            behind = unpack_buffers(frame.payload)
            ids = heapq.nsmallest(BUFFERS_AT_ONCE, [buffer for buffer in session.buffers if buffer > behind])
            answers.say(conn, {"buffers": [(buffer, session.buffers[buffer].nbytes) for buffer in ids]})
        elif kind == _OFFER:
            answers.say(conn, {"known": self._offer(session, frame)})
        elif kind == _SEAL:
            buffer, nbytes, _, name = unpack_content(frame.payload)
            self._vram.contents.seal(session, buffer, nbytes, name)
        elif kind == Kind.PIN:
            if len(frame.payload) > PIN_BYTES:
                raise DecodeError(f"a PIN frame has {len(frame.payload)} bytes, at most {PIN_BYTES} are allowed")
            answers.say(conn, self._pin(session, unpack_json(frame.payload)))
        elif kind == Kind.CUT:
            unpack_cut(frame.payload)
            if not answers.failure(session, conn):
                answers.say(conn, self._cuts.answer(session))
        elif kind == Kind.RESTORE:
            unpack_restore(frame.payload)
            answers.say(conn, self._cuts.restored(session))
        elif kind == Kind.COLLECTIVE:
            self._collectives.finish(session, frame)
        elif kind == Kind.IPC:
            asked = unpack_ipc(frame.payload)
            if not answers.failure(session, conn):
                answers.say(conn, self._ipc(session, *asked))
        elif kind == Kind.GROUP:
            self._collectives.remote.introduce(session, frame.payload, direct=self._sessions.direct)
        elif kind == Kind.CLOSE:
            reason = bytes(frame.payload[:MAX_REASON]).decode(errors="replace")
            self._sessions.close(session.id, reason)
        else:
            conn.close(f"a client must not send frames of kind {kind}")

    def _finish(self, session: Session, conn: Connection, frame: Frame) -> None:
        """Finish a run that the device has completed."""
        running = frame.running
        assert running is not None
        computing = running.ready.computing
        kernel_ns = getattr(running.execution, "kernel_ns", 0)
        for work in (self.work, session.work):
            work.ran(running.prepared, computing, running.gpu_ns, kernel_ns)
        session.used.ran(running.ready.digest, running.ready.prepared.program)
        outcome = self._runs.finish(session, running)
        if session.spans is not None and session.spans.fresh:
            program, failed = running.ready.prepared.program, outcome.failed_at is not None
            session.spans.ran(running.ready.digest, frame.begun_ns, running.gpu_ns, len(program.body), failed)
        if frame.refused:  # the client got a failure as the answer and does not know these results
            for slot in running.ready.dynamic:
                self._runs.free(session, [running.run.bindings[slot]])
        elif running.run.reply:
            self._runs.check(session)
            if not self._answers.failure(session, conn):
                outputs = [out and out | self._data_of(session, out) for out in outcome.outputs]
                self._answers.say(conn, {"outputs": outputs, "values": _json_values(outcome.values)})

    def _data_of(self, session: Session, out: dict[str, Any]) -> dict[str, str]:
        """The data of a small result, for its description: the script often wants it next, and need not ask for it."""
        if not 0 < out["nbytes"] <= ANSWER_DATA:
            return {}
        return {"data": b64encode(self._runs.copied(session, out["buffer"], 0, out["nbytes"])).decode()}

    def _keep(self, session: Session, frame: Frame) -> None:
        """Register the decoded definition, so that later frames may name it."""
        assert frame.decoded is not None
        result, error = frame.decoded
        if error is not None:
            if frame.kind == Kind.DEFINE and isinstance(error, ExecutorError):
                session.programs.refuse(bytes(frame.payload), error)
            raise error
        if frame.kind == Kind.SOURCE:
            session.programs.keep_source(*result)
            return
        session.programs.keep(result)
        if session.spans is not None:
            session.spans.defined(result.digest, len(frame.payload), frame.begun_ns)

    def _stats(self, session: Session, wanted: int) -> dict[str, Any]:
        counters = session.counters
        stats: dict[str, Any] = {name: getattr(counters, name) for name in counters.__slots__}
        stats |= {"bytes": session.held_bytes, "buffers": len(session.buffers), "work": session.work.to_json()}
        stats["utilization"] = self._busy.percent(time.perf_counter_ns())
        return stats | self._vram.stats(session, wanted) | session.host_use().to_json()

    def _profile(self, session: Session, what: int) -> bytes:
        """Begin or end to measure the session's work, and take the next records."""
        if what == PROFILE_BEGIN:
            session.recording = session.recording or Recording()
        found = (session.recording or Recording()).take()
        if what == PROFILE_END:
            session.recording = None
        return found

    def _offer(self, session: Session, frame: Frame) -> bool:
        buffer, nbytes, head, name = unpack_content(frame.payload)
        if session.cuts is not None and not head:
            session.cuts.changed.add(buffer)
        try:
            return self._vram.contents.offer(session, buffer, nbytes, head, name)
        except ExecutorError as e:  # the upload that follows reports the failure; an OFFER always gets its own answer
            session.fail(e.code, str(e), frame.seq)
            return False

    def _ipc(self, session: Session, what: int, buffer: int, nbytes: int, name: bytes) -> dict[str, Any]:
        """Export a buffer to other sessions, import one, or take an export back."""
        ipc = self._vram.ipc
        if what == IPC_EXPORT:
            self._runs.settle()  # what the importer does comes after this session's work
            return {"name": ipc.export_buffer(session, buffer).hex()}
        if what == IPC_IMPORT:
            self._runs.require_room_for_buffer(session, nbytes)
            ipc.import_buffer(session, buffer, nbytes, name)
            return {}
        return {"known": ipc.release_export(session, name)}

    def _pin(self, session: Session, ask: dict[str, Any]) -> dict[str, Any]:
        """Pin contents, unpin them, or list what is pinned."""
        pins, tenant, name = self._vram.pins, session.holdings.account.tenant, str(ask.get("name", ""))
        try:
            if ask.get("do") == "add":
                return {"bytes": pins.add(session, name)}
            if ask.get("do") == "remove":
                return {"removed": pins.remove(tenant, name)}
        except ExecutorError as e:
            return {"error": str(e)}
        return {"pins": pins.of(tenant)}


def _json_values(values: list[Any]) -> list[Any]:
    return [{"re": v.real, "im": v.imag} if isinstance(v, complex) else v for v in values]
