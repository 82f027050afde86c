"""The router's actor: asks the pure core, talks to executors, keeps sessions in the store.

Its state changes in turns; it waits for executors outside of them, so that a frozen executor stops nobody but itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from wooly_bus import subjects
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, BusTimeoutError, NoResponderError, RefusedError
from wooly_wis.messages import (
    CloseSessionReply,
    CloseSessionRequest,
    ExecutorHeartbeat,
    HostSessionReply,
    HostSessionRequest,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
)

from wooly_router.core.placement import Claim, loads, place
from wooly_router.core.registry import Registry
from wooly_router.settings import RouterSettings
from wooly_router.store import SessionRecord, SessionStore

log = logging.getLogger("wooly.router")
#: Seconds that one executor has for an answer.
EXECUTOR_TIMEOUT_S = 2.0
#: Seconds after which an opening client is answered in any case; it waits a little longer itself.
OPEN_BUDGET_S = 3.5
#: Seconds after its start in which a router that knows no executor waits for the first heartbeat.
HEARTBEAT_GRACE_S = 2.0
#: A session younger than this may be missing in a heartbeat that was on its way when it was opened.
FRESH_S = 5.0


class RouterActor(Actor):
    """Owns the registry and the table of sessions.

    Args:
        settings: lease length.
        app: the connection to NATS.
        store: where sessions survive a restart.
        clock: seconds since the epoch; leases in the store outlive the process.
    """

    def __init__(
        self, settings: RouterSettings, app: ServiceApp, store: SessionStore, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self.registry = Registry()
        self.store = store
        self.clock = clock
        self._settings = settings
        self._app = app
        self._started = clock()
        self._opening: dict[str, Claim] = {}
        for subject, model, handler in (
            (subjects.ROUTER_SESSION_OPEN, OpenSessionRequest, self.on_open_session),
            (subjects.ROUTER_SESSION_RENEW, RenewSessionRequest, self.on_renew_session),
            (subjects.ROUTER_SESSION_CLOSE, CloseSessionRequest, self.on_close_session),
            (subjects.ROUTER_NODE_LIST, NodesRequest, self.on_nodes),
        ):
            app.serve(subject, model, handler, queue="router")
        app.listen(subjects.EXECUTOR_HEARTBEAT, ExecutorHeartbeat, self.on_heartbeat)
        app.listen(subjects.EXECUTOR_SESSION_CLOSED, SessionClosed, self.on_session_closed)

    async def resume(self) -> None:
        """Take over the sessions of a router before: while none was there, no client could renew its lease."""
        await self.store.prolong_all(self.clock() + self._settings.lease_s)

    # -- opening -----------------------------------------------------------------------------------------------------

    async def on_open_session(self, request: OpenSessionRequest) -> OpenSessionReply:
        """Place a session: on the best executor that answers and does not refuse."""
        until = self.clock() + OPEN_BUDGET_S
        await self._first_heartbeat()
        failed: dict[str, BusError] = {}
        while True:
            session_id, executor = await self._choose(request, failed)
            try:
                return await self._host(request, session_id, executor, until)
            except (NoResponderError, BusTimeoutError, RefusedError) as e:
                log.warning("executor %s did not take a session: %s", executor.executor_id, e)
                failed[executor.executor_id] = e
            finally:
                self._opening.pop(session_id, None)
            if self.clock() > until:
                raise _none_took_it(failed)

    async def _first_heartbeat(self) -> None:
        while not self.registry.alive(self.clock()) and self.clock() - self._started < HEARTBEAT_GRACE_S:
            await asyncio.sleep(0.05)

    async def _choose(self, request: OpenSessionRequest, failed: dict[str, BusError]) -> tuple[str, ExecutorHeartbeat]:
        """An executor, with the session's claim on it noted, so that the next choice sees it."""
        async with self._turn:
            alive = self.registry.alive(self.clock())
            if not alive:
                raise RefusedError(
                    "router.no_executor",
                    "no executor is registered; start one with `wooly up`, or with `python -m wooly_executor` on a machine "
                    "that has the device",
                    retryable=True,
                )
            claims = [s.claim() for s in await self.store.all()]
            candidates = [e for e in alive if e.executor_id not in failed]
            placement = place(request, candidates, loads([*claims, *self._opening.values()]))
            if placement.executor is None:
                if failed and not placement.reasons:
                    raise _none_took_it(failed)
                why = "; ".join(f"{k} {v}" for k, v in placement.reasons.items())
                raise RefusedError("router.no_fit", f"no executor fits: {why}", retryable=True)
            session_id = secrets.token_hex(8)
            executor = placement.executor
            self._opening[session_id] = Claim(
                executor.executor_id, request.required_vram, request.gpu_mode == "exclusive"
            )
            return session_id, executor

    async def _host(
        self, request: OpenSessionRequest, session_id: str, executor: ExecutorHeartbeat, until: float
    ) -> OpenSessionReply:
        token, lease = secrets.token_urlsafe(32), self._settings.lease_s
        hosted = await self._app.request(
            subjects.executor_session_open(executor.executor_id),
            HostSessionRequest(
                session_id=session_id,
                token=token,
                tenant=request.tenant,
                priority=request.priority,
                quota=request.required_vram,
                lease_s=lease,
            ),
            HostSessionReply,
            timeout=max(0.2, min(EXECUTOR_TIMEOUT_S, until - self.clock())),
        )
        now = self.clock()
        record = SessionRecord(
            id=session_id,
            executor_id=executor.executor_id,
            node=executor.node,
            token=token,
            tenant=request.tenant,
            priority=request.priority,
            gpu_mode=request.gpu_mode,
            required_vram=request.required_vram,
            program=request.client.program[:1024],
            client_host=request.client.host,
            opened_at=now,
            lease_until=now + lease,
        )
        async with self._turn:
            await self.store.add(record)
            self._opening.pop(session_id, None)
        return OpenSessionReply(
            session_id=session_id,
            executor_id=executor.executor_id,
            node=executor.node,
            endpoints=hosted.endpoints,
            token=token,
            lease_s=lease,
            device=executor.device,
        )

    # -- living ------------------------------------------------------------------------------------------------------

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Prolong a lease, on the executor and here."""
        record = await self.store.get(request.session_id)
        if record is None or not _same(record.token, request.token):
            raise RefusedError("router.no_session", f"session {request.session_id} is not open")
        subject = subjects.executor_session_renew(record.executor_id)
        try:
            reply = await self._app.request(subject, request, RenewSessionReply, timeout=EXECUTOR_TIMEOUT_S)
        except RefusedError as e:
            if e.code == "executor.no_session":
                await self.store.remove(record.id)
                raise RefusedError("router.no_session", f"executor {record.executor_id}: {e}") from e
            raise
        except (NoResponderError, BusTimeoutError) as e:
            raise RefusedError(
                "router.executor_lost", f"executor {record.executor_id} does not answer", retryable=True
            ) from e
        await self.store.prolong(record.id, self.clock() + reply.lease_s)
        return reply

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """End a session at its client's wish. Closing twice is no error."""
        record = await self.store.get(request.session_id)
        if record is None:
            return CloseSessionReply(closed=False)
        if not _same(record.token, request.token):
            raise RefusedError("router.no_session", f"session {request.session_id} is not yours")
        await self._end(record, request.reason or "closed by its client")
        return CloseSessionReply(closed=True)

    async def _end(self, record: SessionRecord, reason: str) -> None:
        await self.store.remove(record.id)
        try:
            await self._app.request(
                subjects.executor_session_close(record.executor_id),
                CloseSessionRequest(session_id=record.id, reason=reason),
                CloseSessionReply,
                timeout=EXECUTOR_TIMEOUT_S,
            )
        except BusError as e:
            # Its own lease ends the session there if the executor still lives.
            log.warning("executor %s was not told that %s ended: %s", record.executor_id, record.id, e)

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
        for record in await self.store.on_executor(heartbeat.executor_id):
            if record.id not in known and now - record.opened_at > FRESH_S:
                log.warning("session %s is over: executor %s does not have it", record.id, record.executor_id)
                await self.store.remove(record.id)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """An executor ended a session."""
        await self.store.remove(event.session_id)

    async def lapse(self) -> int:
        """End sessions whose lease is over, and forget executors long silent. Returns how many sessions ended."""
        now = self.clock()
        self.registry.forget_old(now)
        lapsed = await self.store.lapsed(now)
        await asyncio.gather(*[self._end(record, "the session's lease lapsed") for record in lapsed])
        return len(lapsed)

    async def sweep(self, every_s: float = 1.0) -> None:
        """`lapse`, for ever. A database that is away for a while is no reason to end."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.lapse()
            except Exception:
                log.exception("leases could not be checked; trying again")


def _same(token: str, given: str) -> bool:
    return secrets.compare_digest(token.encode(), given.encode())


def _none_took_it(failed: dict[str, BusError]) -> RefusedError:
    """Why no executor took a session: its own refusal if there is one."""
    for error in failed.values():
        if isinstance(error, RefusedError):
            return RefusedError(error.code, str(error), retryable=error.retryable)
    names = ", ".join(failed)
    return RefusedError(
        "router.executor_silent", f"executor {names} is registered but does not answer; see its log", retryable=True
    )
