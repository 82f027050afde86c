"""The executor's side of the control plane: takes sessions, watches their leases, says that it is alive."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, fields, replace
from typing import TypeVar

from opentelemetry.trace import SpanContext
from wooly_bus import subjects
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.channel.token import Pass, SharedPass, SignedPass
from wooly_bus.channel.tunnel import OpenTunnelRequest, TunnelListener
from wooly_bus.errors import RefusedError
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
    RunJobRequest,
    SessionClosed,
    SessionPolicy,
    SteerSessionReply,
    SteerSessionRequest,
    WorkDone,
)

from wooly_executor.device_loop import DeviceLoop
from wooly_executor.errors import ExecutorError
from wooly_executor.jobs import Jobs
from wooly_executor.memory.book import Scope
from wooly_executor.settings import PREFIX, ExecutorSettings
from wooly_executor.spans import hosted_under

T = TypeVar("T")
log = logging.getLogger("wooly.executor")
#: Seconds that a heartbeat waits for the device's thread.
BUSY_S = 0.5
#: Contents that a heartbeat names.
WEIGHTS = 1024
#: Seconds between two looks at what traced sessions ran.
SAMPLE_S = 1.0


def _policy(message: SessionPolicy) -> Policy:
    return Policy(**{f.name: getattr(message, f.name) for f in fields(Policy)})


class ExecutorActor(Actor):
    """Owns the leases of this executor's sessions; the sessions themselves belong to the device loop."""

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
        self._leases: dict[str, tuple[float, float, str]] = {}
        self._closed: asyncio.Queue[tuple[str, str, tuple[str, ...]]] = asyncio.Queue()
        events = asyncio.get_running_loop()
        loop.on_closed = lambda *closed: events.call_soon_threadsafe(self._closed.put_nowait, closed)
        self._asked: Future[tuple[list[str], MemoryState, list[str]]] | None = None
        self._last: tuple[list[str], MemoryState, list[str]] = ([], MemoryState(capacity=loop.vram.capacity), [])
        self._busy_ns = 0
        self._busy_at = clock()
        app.serve(subjects.executor_session_open(settings.id), HostSessionRequest, self.alone(self.on_host_session))
        app.serve(subjects.executor_session_renew(settings.id), RenewSessionRequest, self.alone(self.on_renew_session))
        app.serve(subjects.executor_session_close(settings.id), CloseSessionRequest, self.alone(self.on_close_session))
        app.serve(subjects.executor_session_steer(settings.id), SteerSessionRequest, self.alone(self.on_steer_session))
        app.serve(subjects.executor_epoch_end(settings.id), EndEpochRequest, self.alone(self.on_end_epoch))
        self.jobs = Jobs(loop, settings.id)
        app.serve(subjects.executor_job_run(settings.id), RunJobRequest, self.alone(self.jobs.on_run_job))
        # Not `alone`: opening a tunnel touches nothing of the actor's, and waits for NATS.
        app.serve(subjects.executor_tunnel(settings.id), OpenTunnelRequest, tunnels.on_open_tunnel)
        app.serve_tenants(subjects.executor_tunnel(settings.id), OpenTunnelRequest, tunnels.on_open_tenants_tunnel)

    async def on_host_session(self, request: HostSessionRequest) -> HostSessionReply:
        """Take a session. Asking twice for the same one changes nothing."""
        known = self._leases.get(request.session_id)
        if known is None or known[2] != request.token:
            policy = _policy(request.policy or SessionPolicy(priority=request.priority))
            entry = self._entry(request)
            hosted = hosted_under()
            await self._ask(lambda: self._open(request, entry, policy, hosted))
        self._leases[request.session_id] = (self._clock() + request.lease_s, request.lease_s, request.token)
        return HostSessionReply(endpoints=self._endpoints)

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
        self._loop.open_session(
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
            suspended = self._loop.suspend(request.session_id, request.suspended, request.hold)
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
        try:
            return await asyncio.wrap_future(self._loop.call(function))
        except ExecutorError as e:
            raise RefusedError(e.code, str(e), retryable=e.retryable) from e

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Prolong a lease."""
        known = self._leases.get(request.session_id)
        if known is None or known[2] != request.token:
            raise RefusedError("executor.no_session", f"session {request.session_id} is not open here")
        self._leases[request.session_id] = (self._clock() + known[1], known[1], known[2])
        return RenewSessionReply(lease_s=known[1])

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """End a session, or a job."""
        self.jobs.cancel(request.session_id)
        closed = await self._close(request.session_id, request.reason or "closed by the router")
        return CloseSessionReply(closed=closed)

    async def _close(self, session_id: str, reason: str) -> bool:
        self._leases.pop(session_id, None)
        return await asyncio.wrap_future(self._loop.call(lambda: self._loop.close_session(session_id, reason)))

    async def watch(self) -> None:
        """Heartbeats, lapsed leases, sessions that closed, and spans, for ever."""
        await asyncio.gather(self._beat(), self._lapse(), self._report_closed(), self._sample())

    async def _beat(self) -> None:
        while True:
            await self._app.publish(subjects.EXECUTOR_HEARTBEAT, await self.heartbeat())
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _lapse(self) -> None:
        while True:
            now = self._clock()
            for session_id, (until, lease, _) in list(self._leases.items()):
                if now > until:
                    log.warning("session %s: its lease of %.0f s lapsed", session_id, lease)
                    await self._close(session_id, "the session's lease lapsed")
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _sample(self) -> None:
        """Have traced sessions tell what they ran. Where the device is busy for long, this waits for it."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            await asyncio.wrap_future(self._loop.call(self._loop.sample_spans))

    async def heartbeat(self) -> ExecutorHeartbeat:
        """What this executor says of itself now.

        While the device's thread is in one long operation it cannot be asked: then the sessions are those of the last time.
        """
        if self._asked is None:
            self._asked = self._loop.call(self._look)
        done, _ = await asyncio.wait([asyncio.wrap_future(self._asked)], timeout=BUSY_S)
        if done:
            self._last, self._asked = self._asked.result(), None
        sessions, memory, weights = self._last
        now, busy = self._clock(), self._loop.busy_ns
        share = (busy - self._busy_ns) / 1e9 / max(now - self._busy_at, 1e-6)
        self._busy_ns, self._busy_at = busy, now
        return ExecutorHeartbeat(
            executor_id=self._settings.id,
            node=self._settings.node,
            pid=os.getpid(),
            device=DeviceFacts(**{**self._loop.runtime.facts(), "total_memory": self._loop.memory}),
            endpoints=self._endpoints,
            sessions=tuple(dict.fromkeys([*sessions, *self.jobs.sessions()])),
            memory_used=memory.own + memory.contents,
            utilization=min(1.0, max(0.0, share)),
            weights=tuple(weights),
            memory=memory,
            work=WorkDone(**self._loop.work.to_json()),
        )

    def _look(self) -> tuple[list[str], MemoryState, list[str]]:
        vram = self._loop.vram
        return [s.id for s in self._loop.sessions()], vram.state(), vram.contents.largest(WEIGHTS)

    async def _report_closed(self) -> None:
        while True:
            session_id, reason, contents = await self._closed.get()
            self._leases.pop(session_id, None)
            await self._app.publish(
                subjects.EXECUTOR_SESSION_CLOSED,
                SessionClosed(
                    session_id=session_id, executor_id=self._settings.id, reason=reason[:4096], contents=contents
                ),
            )
