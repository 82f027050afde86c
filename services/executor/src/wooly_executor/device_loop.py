"""The one thread that owns the device: it reads all sessions' channels, chooses whose program runs next, runs it, and answers.

Sessions take turns, one frame each. That choice, `_next_session`, is the seam at which the dispatch core will order programs.
Other threads talk to the loop through `call`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from wooly_bus.channel import ChannelServer, Connected, Connection, Disconnected, Endpoint, Event, ProtocolError
from wooly_wis.errors import DecodeError
from wooly_wis.frames import (
    MAX_CHUNK,
    PROTOCOL,
    WRITE_HEAD,
    Kind,
    pack_json,
    unpack_json,
    unpack_read,
    unpack_run,
)

from wooly_executor.errors import AdmissionError, ExecutorError, InternalError, OutOfMemoryError
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.protocol import Runtime
from wooly_executor.session import Session

log = logging.getLogger("wooly.executor")
T = TypeVar("T")
QUEUE_FRAMES = 4096
QUEUE_BYTES = 32 << 20
WINDOW = 64 << 20
_SLICE_S = 0.002


class DeviceLoop:
    """Runs until `stop`. Public methods other than `run` may be called from any thread."""

    def __init__(self, runtime: Runtime, memory: int | None = None) -> None:
        self.runtime = runtime
        self.server = ChannelServer({int(Kind.WRITE): WRITE_HEAD.size}, self._sink)
        self.memory = memory or int(runtime.facts()["total_memory"])
        self.on_closed: Callable[[str], None] = lambda session_id: None
        self.busy_ns = 0
        self._store = ProgramStore(runtime)
        self._sessions: dict[str, Session] = {}
        self._turn: deque[Session] = deque()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()

    # -- from other threads ------------------------------------------------------------------------------------------

    def listen(self, endpoint: Endpoint) -> Endpoint:
        """Listen for channels; before `run` starts."""
        return self.server.listen(endpoint)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the loop's thread run `function`."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)

        self._calls.put(job)
        self.server.wake()
        return future

    def open_session(self, session_id: str, token: str, quota: int | None) -> None:
        """Admit a session (in the loop's thread).

        Raises:
            AdmissionError: the id is taken, or the device has less memory than asked for.
        """
        if session_id in self._sessions:
            raise AdmissionError(f"session {session_id} is open already")
        if quota is not None and quota > self.memory:
            raise AdmissionError(f"{quota} bytes asked for, the device has {self.memory}")
        self._sessions[session_id] = Session(session_id, token, quota or self.memory, self._store, self.runtime)

    def close_session(self, session_id: str, reason: str) -> bool:
        """End a session and free all it has (in the loop's thread). False if there is none of that id."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.release()
        if session.conn is not None and not session.conn.closed:
            session.conn.owner = None
            session.conn.close(reason)
        self.on_closed(session_id)
        return True

    def sessions(self) -> list[Session]:
        """The open sessions (in the loop's thread)."""
        return list(self._sessions.values())

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()
        self.server.wake()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called."""
        with torch.inference_mode():
            while not self._stopping.is_set():
                idle = not self._turn and self._calls.empty()
                for event in self.server.poll(None if idle else 0):
                    self._on_event(event)
                self._run_calls()
                until = time.perf_counter() + _SLICE_S
                while self._turn:
                    self._step(self._next_session())
                    if time.perf_counter() > until:
                        break
        for session_id in list(self._sessions):
            self.close_session(session_id, "the executor is stopping")
        self.server.close()

    def _run_calls(self) -> None:
        while True:
            try:
                job = self._calls.get_nowait()
            except queue.Empty:
                return
            job()

    def _next_session(self) -> Session:
        return self._turn.popleft()

    def _on_event(self, event: Event) -> None:
        conn = event.conn
        if isinstance(event, Connected):
            return
        if isinstance(event, Disconnected):
            session: Session | None = conn.owner
            if session is not None:
                if event.reason:
                    log.warning("session %s: %s", session.id, event.reason)
                self.close_session(session.id, event.reason)
            return
        if conn.owner is None:
            self._hello(conn, event.kind, event.payload, event.seq)
            return
        session = conn.owner
        self._wait(session)
        session.queue.append((event.seq, event.kind, event.payload))
        session.queued_bytes += len(event.payload)
        if len(session.queue) > QUEUE_FRAMES or session.queued_bytes > QUEUE_BYTES:
            conn.pause()

    def _hello(self, conn: Connection, kind: int, payload: bytearray, seq: int) -> None:
        try:
            if kind != Kind.HELLO:
                raise ProtocolError("the first frame must be HELLO")
            hello = unpack_json(payload)
            if hello.get("protocol") != PROTOCOL:
                raise ProtocolError(f"protocol {hello.get('protocol')} is not spoken here, {PROTOCOL} is")
            session = self._sessions.get(str(hello.get("session_id")))
            if session is None or session.token != hello.get("token") or session.conn is not None:
                raise ProtocolError("unknown session or wrong token")
        except (ProtocolError, DecodeError) as e:
            conn.close(str(e))
            return
        session.conn, conn.owner, conn.authenticated = conn, session, True
        conn.ack(seq)
        facts = self.runtime.facts() | {"total_memory": session.quota}
        conn.send(
            Kind.WELCOME,
            pack_json({"protocol": PROTOCOL, "session_id": session.id, "window": WINDOW, "device": facts}),
        )

    # -- one frame ---------------------------------------------------------------------------------------------------

    def _wait(self, session: Session) -> None:
        if not session.waiting:
            session.waiting = True
            self._turn.append(session)

    def _step(self, session: Session) -> None:
        session.waiting = False
        conn = session.conn
        if conn is None or conn.closed:
            return
        if session.lending and not self._given_back(conn):
            if not conn.closed:
                self._wait(session)
            return
        session.lending = False
        if not session.queue:
            if conn.waiting_for_sink:
                conn.resume()
            return
        seq, kind, payload = session.queue.popleft()
        session.queued_bytes -= len(payload)
        started = time.perf_counter_ns()
        try:
            self._process(session, conn, seq, kind, payload)
        except (ExecutorError, DecodeError) as e:
            session.fail(e.code, str(e), seq, getattr(e, "instruction", None))
            self._answer_if_awaited(session, conn, kind, payload)
        except Exception as e:
            log.exception("session %s: frame %d failed", session.id, seq)
            session.fail(InternalError.code, f"{type(e).__name__}: {e}", seq)
            self._answer_if_awaited(session, conn, kind, payload)
        self.busy_ns += time.perf_counter_ns() - started
        conn.ack(seq)
        if session.queue or session.lending:
            self._wait(session)
        elif conn.waiting_for_sink:
            conn.resume()
        if conn.paused and len(session.queue) < QUEUE_FRAMES // 2 and session.queued_bytes < QUEUE_BYTES // 2:
            conn.resume()

    def _given_back(self, conn: Connection) -> bool:
        """Whether the answer that leaves straight from the buffers' memory is gone; until then nothing of it may change."""
        for event in self.server.poll(0):
            self._on_event(event)
        if conn.queued_bytes and not self._turn:
            for event in self.server.poll(0.1):
                self._on_event(event)
        return not conn.closed and not conn.queued_bytes

    def _answer_if_awaited(self, session: Session, conn: Connection, kind: int, payload: Any) -> None:
        if kind in (Kind.READ, Kind.SYNC, Kind.STATS) or (kind == Kind.RUN and _wants_reply(payload)):
            self._answer_failure(session, conn)

    def _process(self, session: Session, conn: Connection, seq: int, kind: int, payload: Any) -> None:
        if kind == Kind.RUN:
            run = unpack_run(payload)
            outcome = session.run(run, seq)
            if run.reply and not self._answer_failure(session, conn):
                conn.send(Kind.RESULT, pack_json({"outputs": outcome.outputs, "values": _json_values(outcome.values)}))
        elif kind == Kind.DEFINE:
            session.define(bytes(payload))
        elif kind == Kind.WRITE:
            return  # the data is in place already, or its failure is kept
        elif kind == Kind.READ:
            buffer, offset, nbytes = unpack_read(payload)
            if self._answer_failure(session, conn):
                return
            memory = session.memory(buffer, offset, nbytes, writing=False)
            for at in range(0, nbytes, MAX_CHUNK):
                conn.send(Kind.DATA, memory[at : at + MAX_CHUNK])
            session.lending = nbytes > 0
            session.counters.bytes_out += nbytes
        elif kind == Kind.SYNC:
            if not self._answer_failure(session, conn):
                conn.send(Kind.RESULT, b"{}")
        elif kind == Kind.STATS:
            counters = session.counters
            stats = {name: getattr(counters, name) for name in counters.__slots__}
            conn.send(Kind.RESULT, pack_json(stats | {"bytes": session.bytes, "buffers": len(session.buffers)}))
        elif kind == Kind.CLOSE:
            self.close_session(session.id, "")
        else:
            conn.close(f"frame kind {kind} is not one that a client sends")

    def _answer_failure(self, session: Session, conn: Connection) -> bool:
        failure = session.take_failure()
        if failure is None:
            return False
        conn.send(Kind.ERROR, pack_json(failure.to_json()))
        return True

    def _sink(self, conn: Connection, kind: int, prefix: bytes, data_len: int) -> memoryview | None:
        """Where the data of a WRITE belongs: straight in the buffer, once everything before it is done."""
        session: Session | None = conn.owner
        if session is None:
            raise ProtocolError("data before the hello")
        if session.queue or session.lending:
            return None
        buffer, offset = WRITE_HEAD.unpack(prefix)
        try:
            memory = session.memory(buffer, offset, data_len, writing=True)
        except ExecutorError as e:
            session.fail(e.code, str(e), 0)
            return memoryview(bytearray(data_len))  # taken off the wire and dropped; the failure is kept
        except (RuntimeError, MemoryError) as e:
            session.fail(OutOfMemoryError.code, str(e), 0)
            return memoryview(bytearray(data_len))
        session.counters.bytes_in += data_len
        return memory


def _wants_reply(payload: Any) -> bool:
    try:
        return unpack_run(payload).reply
    except DecodeError:
        return False


def _json_values(values: list[Any]) -> list[Any]:
    return [{"re": v.real, "im": v.imag} if isinstance(v, complex) else v for v in values]
