"""The open sessions of one device: how a session opens, is suspended, and ends. The device loop's thread owns this module."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry.trace import SpanContext
from wooly_bus.channel import ChannelServer, Connection
from wooly_bus.channel.token import Pass
from wooly_dispatch.events import Policy
from wooly_wis.frames import PROTOCOL, Kind
from wooly_wis.messages import DirectSession

from wooly_executor.answers import Answers
from wooly_executor.billing.usage import UsageBook
from wooly_executor.checkpoints.cuts import Cuts
from wooly_executor.collectives.service import Collectives
from wooly_executor.connection_admission import ConnectionAdmission, Hello, UnknownHelloError, refusal
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import AdmissionError, HostMemoryError, UnknownSessionError
from wooly_executor.flow import ClientCame, Held, Signal, note
from wooly_executor.host_account import Holder, HostLimits, session_to_end
from wooly_executor.memory.book import Scope
from wooly_executor.plans.tiers import Tiers
from wooly_executor.post import Post
from wooly_executor.programs import Author, ProgramStore
from wooly_executor.runtime import extensions
from wooly_executor.runtime.protocol import Runtime
from wooly_executor.session import Session
from wooly_executor.session_programs import SessionPrograms
from wooly_executor.spans import spans_of
from wooly_executor.vram import Vram

log = logging.getLogger("wooly.executor")
#: Reason of sessions that end because the executor stops.
STOPPING = "the executor is stopping"
#: Maximum bytes that a client may send before the executor acknowledges earlier frames.
WINDOW = 64 << 20


class Ended(NamedTuple):
    """A session that ended.

    Attributes:
        session_id: its id.
        reason: why; empty: its client closed it.
        contents: names of the contents that it shared.
        passing: it may go on in another executor.
        epoch: its epoch.
        process: id of the client's process, if its connection was closed and the process is known; else 0.
        hung_up: the client's system has closed the connection, as it does if the client's process ends.
    """

    session_id: str
    reason: str
    contents: tuple[str, ...]
    passing: bool
    epoch: int
    process: int = 0
    hung_up: bool = False


class Sessions:
    """The sessions of one device, by id.

    Args:
        runtime: runs programs.
        tiers: decides how programs run; None: all programs run at tier 0.
        vram: the device's memory.
        cuts: takes and restores the cuts of sessions.
        collectives: brings the ranks of groups together.
        dispatch: orders the runs.
        store: has the programs of all sessions.
        usage: measures what sessions use.
        admission: admits clients.
        answers: sends answers to clients.
        post: queue of events of sessions.
        server: the channels of the clients.
        limits: limits of the host memory that sessions use.
    """

    def __init__(
        self,
        runtime: Runtime,
        tiers: Tiers | None,
        vram: Vram,
        cuts: Cuts,
        collectives: Collectives,
        dispatch: Dispatch,
        store: ProgramStore,
        usage: UsageBook,
        admission: ConnectionAdmission,
        answers: Answers,
        post: Post,
        server: ChannelServer,
        limits: HostLimits,
    ) -> None:
        self._runtime, self._tiers, self._vram, self._dispatch = runtime, tiers, vram, dispatch
        self._cuts, self._collectives = cuts, collectives
        self._store, self._usage, self._admission, self._answers = store, usage, admission, answers
        self._post, self._server, self._limits = post, server, limits
        self._open: dict[str, Session] = {}
        self._closed: Callable[[Ended], None] | None = None
        #: Names this process, so that clients know whether their sessions are on one executor.
        self._instance = secrets.token_hex(16)

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, session_id: str) -> Session:
        return self._open[session_id]

    @property
    def direct(self) -> bool:
        """Whether clients open their sessions themselves, without a router."""
        return self._admission.direct

    def get(self, session_id: str) -> Session | None:
        """The open session with this id, or None."""
        return self._open.get(session_id)

    def all(self) -> list[Session]:
        """The open sessions."""
        return list(self._open.values())

    def follow(self, closed: Callable[[Ended], None]) -> None:
        """Call `closed` in the device's thread for every session that ends from now on."""
        self._closed = closed

    # -- beginning ---------------------------------------------------------------------------------------------------

    def open(
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
        claim: int = 0,
        job_bytes: Callable[[], int] | None = None,
        epoch: int = 0,
        part: int = 0,
        repeats: bool = False,
    ) -> None:
        """Open a session.

        Args:
            session_id: id of the session.
            entry: the pass that admits its client.
            quota: bytes of device memory that it declares; None: no declaration.
            policy: class, weight and token buckets.
            tenant: tenant of the session.
            model: name of the model, for metering.
            scope: with whom it shares contents.
            swappable: it may be swapped out.
            hosted: trace context in which it is opened; None: it is not traced.
            opaque: it may launch kernels that cannot be checked.
            claim: bytes with which it counts at least if it declares none.
            job_bytes: returns the host memory that its client needs in this process, if the session is a job.
            epoch: how often the session has gone on in another executor.
            part: index of the session's device.
            repeats: it repeats work that the cluster has lost first.

        Raises:
            AdmissionError: the id is in use, or the declared memory cannot be promised.
        """
        if session_id in self._open:
            raise AdmissionError(f"session {session_id} is already open on this executor")
        swappable = swappable and not self._dispatch.fifo  # in order of arrival, no session can be passed over
        most = self._vram.quota(session_id, quota, swappable, claim)
        holdings = self._vram.open(session_id, tenant, scope, swappable=swappable, declared=quota, claim=claim)
        borne = functools.partial(self._vram.borne, holdings.account)
        session = Session(
            id=session_id,
            tenant=tenant,
            entry=entry,
            quota=most,
            holdings=holdings,
            programs=SessionPrograms(self._store, Author(tenant or session_id, opaque), self._limits.definitions),
            used=self._usage.opened(session_id, tenant, model, borne, self._vram.clock()),
            tiers=self._tiers,
            hosted=hosted,
            job_bytes=job_bytes,
            epoch=epoch,
            part=part,
        )
        session.used.part, session.used.epoch, session.used.repeating = part, epoch, repeats
        self._vram.enter(session)
        self._open[session_id] = session
        self._dispatch.opened(session, policy or Policy(), tenant)
        self._admission.open(session_id, entry)

    def welcome(self, conn: Connection, hello: Hello) -> None:
        """Start to serve an admitted client, unless its session has ended meanwhile."""
        if hello.opens is not None:
            self.close(hello.session_id, "its client has come back with another connection", passing=True)
            try:
                self._open_direct(hello, hello.opens)
            except AdmissionError as e:
                self._admission.close(hello.session_id)
                self._turn_away(conn, e.code, str(e))
                return
        session = self._open.get(hello.session_id)
        if session is None or session.entry is not hello.entry:
            unknown = UnknownHelloError()
            self._turn_away(conn, unknown.code, str(unknown))
            return
        session.jit = hello.jit
        session.spans = spans_of(session.id, session.hosted, hello.trace)
        if session.spans is not None:
            session.used.trace = session.spans.parent
        session.conn, conn.owner = conn, session
        conn.ack(1)
        libraries = extensions.facts(opaque=session.programs.author.opaque)
        facts = self._runtime.facts() | {"total_memory": session.quota, "libraries": libraries}
        facts |= {"instance": self._instance, "ipc": True, "groups_recover": True, "group_shares": True}
        facts["group_bytes"] = self._limits.session // 2
        welcome = {"protocol": PROTOCOL, "session_id": session.id, "window": WINDOW, "device": facts}
        if conn.segment is not None:
            welcome["segment"] = conn.segment.nbytes
            welcome["shared_operands"] = self._runtime.device.host
        self._answers.say(conn, welcome, Kind.WELCOME)
        self._post.add(session, ClientCame(planned=hello.jit == "full" and session.tiers is not None))

    def _open_direct(self, hello: Hello, wanted: DirectSession) -> None:
        self.open(
            hello.session_id,
            hello.entry,
            wanted.quota,
            Policy(priority=wanted.priority, weight=wanted.weight),
            wanted.tenant,
            scope=Scope(wanted.dedup),
            swappable=wanted.swap,
            opaque=hello.opaque,
        )

    def _turn_away(self, conn: Connection, code: str, why: str) -> None:
        conn.send(*refusal(code, why))
        self._server.flush()
        conn.close(why)

    # -- while open --------------------------------------------------------------------------------------------------

    def suspend(self, session_id: str, paused: bool | None, hold: str | None) -> bool:
        """Suspend a session or resume it, or set or end its hold. Its client gets the reason of a hold.

        Args:
            session_id: id of the session.
            paused: suspend or resume; None: no change.
            hold: reason of the hold, empty to end it; None: no change.

        Returns:
            Whether the session is suspended or held from now on.

        Raises:
            UnknownSessionError: no session has this id.
        """
        session = self._open.get(session_id)
        if session is None:
            raise UnknownSessionError(f"session {session_id} is not open on this executor")
        now = session.flow.hold
        if paused is not None:
            self._post.add(session, Signal.PAUSED if paused else Signal.RESUMED)
        if hold is not None:
            self._post.add(session, Held(hold))
        return (now.paused if paused is None else paused) or bool(now.reason if hold is None else hold)

    def bill_decoding(self, session_id: str, core_ns: int) -> None:
        """Bill a session for core time, in ns, that was used to decode its programs before it was opened."""
        session = self._open.get(session_id)
        if session is not None:
            session.used.decoded(core_ns)

    def sample_spans(self) -> None:
        """Record spans of what traced sessions ran."""
        now = time.time_ns()
        for session in self._open.values():
            if session.spans is not None:
                session.spans.sample(session.counters, session.work, now)

    def review(self) -> None:
        """End a session if sessions exceed the limits of host memory."""
        holders = [Holder(s.id, s.holdings.account.tenant or s.id, s.host_use()) for s in self._open.values()]
        found = session_to_end(holders, self._limits, self._store.held)
        if found is not None:
            self.end(self._open[found[0]], found[1])

    # -- ending ------------------------------------------------------------------------------------------------------

    def close(
        self, session_id: str, reason: str, *, passing: bool = False, process: int = 0, hung_up: bool = False
    ) -> bool:
        """End a session and free all its memory. Returns False if no session has this id.

        Args:
            session_id: its id.
            reason: why; empty: its client closed it.
            passing: it may go on in another executor, because nothing that it did is the reason.
            process: see `Ended`.
            hung_up: see `Ended`.
        """
        session = self._open.pop(session_id, None)
        if session is None:
            return False
        note(session.flow, Signal.CLOSED)
        self._admission.close(session_id)
        self._dispatch.closed(session)
        if session.spans is not None:
            session.spans.end(session.counters, session.work, session.holdings.swaps, reason)
        self._usage.closed(session_id, self._vram.clock())
        self._vram.close(session)
        self._cuts.closed(session, passing=passing)
        self._collectives.closed(session, reason, passing=passing)
        session.release()
        conn, session.conn = session.conn, None
        if conn is not None:
            # breaks the reference cycle, so that both are freed now and not at the next garbage collection (`collector`)
            conn.owner = None
            if not conn.closed:
                conn.close(reason, passing=passing)
        if self._closed is not None:
            self._closed(Ended(session_id, reason, session.largest_shared(), passing, session.epoch, process, hung_up))
        return True

    def end(self, session: Session, why: str) -> None:
        """End one session because of something that its client did."""
        log.warning("session %s of tenant %s ends: %s", session.id, session.tenant or "default", why)
        self.close(session.id, why)

    def exhausted(self, conn: Connection, error: MemoryError | RecursionError) -> None:
        """End the session whose client sent something that exceeds the host memory or the stack. Other sessions go on."""
        what = "host memory" if isinstance(error, MemoryError) else "stack"
        why = f"{HostMemoryError.code}: the executor has not enough {what} to process what the client sent"
        why += f": {error}" if str(error) else ""
        if conn.owner is not None:
            self.end(conn.owner, why)
        else:
            conn.close(why)

    def connected(self, session_id: str) -> bool:
        """Whether a session's client has an open connection. Any thread may call this."""
        session = self._open.get(session_id)
        conn = None if session is None else session.conn
        return conn is not None and not conn.closed

    def gone(self, conn: Connection, reason: str, *, hung_up: bool = False) -> None:
        """End the session of a connection that was closed. `hung_up`: see `Ended`."""
        session: Session | None = conn.owner
        if session is not None:
            if reason:
                log.warning("session %s ends: %s", session.id, reason)
            why = reason or "its client closed the connection"
            self.close(session.id, why, passing=True, process=conn.process, hung_up=hung_up)

    def end_clients(self) -> None:
        """Close the sessions that have clients, so that clients need not wait for the rest of the shutdown."""
        for session_id, session in list(self._open.items()):
            if session.conn is not None:
                self.close(session_id, STOPPING, passing=True)
