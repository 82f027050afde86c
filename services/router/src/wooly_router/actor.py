"""The router's actor: decodes, asks the pure core, talks to executors, keeps sessions in the store."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import nats.errors
from wooly_bus import subjects
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.envelope import decode_reply, encode
from wooly_bus.errors import RefusedError
from wooly_wis.messages import (
    CloseSessionReply,
    CloseSessionRequest,
    ExecutorHeartbeat,
    HostSessionReply,
    HostSessionRequest,
    Message,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
)

from wooly_router.core.placement import place
from wooly_router.core.registry import Registry
from wooly_router.settings import RouterSettings
from wooly_router.store import SessionRecord, SessionStore

log = logging.getLogger("wooly.router")
M = TypeVar("M", bound=Message)
EXECUTOR_TIMEOUT_S = 3.0


class RouterActor(Actor):
    """Owns the registry and the table of sessions."""

    def __init__(
        self, settings: RouterSettings, app: ServiceApp, store: SessionStore, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self.registry = Registry()
        self.store = store
        self.clock = clock
        self._settings = settings
        self._app = app
        for subject, model, handler in (
            (subjects.ROUTER_SESSION_OPEN, OpenSessionRequest, self.on_open_session),
            (subjects.ROUTER_SESSION_RENEW, RenewSessionRequest, self.on_renew_session),
            (subjects.ROUTER_SESSION_CLOSE, CloseSessionRequest, self.on_close_session),
            (subjects.ROUTER_NODE_LIST, NodesRequest, self.on_nodes),
        ):
            app.serve(subject, model, self.alone(handler), queue="router")
        app.listen(subjects.EXECUTOR_HEARTBEAT, ExecutorHeartbeat, self.alone(self.on_heartbeat))
        app.listen(subjects.EXECUTOR_SESSION_CLOSED, SessionClosed, self.alone(self.on_session_closed))

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def on_open_session(self, request: OpenSessionRequest) -> OpenSessionReply:
        """Place a session."""
        now = self.clock()
        alive = self.registry.alive(now)
        if not alive:
            raise RefusedError(
                "router.no_executor",
                "no executor is registered; start one with `wooly up`, or with `python -m wooly_executor` on a machine "
                "that has the device",
                retryable=True,
            )
        sessions = await self.store.all()
        reserved: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for s in sessions:
            count[s.executor_id] += 1
            reserved[s.executor_id] += s.required_vram or 0
            if s.gpu_mode == "exclusive":
                alive = [e for e in alive if e.executor_id != s.executor_id]
        while True:
            placement = place(request, alive, reserved, count)
            if placement.executor is None:
                why = "; ".join(f"{k} {v}" for k, v in placement.reasons.items()) or "all are held exclusively"
                raise RefusedError("router.no_fit", f"no executor fits: {why}", retryable=True)
            try:
                return await self._host(request, placement.executor, now)
            except (TimeoutError, nats.errors.Error) as e:
                chosen = placement.executor.executor_id
                log.warning("executor %s does not answer: %s", chosen, e or type(e).__name__)
                alive = [x for x in alive if x.executor_id != chosen]
                if not alive:
                    raise RefusedError(
                        "router.executor_silent", f"executor {chosen} does not answer", retryable=True
                    ) from e

    async def _host(self, request: OpenSessionRequest, executor: ExecutorHeartbeat, now: float) -> OpenSessionReply:
        session_id, token = secrets.token_hex(8), secrets.token_urlsafe(32)
        hosted = await self._ask(
            subjects.executor_session_open(executor.executor_id),
            HostSessionRequest(
                session_id=session_id,
                token=token,
                tenant=request.tenant,
                priority=request.priority,
                quota=request.required_vram,
                lease_s=self._settings.lease_s,
            ),
            HostSessionReply,
        )
        await self.store.add(
            SessionRecord(
                session_id,
                executor.executor_id,
                executor.node,
                token,
                request.tenant,
                request.priority,
                request.gpu_mode,
                request.required_vram,
                request.client.program[:1024],
                request.client.host[:255],
                now,
                now + self._settings.lease_s,
            )
        )
        return OpenSessionReply(
            session_id=session_id,
            executor_id=executor.executor_id,
            node=executor.node,
            endpoints=hosted.endpoints,
            token=token,
            lease_s=self._settings.lease_s,
            device=executor.device,
        )

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Prolong a lease, here and on the executor."""
        record = await self._own(request.session_id, request.token)
        reply = await self._ask(subjects.executor_session_renew(record.executor_id), request, RenewSessionReply)
        await self.store.prolong(record.id, self.clock() + reply.lease_s)
        return reply

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """End a session at its client's wish. Closing twice is no error."""
        record = await self.store.get(request.session_id)
        if record is None:
            return CloseSessionReply(closed=False)
        if not secrets.compare_digest(record.token, request.token):
            raise RefusedError("router.no_session", f"session {request.session_id} is not yours")
        await self._end(record, request.reason or "closed by its client")
        return CloseSessionReply(closed=True)

    async def _end(self, record: SessionRecord, reason: str) -> None:
        await self.store.remove(record.id)
        try:
            await self._ask(
                subjects.executor_session_close(record.executor_id),
                CloseSessionRequest(session_id=record.id, reason=reason),
                CloseSessionReply,
            )
        except (TimeoutError, nats.errors.Error) as e:
            # Its own lease ends the session there if the executor still lives.
            log.warning("executor %s was not told that %s ended: %s", record.executor_id, record.id, e)

    async def _own(self, session_id: str, token: str) -> SessionRecord:
        record = await self.store.get(session_id)
        if record is None or not secrets.compare_digest(record.token, token):
            raise RefusedError("router.no_session", f"session {session_id} is not open")
        return record

    async def _ask(self, subject: str, message: Message, reply: type[M]) -> M:
        data, headers = encode(message)
        answer = await self._app.broker.request(data, subject, headers=headers, timeout=EXECUTOR_TIMEOUT_S)
        return decode_reply(bytes(answer.body), dict(answer.headers or {}), reply)

    # -- nodes -------------------------------------------------------------------------------------------------------

    async def on_nodes(self, request: NodesRequest) -> NodesReply:
        """List all executors."""
        return NodesReply(nodes=self.registry.nodes(self.clock()))

    async def on_heartbeat(self, heartbeat: ExecutorHeartbeat) -> None:
        """An executor lives. Sessions that it does not know of (it was restarted) are over."""
        now = self.clock()
        if self.registry.hear(heartbeat, now):
            log.info("executor %s (%s) is there", heartbeat.executor_id, heartbeat.device.name)
        known = set(heartbeat.sessions)
        for record in await self.store.all():
            fresh = now - record.opened_at < 2 * EXECUTOR_TIMEOUT_S
            if record.executor_id == heartbeat.executor_id and record.id not in known and not fresh:
                await self.store.remove(record.id)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """An executor ended a session."""
        await self.store.remove(event.session_id)

    async def sweep(self) -> None:
        """End sessions whose lease has lapsed; forget executors long silent. Runs for ever."""
        while True:
            await asyncio.sleep(1.0)
            async with self._turn:
                now = self.clock()
                self.registry.forget_old(now)
                for record in await self.store.all():
                    if now > record.lease_until:
                        await self._end(record, "the session's lease lapsed")
