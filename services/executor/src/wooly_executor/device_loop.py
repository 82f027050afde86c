"""The one thread that owns the device: it reads all sessions' channels, runs what the dispatch core decides, and answers.

A frame that occupies the device (RUN) is a program of the core. What grows with a client's bytes (DEFINE, SOURCE) is taken in by
decoders beside this thread. Any other frame only moves bytes between the host's memory and the channel, and is processed as soon
as the frames before it are. Other threads talk to the loop through `call`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from opentelemetry.trace import SpanContext
from wooly_bus.channel import (
    Acceptor,
    ChannelServer,
    Connected,
    Connection,
    Disconnected,
    Endpoint,
    Event,
    StrangerLimits,
)
from wooly_bus.channel.token import Pass
from wooly_dispatch.events import Policy
from wooly_wis.codec import DIGEST_SIZE, digest
from wooly_wis.errors import DecodeError
from wooly_wis.frames import (
    PROTOCOL,
    WRITE_HEAD,
    Kind,
    unpack_content,
    unpack_json,
    unpack_read,
    unpack_run,
)

from wooly_executor.answers import Answers, awaited
from wooly_executor.collector import Collector
from wooly_executor.cores import WorkerClock
from wooly_executor.decoding import Decoders, Decoding
from wooly_executor.dispatch import Dispatch
from wooly_executor.entrance import Entrance, Hello, TurnedAwayError, refusal
from wooly_executor.errors import (
    AdmissionError,
    ContextLostError,
    ExecutorError,
    HostMemoryError,
    InternalError,
    LoopEndedError,
    UnknownSessionError,
    forget_frames,
)
from wooly_executor.estimates import Cut, turns
from wooly_executor.host_account import Holder, HostLimits, to_end
from wooly_executor.landing import land, sink
from wooly_executor.memory.book import Scope
from wooly_executor.pace import FASTEST, FULL, Pace
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.protocol import Execution, Runtime
from wooly_executor.session import Frame, Session
from wooly_executor.spans import spans_of
from wooly_executor.tiers import Tiers, Work
from wooly_executor.usage import Taken, UsageBook
from wooly_executor.usual import UsualBook
from wooly_executor.vram import SwapSettings, Vram

log = logging.getLogger("wooly.executor")
T = TypeVar("T")
QUEUE_FRAMES = 4096
QUEUE_BYTES = 32 << 20
WINDOW = 64 << 20
STOPPING = "the executor is stopping"
#: Frames that decoders take in.
_DECODED = frozenset((Kind.DEFINE, Kind.SOURCE))
#: Frames that wait while their session is held or suspended.
_WORK = frozenset((Kind.RUN, *_DECODED))
#: Frames behind which nothing is begun: what is defined decides what runs take, what is read must not change on its way.
_BARS = frozenset((*_DECODED, Kind.READ))
#: Bytes of a definition that this thread takes in itself while no other session is open: that takes less than 10 ms, and a
#: decoder's answer would come 0.2 ms later.
DECODED_HERE = 8 << 10
#: Bytes of a definition that this thread looks up among the programs that are here: its digest takes some 60 us.
LOOKED_UP_HERE = 64 << 10
#: Frames of a session that are processed before others have their turn.
TURN = 64
#: What one of them takes; a definition that takes longer counts as several.
FRAME_NS = 50_000
#: Bytes of a RUN from which on its buffers are so many that looking them up and freeing them counts as the device's time.
MANY_BUFFERS = 16 << 10
#: Bytes of a PIN frame.
PIN_BYTES = 4096
#: Seconds between two looks at what sessions make the host hold.
REVIEW_S = 0.5
#: Frames that need the session's memory on the device, and not the device.
_TOUCHES = frozenset((Kind.READ, Kind.OFFER, Kind.SEAL))


class DeviceLoop:
    """Runs until `stop`. Public methods other than `run` may be called from any thread."""

    def __init__(
        self,
        runtime: Runtime,
        memory: int | None = None,
        dispatch: Dispatch | None = None,
        swap: SwapSettings | None = None,
        tiers: Tiers | None = None,
        pace: Pace | None = None,
        collector: Collector | None = None,
        strangers: StrangerLimits | None = None,
        limits: HostLimits | None = None,
    ) -> None:
        self.runtime = runtime
        self.tiers = tiers
        self.pace = pace
        self.work = Work()
        self.dispatch = dispatch or Dispatch()
        self.server = ChannelServer(
            {int(Kind.WRITE): WRITE_HEAD.size},
            lambda conn, kind, prefix, nbytes: sink(self.vram, conn, prefix, nbytes),
            fatal=(ContextLostError,),
        )
        self.entrance = Entrance()
        self.acceptor = Acceptor(
            self.entrance.check, refusal, self.server.enter, hello=int(Kind.HELLO), limits=strangers
        )
        self.memory = memory or int(runtime.facts()["total_memory"])
        self.vram = Vram(
            self.memory, self.dispatch, swap or SwapSettings(), self.call, self._proceed, device=runtime.device
        )
        #: Told of every session that ends, why (an empty reason: by its client, in order), and what contents it shared.
        self.on_closed: Callable[[str, str, tuple[str, ...]], None] = lambda session_id, reason, contents: None
        #: Told what `run` ends of, where that is not `stop`, before anything else is done about it; and that `run` has ended.
        self.on_failed: Callable[[BaseException], None] = lambda error: None
        self.on_ended: Callable[[], None] = lambda: None
        #: Why no session can be served any more; empty while they can.
        self.lost = ""
        self.busy_ns = 0
        #: The session that has the device, and since when by `time.perf_counter_ns`; None: the device's thread is on its own.
        self.occupied: tuple[str, int] | None = None
        self.usage = UsageBook()
        self._collector = collector
        self._usual = UsualBook()
        self._workers = WorkerClock()
        self.limits = limits or HostLimits()
        self._store = ProgramStore(runtime, self.limits.programs)
        self.decoders = Decoders(self.limits.decode_s)
        self._gate = self.decoders.gate
        self._sessions: dict[str, Session] = {}
        self._polled = self._reviewed = 0
        self._unreviewed = False  # something came since sessions were last reviewed
        self._turn = 0
        self._more: dict[Session, None] = {}
        self._answers = Answers(
            self.server, self._proceed, lambda session, why: self._end_session(session, why), self.limits
        )
        if tiers is not None:
            self._store.on_dropped = tiers.forget
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ended = False

    # -- from other threads ------------------------------------------------------------------------------------------

    def listen(self, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> Endpoint:
        """Listen for channels; before `run` starts."""
        return self.acceptor.listen(endpoint, tls)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have the loop's thread run `function`, also when nobody waits for the result any more.

        After the end of `run` the future has a `LoopEndedError`.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who waits for it may be cancelled, the call is not

        def job() -> None:
            try:
                if self._ended:
                    raise LoopEndedError(self.lost or STOPPING)
                future.set_result(function())
            except Exception as e:
                future.set_exception(e)

        self._calls.put(job)
        if self._ended:
            self._refuse_calls()
        self.server.wake()
        return future

    def open_session(
        self,
        session_id: str,
        entry: Pass,
        quota: int | None,
        policy: Policy | None = None,
        tenant: str = "",
        *,
        model: str = "",
        scope: Scope = Scope.OFF,
        swappable: bool = True,
        hosted: SpanContext | None = None,
        opaque: bool = False,
    ) -> None:
        """Admit a session (in the loop's thread).

        `hosted`: what it is opened under, where it is traced. `opaque`: it may launch kernels that nobody here can check.

        Raises:
            AdmissionError: the id is taken, or what is asked for cannot be promised.
        """
        if session_id in self._sessions:
            raise AdmissionError(f"session {session_id} is open already")
        swappable = swappable and not self.dispatch.fifo  # in the order of arrival nobody can be passed over
        most = self.vram.quota(session_id, quota, swappable)
        session = Session(session_id, entry, most, self._store, self.runtime, swappable=swappable, promised=quota or 0)
        self.vram.open(session, tenant, scope)
        session.hosted, session.tenant, session.opaque = hosted, tenant, opaque
        session.limits = self.limits
        session.used = self.usage.opened(session_id, tenant, model, session.borne, self.vram.clock())
        self._sessions[session_id] = session
        self.dispatch.opened(session, policy or Policy(), tenant)
        self.entrance.open(session_id, entry)

    def bill_decoding(self, session_id: str, core_ns: int) -> None:
        """What a session runs was decoded before it was opened: it took so many ns of a core (in the loop's thread)."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.used.decoded(core_ns)

    def close_session(self, session_id: str, reason: str) -> bool:
        """End a session and free all it has (in the loop's thread). False if there is none of that id."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self.entrance.close(session_id)
        self._more.pop(session, None)
        self.dispatch.closed(session)
        if session.spans is not None:
            session.spans.end(session, reason)
        self.usage.closed(session_id, self.vram.clock())
        session.release()
        conn, session.conn = session.conn, None
        if conn is not None:
            conn.owner = None  # neither keeps the other: both go now, not when cycles are looked for (`collector`)
            if not conn.closed:
                conn.close(reason)
        self.on_closed(session_id, reason, session.largest_brought())
        return True

    def end_clients(self) -> None:
        """Close the sessions that clients have (in the loop's thread): whatever else is to end, they need not wait for it."""
        for session_id, session in list(self._sessions.items()):
            if session.conn is not None:
                self.close_session(session_id, STOPPING)

    def sessions(self) -> list[Session]:
        """The open sessions (in the loop's thread)."""
        return list(self._sessions.values())

    def suspend(self, session_id: str, paused: bool | None, hold: str | None) -> bool:
        """Somebody suspends a session, or a hold does, whose reason its client is told (in the loop's thread).

        Returns:
            Whether it is suspended now, for either.

        Raises:
            UnknownSessionError: there is none of that id.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id} is not open here")
        if paused is not None:
            session.paused = paused
        if hold is not None:
            session.hold = hold
            self._refuse(session)
        self._proceed(session)
        return session.paused or bool(session.hold)

    def _refuse(self, session: Session) -> None:
        """Answer what the client of a held session waits for: why it would wait. What it submitted is kept, and runs later."""
        conn, stuck = session.conn, False
        if not session.hold or conn is None or conn.closed:
            return
        for frame in session.queue:
            stuck = stuck or frame.kind in _WORK
            if stuck and not frame.refused and awaited(frame):
                frame.refused = True
                self._answers.refuse(conn, frame, "executor.held", session.hold)

    def take_usage(self) -> list[Taken]:
        """What sessions used since the last time (in the loop's thread)."""
        self._workers.look()
        return self.usage.take(self.dispatch.priority_of, self.vram.clock())

    def sample_spans(self) -> None:
        """Tell what traced sessions ran (in the loop's thread)."""
        now = time.time_ns()
        for session in self._sessions.values():
            if session.spans is not None:
                session.spans.sample(session, now)

    def running_s(self, session_id: str) -> float:
        """Seconds for which the device has been at work for a session without a look at what others want; 0: it is not."""
        occupied = self.occupied
        if occupied is None or occupied[0] != session_id:
            return 0.0
        return (time.perf_counter_ns() - occupied[1]) / 1e9

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()
        self.server.wake()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called, or until it fails: then `on_failed` is told, and clients are, before it returns."""
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException as e:
            code = e.code if isinstance(e, ContextLostError) else LoopEndedError.code
            self.lost = str(e) if isinstance(e, ContextLostError) else f"the executor failed: {type(e).__name__}: {e}"
            self.on_failed(e)
            for session in list(self._sessions.values()):
                self._attempt(self._tell_lost, session, code)
            self._attempt(self._answers.flush)
        for session_id in list(self._sessions):
            self._attempt(self.close_session, session_id, self.lost or STOPPING)
        self._ended = True
        for ending in (
            self._refuse_calls,
            self.vram.stop,
            self.decoders.stop,
            self.acceptor.close,
            self.server.close,
            self.on_ended,
        ):
            self._attempt(ending)

    def _attempt(self, step: Callable[..., object], *args: object) -> None:
        """One step of the end: after a failure nothing is sure to work, and no step may keep the next ones from being done."""
        try:
            step(*args)
        except BaseException:
            log.exception("while the device's thread was ending")

    def _serve(self) -> None:
        dispatch, vram = self.dispatch, self.vram
        self._workers.attach()
        if self._collector is not None:
            self._collector.begin()
        if self.pace is not None:
            self.pace.begin()
        self.acceptor.start()
        self.runtime.device.attach()
        while not self._stopping.is_set():
            busy = dispatch.launch is not None or not self._calls.empty() or vram.due
            self._poll(0 if busy else self._timeout())
            self._run_calls()
            if dispatch.launch is None and self._collector is not None:
                self._collector.rest(alone=not self._sessions)
            while dispatch.launch is not None and not self._stopping.is_set():
                self._launch()
                self._run_calls()

    def _refuse_calls(self) -> None:
        """Answer the calls that nobody will run."""
        with contextlib.suppress(queue.Empty):  # another thread refuses, too
            while True:
                self._calls.get_nowait()()

    def _timeout(self) -> float | None:
        """Seconds until there may be something to do though no event comes; None: there will not."""
        timeouts = [
            self.vram.timeout(),
            None if self._collector is None else self._collector.timeout(),
            self._answers.timeout(),
            0.0 if self._more else None,
            REVIEW_S if self._unreviewed else None,
        ]
        return min([t for t in timeouts if t is not None], default=None)

    def _tell_lost(self, session: Session, code: str) -> None:
        """Answer what a client waits for: why its session is served no more."""
        conn = session.conn
        if conn is not None and not conn.closed:
            for frame in session.queue:
                if not frame.refused and awaited(frame):
                    self._answers.refuse(conn, frame, code, self.lost)

    def _poll(self, timeout: float | None) -> None:
        gate = self._gate
        gate.resting = timeout != 0
        events = self.server.poll(timeout)
        gate.resting = False
        self._turn += 1
        if self._more:
            more, self._more = self._more, {}
            for session in more:
                self._proceed(session)
        for event in events:
            try:
                self._on_event(event)
            except (MemoryError, RecursionError) as e:
                self._exhausted(event.conn, e)
        if self._answers.lending:
            self._answers.take_back()
        self._answers.flush()
        self._polled = now = time.perf_counter_ns()
        self._unreviewed = self._unreviewed or bool(events)
        if self._unreviewed and now - self._reviewed > REVIEW_S * 1e9:
            self._reviewed, self._unreviewed = now, False
            self._review()

    def _review(self) -> None:
        """End a session where sessions make the host hold too much."""
        holders = [Holder(s.id, s.account.tenant or s.id, s.host_use()) for s in self._sessions.values()]
        found = to_end(holders, self.limits, self._store.held)
        if found is not None:
            self._end_session(self._sessions[found[0]], found[1])

    def _exhausted(self, conn: Connection, error: MemoryError | RecursionError) -> None:
        """What a client sent needs more memory, or a deeper stack, than there is: its session ends, and no other."""
        what = "host memory" if isinstance(error, MemoryError) else "stack"
        why = f"{HostMemoryError.code}: the executor has not enough {what} for what its client sent"
        why += f": {error}" if str(error) else ""
        if conn.owner is not None:
            self._end_session(conn.owner, why)
        else:
            conn.close(why)

    def _end_session(self, session: Session, why: str) -> None:
        """A session ends, alone, for something that its client did."""
        log.warning("session %s of tenant %s ends: %s", session.id, session.tenant or "default", why)
        self.close_session(session.id, why)

    def _run_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get_nowait()()
        if self.vram.due or self.vram.timeout() == 0:
            self.vram.arrange()

    def _launch(self) -> None:
        """Carry out the core's decision. It hears of frames that came meanwhile before it decides again."""
        launch = self.dispatch.launch
        work, gpu_ns, core_ns, stopped = self.dispatch.take(), 0, 0, None
        if launch is not None:
            self._gate.priority = launch.priority
        if work is not None:
            session, workers, beyond = work[0], self._workers.read(), self.runtime.beyond_ns
            gpu_ns, last = self._piece(*work)
            core_ns = gpu_ns + self._workers.read() - workers + self.runtime.beyond_ns - beyond
            self.busy_ns += gpu_ns
            session.used.launched(gpu_ns, core_ns, self.vram.clock(), self._pace_of(session, work[1], last, core_ns))
            if self.pace is not None:
                self.pace.worked(gpu_ns)
            if last < work[3]:
                stopped = (*work[:2], last)
            self._answers.flush()
        if self._collector is not None:
            self._collector.worked()
        self._look()
        self.dispatch.done(gpu_ns, stopped, core_ns)

    def _ppm(self) -> int:
        """The pace of a core now, in millionths."""
        return FULL if self.pace is None else self.pace.ppm

    def _pace_of(self, session: Session, frame: Frame, last: int, core_ns: int) -> int:
        """The pace at which a launch is priced, in millionths: the core's, or that at which such runs are usual."""
        running, kernels = frame.running, frame.cut.kernels
        if self.pace is None:
            return FULL
        if running is None or core_ns <= 0:
            return self.pace.ppm
        running.core_ns += core_ns
        took = core_ns * self.pace.ppm // FULL
        running.paced_ns += took
        usual = self._usual.of(session.tenant, running.ready.digest, running.prepared)
        price = usual.price(running.paced_ns, running.core_ns, sum(kernels[:last]), sum(kernels))
        piece = max(price - running.priced_ns, 0)
        running.priced_ns += piece
        if last == len(kernels) and running.execution.outcome.failed_at is None:
            usual.ran(running.paced_ns, running.core_ns)
        return min(max(self._usual.settled(session.tenant, took, piece) * FULL // core_ns, 1), FASTEST)

    def _look(self) -> None:
        """Take in what came, unless somebody looked just now."""
        if time.perf_counter_ns() - self._polled > self.dispatch.patience_ns():
            self._poll(0)

    def _on_event(self, event: Event) -> None:
        conn = event.conn
        if isinstance(event, Connected):
            self._welcome(conn, event.admitted)
            return
        if isinstance(event, Disconnected):
            session: Session | None = conn.owner
            if session is not None:
                if event.reason:
                    log.warning("session %s: %s", session.id, event.reason)
                self.close_session(session.id, event.reason or "its client is gone")
            return
        if conn.owner is None:
            return  # its session ended with this frame under way
        session = conn.owner
        session.idle_since = None
        session.queue.append(Frame(event.seq, event.kind, event.payload))
        session.queued_bytes += len(event.payload)
        self._proceed(session)
        if session.hold:
            self._refuse(session)
        if len(session.queue) > QUEUE_FRAMES or session.queued_bytes > QUEUE_BYTES:
            conn.pause()

    def _welcome(self, conn: Connection, hello: Hello) -> None:
        """Serve a client that the entrance let in, unless its session ended meanwhile."""
        session = self._sessions.get(hello.session_id)
        if session is None or session.entry is not hello.entry:
            conn.send(*refusal(TurnedAwayError.code, "the session is not open here"))
            self.server.flush()
            conn.close("the session is not open here")
            return
        session.tiers = self.tiers
        session.jit = hello.jit
        session.spans = spans_of(session.id, session.hosted, hello.trace)
        if session.spans is not None:
            session.used.trace = session.spans.parent
        session.conn, conn.owner = conn, session
        conn.ack(1)
        facts = self.runtime.facts() | {"total_memory": session.quota}
        welcome = {"protocol": PROTOCOL, "session_id": session.id, "window": WINDOW, "device": facts}
        self._answers.say(conn, welcome, Kind.WELCOME)

    # -- frames ------------------------------------------------------------------------------------------------------

    def _proceed(self, session: Session) -> None:
        """Process what need not wait for the device, and submit what does, as far as that can be known."""
        queue, conn = session.queue, session.conn
        if session.turn != self._turn:
            session.turn, session.served = self._turn, 0
        while conn is not None and not conn.closed and not session.unread:
            if session.known and queue[0].kind != Kind.RUN:
                if queue[0].kind in _TOUCHES and not self._reachable(session, queue[0]):
                    return
                if queue[0].kind == Kind.PIN and session.sealing:
                    return  # what is to be kept is not hashed yet
                if queue[0].kind in _DECODED and not self._decoded(session, queue[0]):
                    return
                session.served += 1
                if session.served > TURN:  # though it is alone: somebody may be waiting to be let in
                    self._more[session] = None
                    return
                self._end(session, conn, queue[0], None)
            elif session.known < len(queue) and not session.barred:
                frame = queue[session.known]
                if frame.kind == Kind.RUN and session.sources and self._compiling(session, frame):
                    return
                if frame.kind == Kind.RUN and session.jit == "full" and self._awaits(session, frame):
                    return
                kind = frame.kind
                if kind == Kind.RUN and not self.vram.admit(session, frame):
                    return
                session.known += 1
                session.barred = kind in _BARS
                if kind == Kind.RUN:
                    frame.cut = session.expected(bytes(frame.payload[:DIGEST_SIZE]))
                    self.dispatch.submit(session, frame)
                elif kind in _DECODED and session.known > 1:
                    self._decode(session, frame)  # beside the runs before it
            else:
                if not queue and conn.waiting_for_sink and not session.lending:
                    conn.resume()
                if conn.paused and len(queue) < QUEUE_FRAMES // 2 and session.queued_bytes < QUEUE_BYTES // 2:
                    conn.resume()
                return

    def _decoded(self, session: Session, frame: Frame) -> bool:
        """Whether a frame that is first in its queue is taken in. If not, somebody is at it, or its session is suspended."""
        if frame.decoded is None and session.decoding is None:
            if session.hold or session.paused:
                return False
            nbytes, program = len(frame.payload), frame.kind == Kind.DEFINE
            alone = len(self._sessions) == 1 and nbytes <= DECODED_HERE
            if alone or (program and nbytes <= LOOKED_UP_HERE and self._store.known(digest(frame.payload))):
                work, begun = self._taking_in(session, frame), time.thread_time_ns()
                try:
                    frame.decoded = work(), None
                except ContextLostError:
                    raise
                except Exception as e:
                    forget_frames(e)
                    frame.decoded = None, e
                took = time.thread_time_ns() - begun
                session.used.decoded(took, self._ppm())
                session.served += took // FRAME_NS
            else:
                self._decode(session, frame)
        return frame.decoded is not None

    def _decode(self, session: Session, frame: Frame) -> None:
        """Have decoders take in a frame. Nothing behind it is begun before it is processed."""
        if session.hold or session.paused or session.decoding is not None:
            return

        def done(result: Any, error: Exception | None, core_ns: int) -> None:
            self.call(lambda: taken_in(result, error, core_ns))

        def taken_in(result: Any, error: Exception | None, core_ns: int) -> None:
            session.used.decoded(core_ns, self._ppm())
            session.decoding, frame.decoded = None, (result, error)
            if session.conn is not None and session.queue:
                self._proceed(session)

        priority = self.dispatch.priority_of(session.id)
        session.decoding = Decoding(
            session.tenant or session.id, priority, len(frame.payload), self._taking_in(session, frame), done
        )
        self.decoders.submit(session.decoding)

    def _taking_in(self, session: Session, frame: Frame) -> Callable[[], Any]:
        """What takes in a frame, in any thread."""
        frame.begun_ns = time.time_ns()
        take = session.define if frame.kind == Kind.DEFINE else session.take_source

        def work() -> Any:
            with torch.inference_mode():
                return take(bytes(frame.payload))

        return work

    def _reachable(self, session: Session, frame: Frame) -> bool:
        """Whether the memory that a frame touches is there, with room for what it changes."""
        if frame.kind == Kind.OFFER:
            try:
                buffer, _, head, _ = unpack_content(frame.payload)
            except DecodeError:
                return True  # it is refused when its turn comes
            if not head:
                return self.vram.writable(session, buffer)
        return self.vram.present(session)

    def _awaits(self, session: Session, frame: Frame) -> bool:
        """Whether a RUN must wait until it is known if there is a plan of its program."""
        tiers = session.tiers
        if tiers is None or session.awaiting:
            return session.awaiting
        try:
            run = unpack_run(frame.payload)
            ready = session.programs.get(run.digest)
            params = ready.unpack_params(run.params) if ready is not None else []
        except (DecodeError, ExecutorError):
            return False  # it is refused when its turn comes
        if ready is None:
            return False

        def go_on() -> None:
            session.awaiting = False
            if session.conn is not None and session.queue:
                self._proceed(session)

        session.awaiting = tiers.awaits(ready, params, go_on, session.spans)
        return session.awaiting

    def _compiling(self, session: Session, frame: Frame) -> bool:
        """Whether a RUN must wait until kernels of the session's own are compiled."""
        if session.compiling:
            return True
        ready = session.programs.get(bytes(frame.payload[:DIGEST_SIZE]))

        def go_on() -> None:
            session.compiling = False
            if session.conn is not None and session.queue:
                self._proceed(session)

        session.compiling = ready is not None and any(k.then(lambda: self.call(go_on)) for k in ready.kernels)
        return session.compiling

    def _piece(self, session: Session, frame: Frame, first: int, last: int) -> tuple[int, int]:
        """Run some kernels of a frame, unless a higher class arrives.

        Returns:
            The device time that they took, in ns, and the first that was not run.
        """
        conn = session.conn
        if conn is None or conn.closed or frame.ended:
            return 0, last
        gpu_ns = beside_ns = 0
        many = len(frame.payload) > MANY_BUFFERS
        since = time.perf_counter_ns() if many else 0
        error: Exception | None = None
        try:
            if not first:
                if session.spans is not None and session.spans.fresh:
                    frame.begun_ns = time.time_ns()
                self.vram.begun(session, frame)
                frame.running = session.begin(unpack_run(frame.payload), frame.seq)
            if many:
                beside_ns = time.perf_counter_ns() - since
            if frame.running is not None:
                self.occupied = session.id, time.perf_counter_ns()
                times = self._advance(conn, frame.running.execution, frame.cut, first, last)
                self.occupied = None
                gpu_ns = sum(times)
                frame.running.gpu_ns += gpu_ns
                if conn.closed:
                    return gpu_ns + beside_ns, last
                last = first + len(times)
                if frame.running.execution.outcome.failed_at is None:
                    frame.running.ready.observe(frame.cut, first, times)
        except ContextLostError:
            raise
        except Exception as e:
            error, self.occupied = e, None
            if many and not beside_ns:
                beside_ns = time.perf_counter_ns() - since
            if frame.running is not None:
                session.abandon(frame.running)
                frame.running = None
        if last == len(frame.cut.kernels) or error is not None:
            since = time.perf_counter_ns() if many else 0
            self._end(session, conn, frame, error)
            if many:
                beside_ns += time.perf_counter_ns() - since
            self._proceed(session)
        return gpu_ns + beside_ns, last

    def _advance(self, conn: Connection, execution: Execution, cut: Cut, first: int, last: int) -> list[int]:
        """Run kernels `first` to `last` - 1, or up to an edge where a higher class waits. Returns what each took, in ns.

        What arrives is read at the edges, as often as the class in flight has to look.
        """
        patience, dispatch = self.dispatch.patience_ns(), self.dispatch
        times: list[int] = []
        begin, looked = first, self._polled
        for end in turns(cut.kernels, first, last, patience):
            times += execution.advance(cut.edges[begin:end])
            begin = end
            if begin < last and (now := time.perf_counter_ns()) - looked > patience:
                looked = now
                if self.server.waiting():
                    self._poll(0)
                    if dispatch.overtaken() or conn.closed:
                        break
                if not self._calls.empty() or self.vram.due:
                    break
        return times

    def _end(self, session: Session, conn: Connection, frame: Frame, error: Exception | None) -> None:
        """A frame's turn has come, or what it asked of the device is done: answer it, and go on to those behind it."""
        session.queue.popleft()
        session.known -= 1
        session.queued_bytes -= len(frame.payload)
        frame.ended = True
        if frame.kind in _BARS:
            session.barred = False
        try:
            if error is not None:
                raise error
            self._process(session, conn, frame)
        except ContextLostError:
            raise
        except (MemoryError, RecursionError) as e:
            forget_frames(e)
            self._exhausted(conn, e)
            return
        except (ExecutorError, DecodeError) as e:
            forget_frames(e)
            session.fail(e.code, str(e), frame.seq, getattr(e, "instruction", None))
            self._answers.failure_if_awaited(session, conn, frame)
        except Exception as e:
            log.exception("session %s: frame %d failed", session.id, frame.seq)
            forget_frames(e)
            session.fail(InternalError.code, f"{type(e).__name__}: {e}", frame.seq)
            self._answers.failure_if_awaited(session, conn, frame)
        conn.ack(frame.seq)
        if not session.queue:
            self.vram.idle(session)

    def _process(self, session: Session, conn: Connection, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.RUN:
            running = frame.running
            assert running is not None
            computing = running.ready.computing
            kernel_ns = getattr(running.execution, "kernel_ns", 0)
            for work in (self.work, session.work):
                work.ran(running.prepared, computing, running.gpu_ns, kernel_ns)
            session.used.ran(running.ready.digest, running.ready.prepared.program)
            outcome = session.finish(running)
            if session.spans is not None and session.spans.fresh:
                program, failed = running.ready.prepared.program, outcome.failed_at is not None
                session.spans.ran(running.ready.digest, frame.begun_ns, running.gpu_ns, len(program.body), failed)
            if frame.refused:  # the client took the answer for a failure, and knows nothing of these results
                for slot in running.ready.dynamic:
                    session.free(running.run.bindings[slot])
            elif running.run.reply and not self._answers.failure(session, conn):
                self._answers.say(conn, {"outputs": outcome.outputs, "values": _json_values(outcome.values)})
        elif kind == Kind.WRITE:
            land(session)  # data is in place already, or on its way, or its failure is kept
        elif kind in _DECODED:
            self._keep(session, frame)
        elif frame.refused:
            return
        elif kind == Kind.READ:
            buffer, offset, nbytes = unpack_read(frame.payload)
            if not self._answers.failure(session, conn):
                memory = session.memory(buffer, offset, nbytes, writing=False)
                self._answers.data(session, conn, memory)
        elif kind == Kind.SYNC:
            if not self._answers.failure(session, conn):
                self._answers.say(conn, {})
        elif kind == Kind.STATS:
            counters = session.counters
            stats = {name: getattr(counters, name) for name in counters.__slots__}
            stats |= {"bytes": session.held_bytes, "buffers": len(session.buffers), "work": session.work.to_json()}
            self._answers.say(conn, stats | self.vram.stats(session) | session.host_use().to_json())
        elif kind == Kind.OFFER:
            self._answers.say(conn, {"known": self._offer(session, frame)})
        elif kind == Kind.SEAL:
            buffer, nbytes, _, name = unpack_content(frame.payload)
            self.vram.contents.seal(session, buffer, nbytes, name)
        elif kind == Kind.PIN:
            if len(frame.payload) > PIN_BYTES:
                raise DecodeError(f"PIN frame of {len(frame.payload)} bytes, at most {PIN_BYTES}")
            self._answers.say(conn, self._pin(session, unpack_json(frame.payload)))
        elif kind == Kind.CLOSE:
            self.close_session(session.id, "")
        else:
            conn.close(f"frame kind {kind} is not one that a client sends")

    def _keep(self, session: Session, frame: Frame) -> None:
        """What a frame defines is taken in: runs may name it, and programs."""
        assert frame.decoded is not None
        result, error = frame.decoded
        if error is not None:
            raise error
        if frame.kind == Kind.SOURCE:
            session.keep_source(*result)
            return
        session.keep(result)
        if session.spans is not None:
            session.spans.defined(result.digest, len(frame.payload), frame.begun_ns)

    def _offer(self, session: Session, frame: Frame) -> bool:
        buffer, nbytes, head, name = unpack_content(frame.payload)
        try:
            return self.vram.contents.offer(session, buffer, nbytes, head, name)
        except ExecutorError as e:  # the upload that follows will say so again; this question is always answered
            session.fail(e.code, str(e), frame.seq)
            return False

    def _pin(self, session: Session, ask: dict[str, Any]) -> dict[str, Any]:
        """Keep contents, let them go, or list what is kept."""
        vram, tenant, name = self.vram, session.account.tenant, str(ask.get("name", ""))
        try:
            if ask.get("do") == "add":
                return {"bytes": vram.pins.add(session, name)}
            if ask.get("do") == "remove":
                return {"removed": vram.pins.remove(tenant, name)}
        except ExecutorError as e:
            return {"error": str(e)}
        return {"pins": vram.pins.of(tenant)}


def _json_values(values: list[Any]) -> list[Any]:
    return [{"re": v.real, "im": v.imag} if isinstance(v, complex) else v for v in values]
