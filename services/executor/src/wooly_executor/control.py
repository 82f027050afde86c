"""The executor's side of the control plane: takes sessions, watches their leases, says that it is alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TypeVar

from opentelemetry.trace import SpanContext
from wooly_bus import contracts
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
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
from wooly_executor.jobs import Jobs
from wooly_executor.memory.book import Scope
from wooly_executor.sessions import STOPPING
from wooly_executor.settings import PREFIX, ExecutorSettings
from wooly_executor.spans import hosted_under

T = TypeVar("T")
log = logging.getLogger("wooly.executor")
#: Seconds that a heartbeat waits for the device's thread.
BUSY_S = 0.5
#: Seconds that the end waits for the device's thread to close what clients have.
CLIENTS_S = 1.0
#: Contents that a heartbeat names.
WEIGHTS = 1024
#: Seconds between two looks at what traced sessions ran.
SAMPLE_S = 1.0


def _policy(message: SessionPolicy) -> Policy:
    return Policy(**{f.name: getattr(message, f.name) for f in fields(Policy)})


@dataclass(eq=False, slots=True)
class _Lease:
    """What keeps a session open here.

    Attributes:
        token: whoever shows it may prolong the lease.
        length_s: how long the session lives without a word from the router.
        until: when it lapses, on the actor's clock; infinity while the session is being opened.
        opening: the session's way through the device's thread.
        opened: set by the device's thread, which alone knows in which order a session was opened and closed.
    """

    token: str
    length_s: float
    until: float = math.inf
    opening: asyncio.Future[None] = field(init=False)
    opened: bool = False


class ExecutorActor(Actor):
    """Owns the leases of this executor's sessions; the sessions themselves belong to the device loop.

    The device's thread may be away for as long as an operator takes. So leases belong to the event loop alone: whatever keeps a
    session alive is answered from them at once, and only what changes a session waits for the device, each request for itself.
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
        self._facts = DeviceFacts(**{**loop.runtime.facts(), "total_memory": loop.memory})
        self._leases: dict[str, _Lease] = {}
        self._closed: asyncio.Queue[tuple[str, str, tuple[str, ...]]] = asyncio.Queue()
        self._events = asyncio.get_running_loop()
        loop.sessions.follow(self._on_closed)
        self._asked: Future[tuple[MemoryState, list[str]]] | None = None
        self._last: tuple[MemoryState, list[str]] = (MemoryState(capacity=loop.vram.capacity), [])
        self._busy_ns = 0
        self._busy_at = clock()
        # Not `alone`: these share nothing but leases, which change between two waits, never across one.
        app.serve(contracts.EXECUTOR_SESSION_OPEN.at(settings.id), self.on_host_session)
        app.serve(contracts.EXECUTOR_SESSION_RENEW.at(settings.id), self.on_renew_session)
        app.serve(contracts.EXECUTOR_SESSION_CLOSE.at(settings.id), self.on_close_session)
        app.serve(contracts.EXECUTOR_SESSION_STEER.at(settings.id), self.on_steer_session)
        app.serve(contracts.EXECUTOR_EPOCH_END.at(settings.id), self.on_end_epoch)
        self.jobs = Jobs(loop, settings.id)
        app.serve(contracts.EXECUTOR_JOB_RUN.at(settings.id), self.alone(self.jobs.on_run_job))
        # Not `alone`: opening a tunnel touches nothing of the actor's, and waits for NATS.
        app.serve(contracts.EXECUTOR_TUNNEL_OPEN.at(settings.id), tunnels.on_open_tunnel)
        app.serve_tenants(contracts.EXECUTOR_TUNNEL_OPEN.at(settings.id), tunnels.on_open_tenants_tunnel)

    async def on_host_session(self, request: HostSessionRequest) -> HostSessionReply:
        """Take a session. Asking twice for the same one changes nothing, also while the device keeps the first one waiting."""
        lease = self._leases.get(request.session_id)
        if lease is None:
            lease = self._begin(request)
        elif lease.token != request.token:
            raise RefusedError(AdmissionError.code, f"session {request.session_id} is open already")
        elif lease.opened:
            lease.until = self._clock() + lease.length_s
        with _refused():
            await asyncio.shield(lease.opening)  # one who gives up takes nobody's session with it
        if self._leases.get(request.session_id) is not lease:
            raise RefusedError("executor.closed", f"session {request.session_id} was closed while it was being opened")
        return HostSessionReply(endpoints=self._endpoints)

    def _begin(self, request: HostSessionRequest) -> _Lease:
        """Have the device's thread open a session. Its lease begins when it is open, and lapses if the router gave it up."""
        policy = _policy(request.policy or SessionPolicy(priority=request.priority))
        entry, hosted = self._entry(request), hosted_under()
        lease = self._leases[request.session_id] = _Lease(request.token, request.lease_s)

        def open_it() -> None:
            self._open(request, entry, policy, hosted)
            lease.opened = True

        def opened(opening: asyncio.Future[None]) -> None:
            if opening.cancelled() or opening.exception() is not None:
                self._forget(request.session_id, lease)
            else:
                lease.until = self._clock() + lease.length_s

        lease.opening = asyncio.wrap_future(self._loop.call(open_it))
        lease.opening.add_done_callback(opened)
        return lease

    def _forget(self, session_id: str, lease: _Lease) -> None:
        """This lease is over. The id may have another one by now."""
        if self._leases.get(session_id) is lease:
            del self._leases[session_id]

    def _entry(self, request: HostSessionRequest) -> Pass:
        """What lets the session's client in.

        Raises:
            RefusedError: we are told to trust one router's key, and it is another.
        """
        trusted = self._settings.channel_key
        if trusted and request.channel_key != trusted:
            raise RefusedError(
                "executor.channel_key", f"the router's channel key is not the one that {PREFIX}CHANNEL_KEY names"
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
        )

    async def on_steer_session(self, request: SteerSessionRequest) -> SteerSessionReply:
        """Treat a session otherwise from now on."""
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
        """Adapt the windows to what an epoch measured."""
        measured = request.slowdown_permille, request.idle_permille
        return EndEpochReply(windows_ns=await self._ask(lambda: self._loop.dispatch.epoch_ended(*measured)))

    async def _ask(self, function: Callable[[], T]) -> T:
        """What `function` returns in the device loop's thread.

        Raises:
            RefusedError: it raised an error of the executor's.
        """
        with _refused():
            return await asyncio.wrap_future(self._loop.call(function))

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Prolong a lease. This waits for nothing: not for the device, and for nobody else's request."""
        lease = self._leases.get(request.session_id)
        if lease is None or lease.token != request.token:
            raise RefusedError("executor.no_session", f"session {request.session_id} is not open here")
        if lease.opened:
            lease.until = self._clock() + lease.length_s
        return RenewSessionReply(lease_s=lease.length_s)

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """End a session, or a job. While an operator of it has the device, the answer says so: it ends when that does."""
        known = self.jobs.cancel(request.session_id) or request.session_id in self._leases
        closing = asyncio.wrap_future(self._close(request.session_id, request.reason or "closed by the router"))
        done, _ = await asyncio.wait((closing,), timeout=BUSY_S)
        if not done:
            return CloseSessionReply(closed=known, running_s=self._loop.launcher.running_s(request.session_id))
        with _refused():
            return CloseSessionReply(closed=closing.result())

    def _close(self, session_id: str, reason: str) -> Future[bool]:
        self._leases.pop(session_id, None)
        return self._loop.call(lambda: self._loop.sessions.close(session_id, reason))

    def works(self) -> dict[str, Work]:
        """What goes on for ever, each beside the others: heartbeats, lapsed leases, sessions that closed, and spans."""
        return {
            "heartbeats": self._beat,
            "leases": self._lapse,
            "closed sessions": self.report_closed,
            "samples": self._sample,
        }

    async def _beat(self) -> None:
        while True:
            heartbeat = await self.heartbeat()
            if not self._loop.lost:  # one that serves nobody must not be given sessions
                await self._app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, heartbeat)
            await asyncio.sleep(self._settings.heartbeat_s)

    async def say_end(self, reason: str) -> None:
        """The last heartbeat: this executor ends, and what it has can be begun elsewhere at once."""
        last = self._heartbeat().model_copy(update={"ending": reason[:1024], "sessions": ()})
        await self._app.publish(contracts.EXECUTOR_NODE_HEARTBEAT, last)

    async def end_clients(self) -> None:
        """Close the sessions that clients have, unless the device is in one long operation: then they end with the process."""
        with contextlib.suppress(ExecutorError, TimeoutError):
            async with asyncio.timeout(CLIENTS_S):
                await asyncio.wrap_future(self._loop.call(self._loop.sessions.end_clients))

    async def _lapse(self) -> None:
        while True:
            now = self._clock()
            for session_id, lease in list(self._leases.items()):
                if now > lease.until:
                    log.warning("session %s: its lease of %.0f s lapsed", session_id, lease.length_s)
                    self._close(session_id, "the session's lease lapsed")
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _sample(self) -> None:
        """Have traced sessions tell what they ran. Where the device is busy for long, this waits for it."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            await asyncio.wrap_future(self._loop.call(self._loop.sessions.sample_spans))

    async def heartbeat(self) -> ExecutorHeartbeat:
        """What this executor says of itself now.

        While the device's thread is in one long operation it cannot be asked: then its memory is as it was the last time.
        """
        if self._asked is None:
            self._asked = self._loop.call(self._look)
        done, _ = await asyncio.wait([asyncio.wrap_future(self._asked)], timeout=BUSY_S)
        if done:
            asked, self._asked = self._asked, None
            with contextlib.suppress(LoopEndedError):
                self._last = asked.result()
        return self._heartbeat()

    def _heartbeat(self) -> ExecutorHeartbeat:
        memory, weights = self._last
        now, busy = self._clock(), self._loop.launcher.busy_ns
        share = (busy - self._busy_ns) / 1e9 / max(now - self._busy_at, 1e-6)
        self._busy_ns, self._busy_at = busy, now
        # By their leases: a session that was opened since the device's thread was last seen is missed by the router otherwise.
        sessions = [session_id for session_id, lease in self._leases.items() if lease.opened]
        return ExecutorHeartbeat(
            executor_id=self._settings.id,
            node=self._settings.node,
            pid=os.getpid(),
            device=self._facts,
            endpoints=self._endpoints,
            sessions=tuple(dict.fromkeys([*sessions, *self.jobs.sessions()])),
            memory_used=memory.own + memory.contents,
            utilization=min(1.0, max(0.0, share)),
            weights=tuple(weights),
            memory=memory,
            work=WorkDone.model_validate(self._loop.processing.work.to_json()),
        )

    def _look(self) -> tuple[MemoryState, list[str]]:
        vram = self._loop.vram
        return vram.state(), vram.contents.largest(WEIGHTS)

    def _on_closed(self, session_id: str, reason: str, contents: tuple[str, ...]) -> None:
        """A session has ended (in the loop's thread). A lease that was made since then is another session's of the same id."""
        lease = self._leases.get(session_id)
        ended = lease if lease is not None and lease.opened else None
        with contextlib.suppress(RuntimeError):  # the event loop is over: nobody is left to be told
            self._events.call_soon_threadsafe(self._note_closed, session_id, ended, (session_id, reason, contents))

    def _note_closed(self, session_id: str, lease: _Lease | None, closed: tuple[str, str, tuple[str, ...]]) -> None:
        if lease is not None:
            self._forget(session_id, lease)
        # A session that was opened anew is still there; of those that end with the executor its last heartbeat tells.
        if session_id not in self._leases and closed[1] != STOPPING:
            self._closed.put_nowait(closed)

    async def report_closed(self) -> None:
        """Tell the router of sessions that ended, for ever."""
        while True:
            await self._report(*await self._closed.get())

    async def report_last_closed(self) -> None:
        """Tell the router of the sessions that have ended and were not reported yet, and return."""
        while not self._closed.empty():
            await self._report(*self._closed.get_nowait())

    async def _report(self, session_id: str, reason: str, contents: tuple[str, ...]) -> None:
        closed = SessionClosed(
            session_id=session_id, executor_id=self._settings.id, reason=reason[:4096], contents=contents
        )
        await self._app.publish(contracts.EXECUTOR_SESSION_CLOSED, closed)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Errors of the executor's travel as refusals."""
    try:
        yield
    except ExecutorError as e:
        raise RefusedError(e.code, str(e), retryable=e.retryable) from e
