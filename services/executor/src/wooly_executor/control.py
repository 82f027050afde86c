"""The executor's side of the control plane: opens and closes sessions, watches their leases, sends heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TypeVar

from opentelemetry.trace import SpanContext
from wooly_bus import contracts
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.channel.descriptors import free_descriptors
from wooly_bus.channel.peer_process import has_ended
from wooly_bus.channel.token import Pass, SharedPass, SignedPass
from wooly_bus.channel.tunnel import TunnelListener
from wooly_bus.errors import RefusedError
from wooly_bus.supervision import Work
from wooly_dispatch.events import Policy
from wooly_wis.messages import (
    CloseSessionReply,
    CloseSessionRequest,
    DeviceFacts,
    EndEpochReply,
    EndEpochRequest,
    ExecutorHeartbeat,
    HostSessionReply,
    HostSessionRequest,
    KeepCheckpointsReply,
    KeepCheckpointsRequest,
    MemoryState,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
    SessionPolicy,
    SteerSessionReply,
    SteerSessionRequest,
    WorkDone,
)

from wooly_executor.device_loop import DeviceLoop
from wooly_executor.errors import AdmissionError, ExecutorError, LoopEndedError
from wooly_executor.jobs.runner import Jobs
from wooly_executor.journal import JournalPublisher
from wooly_executor.memory.book import Scope
from wooly_executor.runtime import extensions
from wooly_executor.sessions import STOPPING, Ended
from wooly_executor.settings import PREFIX, ExecutorSettings
from wooly_executor.spans import hosted_under

T = TypeVar("T")
log = logging.getLogger("wooly.executor")
#: Maximum seconds that a heartbeat or a request to close waits for the device's thread.
BUSY_S = 0.5
#: Maximum seconds that the process waits at its end for the device's thread to close the clients' sessions.
CLIENTS_S = 1.0
#: Maximum number of contents that a heartbeat names.
WEIGHTS = 1024
#: Seconds between two samples of what traced sessions ran.
SAMPLE_S = 1.0
#: Maximum seconds between two questions whether all sessions have left.
LEAVE_POLL_S = 0.25
#: Seconds between two searches for checkpoints that nobody will restore.
SWEEP_S = 600.0
#: Number of ended sessions that are remembered, so that a router can ask how they ended.
ENDED_KEPT = 4096
#: After a client's connection broke: seconds between two looks whether its process has ended, and their number.
PROCESS_LOOK_S, PROCESS_LOOKS = 0.05, 20


def _stores_of(settings: ExecutorSettings) -> tuple[str, ...]:
    """The identities of the places of checkpoints: where they are stored, and others that are only read.

    It is empty if checkpoints are stored nowhere, or if the place cannot be used.
    """
    checkpoints = settings.checkpoint_files()
    try:
        return () if checkpoints is None else (checkpoints.identity(), *checkpoints.readable())
    except OSError as e:
        log.warning("no checkpoints are stored: %s", e)
        return ()


def _policy(message: SessionPolicy) -> Policy:
    return Policy(**{f.name: getattr(message, f.name) for f in fields(Policy)})


@dataclass(eq=False, slots=True)
class _Lease:
    """The lease of one session on this executor.

    Attributes:
        token: the token that renews the lease.
        length_s: seconds for which the session stays open without a renewal.
        epoch: how often the session has gone on in another executor.
        until: when the lease ends, on the actor's clock; infinity while the session is being opened.
        opening: done when the device's thread has opened the session.
        opened: whether the session was opened. Only the device's thread sets it, because only that thread knows the order of
            opening and closing.
    """

    token: str
    length_s: float
    epoch: int = 0
    until: float = math.inf
    opening: asyncio.Future[None] = field(init=False)
    opened: bool = False


class ExecutorActor(Actor):
    """Owns the leases of this executor's sessions. The device loop owns the sessions themselves.

    The device's thread may be busy for as long as one operator runs. So the event loop alone owns the leases, and answers
    renewals without the device. Only requests that change a session wait for the device, each without delaying the others.
    """

    def __init__(
        self,
        settings: ExecutorSettings,
        app: ServiceApp,
        loop: DeviceLoop,
        endpoints: list[str],
        tunnels: TunnelListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._app = app
        self._loop = loop
        self._endpoints = tuple(endpoints)
        self._clock = clock
        self._facts = DeviceFacts(
            **{**loop.runtime.facts(), "total_memory": loop.memory, "libraries": extensions.versions()}
        )
        self._leases: dict[str, _Lease] = {}
        self._closed: asyncio.Queue[Ended] = asyncio.Queue()
        #: How sessions ended, by id: events get lost while NATS or all routers are away. And sessions of which this is not
        #: known yet (`_queue_report`): heartbeats still list them.
        self._ended: OrderedDict[str, SessionClosed] = OrderedDict()
        self._ending: set[str] = set()
        self._events = asyncio.get_running_loop()
        loop.sessions.follow(self._on_closed)
        self._asked: Future[tuple[MemoryState, list[str]]] | None = None
        self._last: tuple[MemoryState, list[str]] = (MemoryState(capacity=loop.vram.capacity), [])
        self._busy_ns = 0
        self._busy_at = clock()
        self._leaving = ""
        self._stores = _stores_of(settings)
        # Not `alone`: these handlers share only the leases, and no handler changes a lease across an await.
        app.serve(contracts.EXECUTOR_SESSION_OPEN.at(settings.id), self.on_host_session)
        app.serve(contracts.EXECUTOR_SESSION_RENEW.at(settings.id), self.on_renew_session)
        app.serve(contracts.EXECUTOR_SESSION_CLOSE.at(settings.id), self.on_close_session)
        app.serve(contracts.EXECUTOR_SESSION_STEER.at(settings.id), self.on_steer_session)
        app.serve(contracts.EXECUTOR_CHECKPOINT_KEEP.at(settings.id), self.on_keep_checkpoints)
        app.serve(contracts.EXECUTOR_EPOCH_END.at(settings.id), self.on_end_epoch)
        self.jobs = Jobs(loop, settings.id)
        self.journal: JournalPublisher | None = None  # it exists as soon as NATS is connected
        app.serve(contracts.EXECUTOR_JOB_RUN.at(settings.id), self.alone(self.jobs.on_run_job))
        # Not `alone`: opening a tunnel uses none of the actor's state, and it waits for NATS.
        app.serve(contracts.EXECUTOR_TUNNEL_OPEN.at(settings.id), tunnels.on_open_tunnel)
        app.serve_tenants(contracts.EXECUTOR_TUNNEL_OPEN.at(settings.id), tunnels.on_open_tenants_tunnel)

    async def on_host_session(self, request: HostSessionRequest) -> HostSessionReply:
        """Open a session. A repeated request for the same session changes nothing, even while the first one waits.

        A session that left this executor, and comes back, begins anew: the request to close it may have been lost. A late request
        from before it left is refused.
        """
        lease = self._leases.get(request.session_id)
        if lease is not None and lease.token == request.token and lease.epoch < request.epoch:
            self._close(request.session_id, "it goes on in another executor", passing=True)
            lease = None
        if lease is None:
            lease = self._begin(request)
        elif lease.token == request.token and lease.epoch > request.epoch:
            raise RefusedError("executor.closed", f"session {request.session_id} has gone on since this request")
        elif lease.token != request.token:
            raise RefusedError(AdmissionError.code, f"session {request.session_id} is already open with another token")
        elif lease.opened:
            lease.until = self._clock() + lease.length_s
        with _refused():
            await asyncio.shield(lease.opening)  # a request that is cancelled does not cancel the opening
        if self._leases.get(request.session_id) is not lease:
            raise RefusedError("executor.closed", f"session {request.session_id} was closed while it was being opened")
        return HostSessionReply(endpoints=self._endpoints)

    def _begin(self, request: HostSessionRequest) -> _Lease:
        """Make the device's thread open a session. The lease starts when the session is open, and ends if the router gave up
        meanwhile.

        Raises:
            RefusedError: no client could connect, because this process has no free file descriptors.
        """
        spare = self._settings.spare_descriptors
        if free_descriptors() < spare + 2:  # below that, the acceptor lets new connections wait
            raise RefusedError(
                AdmissionError.code,
                f"the executor has no free file descriptor for a client ({spare} are reserved for the sessions that run); raise "
                "its limit with `ulimit -n`",
                retryable=True,
            )
        policy = _policy(request.policy or SessionPolicy(priority=request.priority))
        entry, hosted = self._entry(request), hosted_under()
        lease = self._leases[request.session_id] = _Lease(request.token, request.lease_s, request.epoch)

        def open_session() -> None:
            self._open(request, entry, policy, hosted)
            lease.opened = True

        def opened(opening: asyncio.Future[None]) -> None:
            if opening.cancelled() or opening.exception() is not None:
                self._forget(request.session_id, lease)
            else:
                lease.until = self._clock() + lease.length_s

        lease.opening = asyncio.wrap_future(self._loop.call(open_session))
        lease.opening.add_done_callback(opened)
        return lease

    def _forget(self, session_id: str, lease: _Lease) -> None:
        """Remove a lease, unless a newer lease has the same session id."""
        if self._leases.get(session_id) is lease:
            del self._leases[session_id]

    def _entry(self, request: HostSessionRequest) -> Pass:
        """Create the pass that admits the session's client.

        Raises:
            RefusedError: the settings name one router's key, and the request has another.
        """
        trusted = self._settings.channel_key
        if trusted and request.channel_key != trusted:
            raise RefusedError(
                "executor.channel_key",
                f"the router's channel key differs from {PREFIX}CHANNEL_KEY; set the variable to the router's public key",
            )
        if not request.channel_key:
            return SharedPass(request.token)
        clock, opened = self._clock, self._clock()
        return SignedPass(
            request.channel_key,
            request.session_id,
            request.tenant,
            self._settings.id,
            lambda: request.at + clock() - opened,
        )

    def _open(self, request: HostSessionRequest, entry: Pass, policy: Policy, hosted: SpanContext | None) -> None:
        if request.overcommit_vram_percent is not None:
            self._loop.vram.overcommit_percent = request.overcommit_vram_percent
        self._loop.sessions.open(
            request.session_id,
            entry,
            request.quota,
            policy,
            request.tenant,
            model=request.model,
            scope=Scope(request.dedup),
            swappable=request.swap,
            hosted=hosted,
            opaque=request.opaque_kernels,
            claim=request.claim,
            epoch=request.epoch,
            part=request.part,
            repeats=request.repeats,
        )

    async def on_steer_session(self, request: SteerSessionRequest) -> SteerSessionReply:
        """Change how a session is scheduled: class, weight, suspended, exclusive."""
        dispatch = self._loop.dispatch

        def steer() -> tuple[Policy, bool, bool]:
            policy, _, exclusive = dispatch.treatment(request.session_id)
            if request.policy is not None:
                policy = _policy(request.policy)
            if request.priority is not None:
                policy = replace(policy, priority=request.priority)
            if request.weight is not None:
                policy = replace(policy, weight=request.weight)
            exclusive = exclusive if request.exclusive is None else request.exclusive
            suspended = self._loop.sessions.suspend(request.session_id, request.suspended, request.hold)
            dispatch.steer(request.session_id, policy, suspended, exclusive)
            return dispatch.treatment(request.session_id)

        policy, suspended, exclusive = await self._ask(steer)
        return SteerSessionReply(policy=SessionPolicy(**asdict(policy)), suspended=suspended, exclusive=exclusive)

    async def on_end_epoch(self, request: EndEpochRequest) -> EndEpochReply:
        """Adapt the windows to the measurements of an epoch."""
        measured = request.slowdown_permille, request.idle_permille
        return EndEpochReply(windows_ns=await self._ask(lambda: self._loop.dispatch.epoch_ended(*measured)))

    async def _ask(self, function: Callable[[], T]) -> T:
        """Run `function` in the device loop's thread and return its result.

        Raises:
            RefusedError: `function` raised an `ExecutorError`.
        """
        with _refused():
            return await asyncio.wrap_future(self._loop.call(function))

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Renew a lease. This waits neither for the device nor for other requests."""
        lease = self._leases.get(request.session_id)
        if lease is None or lease.token != request.token:
            raise RefusedError("executor.no_session", f"session {request.session_id} is not open here")
        if lease.opened:
            lease.until = self._clock() + lease.length_s
        return RenewSessionReply(lease_s=lease.length_s)

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """End a session or a job. If one of its operators occupies the device, the reply says so; the session ends after that
        operator.
        """
        known = self.jobs.cancel(request.session_id) or request.session_id in self._leases
        ended = None if known else self._ended.get(request.session_id)
        closing = asyncio.wrap_future(
            self._close(request.session_id, request.reason or "closed by the router", passing=request.passing)
        )
        done, _ = await asyncio.wait((closing,), timeout=BUSY_S)
        if not done:
            return CloseSessionReply(closed=known, running_s=self._loop.launcher.running_s(request.session_id))
        with _refused():
            return CloseSessionReply(closed=closing.result(), ended=ended)

    def _close(self, session_id: str, reason: str, *, passing: bool) -> Future[bool]:
        self._leases.pop(session_id, None)
        return self._loop.call(lambda: self._loop.sessions.close(session_id, reason, passing=passing))

    def works(self) -> dict[str, Work]:
        """The tasks that run until the process ends: heartbeats, leases, closed sessions, spans."""
        return {
            "heartbeats": self._send_heartbeats,
            "leases": self._expire_leases,
            "closed sessions": self.report_closed,
            "samples": self._sample_spans,
            "checkpoints": self._sweep_checkpoints,
        }

    async def _send_heartbeats(self) -> None:
        while True:
            heartbeat = await self.heartbeat()
            # An executor without its device must not get sessions. An old heartbeat says nothing when NATS is back.
            if not self._loop.lost and self._app.connected:
                await self._app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, heartbeat)
            await asyncio.sleep(self._settings.heartbeat_s)

    async def on_keep_checkpoints(self, request: KeepCheckpointsRequest) -> KeepCheckpointsReply:
        """Keep or remove checkpoints whose sessions no executor has."""
        kept, dropped = (
            [(n.tenant, n.session_id, part) for n in named for part in range(n.devices)]
            for named in (request.keep, request.drop)
        )
        await self._ask(lambda: self._loop.cuts.keep(kept, dropped))
        return KeepCheckpointsReply()

    async def leave(self) -> None:
        """Wait until all sessions and jobs have left, for at most `drain_s`: routers let them go on elsewhere."""
        until = self._clock() + self._settings.drain_s
        self._leaving = "its executor is being stopped"
        while self._clock() < until and (self._leases or self.jobs.sessions()):
            await self._app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, await self.heartbeat())
            await asyncio.sleep(min(self._settings.heartbeat_s, LEAVE_POLL_S))

    async def say_end(self, reason: str) -> None:
        """Send the last heartbeat: this executor stops, so the router can restart its sessions elsewhere at once."""
        last = self._heartbeat().model_copy(update={"ending": reason[:1024], "sessions": ()})
        await self._app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, last)

    async def end_clients(self) -> None:
        """Close the sessions that have clients. If the device is busy for longer than `CLIENTS_S`, they end with the process
        instead.
        """
        with contextlib.suppress(ExecutorError, TimeoutError):
            async with asyncio.timeout(CLIENTS_S):
                await asyncio.wrap_future(self._loop.call(self._loop.sessions.end_clients))

    async def _expire_leases(self) -> None:
        while True:
            now = self._clock()
            for session_id, lease in list(self._leases.items()):
                if now > lease.until and not self._is_late(session_id, now):
                    log.warning(
                        "session %s ends: the router did not renew its lease of %.0f s", session_id, lease.length_s
                    )
                    self._close(session_id, "the session's lease lapsed", passing=True)
            await asyncio.sleep(self._settings.heartbeat_s)

    def _is_late(self, session_id: str, now: float) -> bool:
        """Whether a session's lease was not renewed for half of its length, but its client's connection is open.

        The client may be stopped (Ctrl-Z, a debugger), its machine may sleep or be overloaded, or no router may run.
        """
        lease = self._leases[session_id]
        if lease.until - lease.length_s / 2 < now <= lease.until + self._settings.silence_s:
            return self._loop.sessions.connected(session_id)
        return False

    async def _sample_spans(self) -> None:
        """Record spans of what traced sessions ran. This waits while the device is busy."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            await asyncio.wrap_future(self._loop.call(self._loop.sessions.sample_spans))

    async def _sweep_checkpoints(self) -> None:
        """Remove checkpoints that nobody will restore."""
        while True:
            await asyncio.wrap_future(self._loop.call(lambda: self._loop.cuts.sweep(self._loop.sessions.all())))
            await asyncio.sleep(SWEEP_S)

    async def heartbeat(self) -> ExecutorHeartbeat:
        """The current heartbeat.

        While the device's thread is in one long operation, the heartbeat repeats the last known state of the memory.
        """
        asked = self._asked = self._asked or self._loop.call(self._read_memory)
        done, _ = await asyncio.wait([asyncio.wrap_future(asked)], timeout=BUSY_S)
        if done:
            if (
                self._asked is asked
            ):  # else another task has asked again: an executor that is being left sends heartbeats, too
                self._asked = None
            with contextlib.suppress(LoopEndedError):
                self._last = asked.result()
        return self._heartbeat()

    def _heartbeat(self) -> ExecutorHeartbeat:
        memory, weights = self._last
        now, busy = self._clock(), self._loop.busy.total_ns
        share = (busy - self._busy_ns) / 1e9 / max(now - self._busy_at, 1e-6)
        self._busy_ns, self._busy_at = busy, now
        # From the leases, not from the device's thread: the thread may be busy, and the router must not miss a session that was
        # just opened.
        sessions = [session_id for session_id, lease in self._leases.items() if lease.opened]
        return ExecutorHeartbeat(
            executor_id=self._settings.id,
            node=self._settings.node,
            pid=os.getpid(),
            device=self._facts,
            endpoints=self._endpoints,
            sessions=tuple(dict.fromkeys([*sessions, *sorted(self._ending), *self.jobs.sessions()])),
            memory_used=memory.own + memory.contents,
            late=tuple([session_id for session_id in sessions if self._is_late(session_id, now)]),
            utilization=min(1.0, max(0.0, share)),
            weights=tuple(weights),
            memory=memory,
            work=WorkDone.model_validate(self._loop.processing.work.to_json()),
            journal="" if self.journal is None else self.journal.name,
            leaving=self._leaving,
            checkpoints=next(iter(self._stores), ""),
            checkpoints_read=self._stores[1:],
        )

    def _read_memory(self) -> tuple[MemoryState, list[str]]:
        vram = self._loop.vram
        return vram.state(), vram.contents.largest(WEIGHTS)

    def _on_closed(self, closed: Ended) -> None:
        """Note a closed session (in the loop's thread). A lease that is not opened yet belongs to a newer session with the same
        id.
        """
        lease = self._leases.get(closed.session_id)
        ended = lease if lease is not None and lease.opened else None
        with contextlib.suppress(RuntimeError):  # the event loop has ended, so nothing is left to report to
            self._events.call_soon_threadsafe(self._note_closed, ended, closed)

    def _note_closed(self, lease: _Lease | None, closed: Ended) -> None:
        if lease is not None:
            self._forget(closed.session_id, lease)
        self._ending.add(closed.session_id)
        self._queue_report(closed, PROCESS_LOOKS)

    def _queue_report(self, closed: Ended, looks: int) -> None:
        """Queue the report of a closed session. If its connection broke because its client's process has ended, it ends for good.

        The process may still be ending, so this looks several times.
        """
        if closed.process and closed.reason != STOPPING:
            if has_ended(closed.process):
                closed = closed._replace(reason="its client's process has ended", passing=False)
            elif looks:
                self._events.call_later(PROCESS_LOOK_S, self._queue_report, closed, looks - 1)
                return
        self._ending.discard(closed.session_id)
        # Do not report an id that is open again. Sessions that end with the executor are in its last heartbeat.
        if closed.session_id not in self._leases and closed.reason != STOPPING:
            self._remember(closed)
            self._closed.put_nowait(closed)

    def _remember(self, ended: Ended) -> None:
        self._ended[ended.session_id] = self._closed_event(ended._replace(contents=()))
        self._ended.move_to_end(ended.session_id)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    async def report_closed(self) -> None:
        """Report closed sessions to the router until cancelled."""
        while True:
            await self._report(await self._closed.get())

    async def report_last_closed(self) -> None:
        """Report the closed sessions that were not reported yet, and return."""
        while not self._closed.empty():
            await self._report(self._closed.get_nowait())

    async def _report(self, ended: Ended) -> None:
        await self._app.publish(contracts.EXECUTOR_SESSION_CLOSED, self._closed_event(ended))

    def _closed_event(self, ended: Ended) -> SessionClosed:
        return SessionClosed(
            session_id=ended.session_id,
            executor_id=self._settings.id,
            reason=ended.reason[:4096],
            contents=ended.contents,
            passing=ended.passing,
            epoch=ended.epoch,
            hung_up=ended.hung_up,
        )


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Convert an `ExecutorError` to a `RefusedError`."""
    try:
        yield
    except ExecutorError as e:
        raise RefusedError(e.code, str(e), retryable=e.retryable) from e
