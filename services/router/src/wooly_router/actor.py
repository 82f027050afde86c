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
    AdmitSessionReply,
    AdmitSessionRequest,
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
    SessionPart,
    SessionPolicy,
)

from wooly_router.core.placement import Claim, Placement, loads, place
from wooly_router.core.registry import Registry
from wooly_router.settings import RouterSettings
from wooly_router.store import PartRecord, SessionRecord, SessionStore

log = logging.getLogger("wooly.router")
#: Seconds that one executor has for an answer.
EXECUTOR_TIMEOUT_S = 2.0
#: Seconds that the scheduler has for one; without it sessions are opened as they ask to be.
SCHEDULER_TIMEOUT_S = 0.5
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
        self._opening: dict[str, list[Claim]] = {}
        self._closing: set[asyncio.Task[None]] = set()
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
        """Place a session: each of its devices on another executor, the best that answer and do not refuse; all or none."""
        until = self.clock() + OPEN_BUDGET_S
        await self._first_heartbeat()
        failed: dict[str, BusError] = {}
        while True:
            session_id, executors = await self._choose(request, failed)
            try:
                reply = await self._host_all(request, session_id, executors, until, failed)
            finally:
                self._opening.pop(session_id, None)
            if reply is not None:
                return reply
            if self.clock() > until:
                raise _none_took_it(failed)

    async def _first_heartbeat(self) -> None:
        while not self.registry.alive(self.clock()) and self.clock() - self._started < HEARTBEAT_GRACE_S:
            await asyncio.sleep(0.05)

    async def _choose(
        self, request: OpenSessionRequest, failed: dict[str, BusError]
    ) -> tuple[str, tuple[ExecutorHeartbeat, ...]]:
        """Executors, with the session's claims on them noted, so that the next choice sees them."""
        async with self._turn:
            alive = self.registry.alive(self.clock())
            if not alive:
                raise RefusedError(
                    "router.no_executor",
                    "no executor is registered; start one with `wooly up`, or with `python -m wooly_executor` on a machine "
                    "that has the device",
                    retryable=True,
                )
            if request.gpu_count > len(alive):
                have = "1 executor is alive" if len(alive) == 1 else f"{len(alive)} executors are alive"
                raise RefusedError(
                    "router.too_few",
                    f"{request.gpu_count} devices were asked for, and {have}, one device each; start more (`wooly up --gpus "
                    f"{request.gpu_count}` for a local stack), or ask for fewer (WOOLYAI_GPU_COUNT)",
                    retryable=True,
                )
            claims = [claim for s in await self.store.all() for claim in s.claims()]
            claims += [claim for opening in self._opening.values() for claim in opening]
            candidates = [e for e in alive if e.executor_id not in failed]
            placement = place(request, candidates, loads(claims))
            if not placement.executors:
                if request.gpu_count == 1 and failed and not placement.reasons:
                    raise _none_took_it(failed)
                raise RefusedError("router.no_fit", _no_fit(request, len(alive), placement, failed), retryable=True)
            session_id = secrets.token_hex(8)
            exclusive = request.gpu_mode == "exclusive"
            self._opening[session_id] = [
                Claim(e.executor_id, request.required_vram, exclusive) for e in placement.executors
            ]
            return session_id, placement.executors

    async def _host_all(
        self,
        request: OpenSessionRequest,
        session_id: str,
        executors: tuple[ExecutorHeartbeat, ...],
        until: float,
        failed: dict[str, BusError],
    ) -> OpenSessionReply | None:
        """Have every executor take its part. None if one did not: it is in `failed` then, and the others have let go."""
        policies = await self._admit_all(request, session_id, executors, failed)
        if policies is None:
            return None
        token, lease = secrets.token_urlsafe(32), self._settings.lease_s
        timeout = max(0.2, min(EXECUTOR_TIMEOUT_S, until - self.clock()))
        answers = await asyncio.gather(
            *[
                self._app.request(
                    subjects.executor_session_open(e.executor_id),
                    HostSessionRequest(
                        session_id=session_id,
                        token=token,
                        tenant=request.tenant,
                        priority=request.priority,
                        policy=policy,
                        quota=request.required_vram,
                        lease_s=lease,
                    ),
                    HostSessionReply,
                    timeout=timeout,
                )
                for e, policy in zip(executors, policies, strict=True)
            ],
            return_exceptions=True,
        )
        parts: list[SessionPart] = []
        unexpected: list[BaseException] = []
        for executor, answer in zip(executors, answers, strict=True):
            if isinstance(answer, (NoResponderError, BusTimeoutError, RefusedError)):
                log.warning("executor %s did not take a session: %s", executor.executor_id, answer)
                failed[executor.executor_id] = answer
            elif isinstance(answer, BaseException):
                unexpected.append(answer)
            else:
                part = SessionPart(
                    executor_id=executor.executor_id,
                    node=executor.node,
                    endpoints=answer.endpoints,
                    device=executor.device,
                )
                parts.append(part)
        if len(parts) < len(executors):
            taken = [p.executor_id for p in parts]
            await self._close_on(taken, session_id, "another executor did not take its part of the session")
            if unexpected:
                raise unexpected[0]
            return None
        now = self.clock()
        record = SessionRecord(
            id=session_id,
            parts=tuple([PartRecord(e.executor_id, e.node) for e in executors]),
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
        return OpenSessionReply(session_id=session_id, token=token, lease_s=lease, parts=tuple(parts))

    async def _admit_all(
        self,
        request: OpenSessionRequest,
        session_id: str,
        executors: tuple[ExecutorHeartbeat, ...],
        failed: dict[str, BusError],
    ) -> list[SessionPolicy | None] | None:
        """The session's policy on each executor. None if the scheduler refuses one: it is in `failed` then."""
        declared = {
            "weight": request.weight,
            "service_ns": request.service_ns,
            "objective_ns": request.objective_ns,
        }

        async def admit(executor_id: str) -> AdmitSessionReply:
            ask = AdmitSessionRequest(
                session_id=session_id,
                executor_id=executor_id,
                tenant=request.tenant,
                priority=request.priority,
                interval_ns=request.interval_ns,
                **declared,
            )
            try:
                return await self._app.request(
                    subjects.SCHEDULER_SESSION_ADMIT, ask, AdmitSessionReply, timeout=SCHEDULER_TIMEOUT_S
                )
            except BusError as e:
                if not isinstance(e, NoResponderError):
                    log.warning("session %s is opened without the scheduler: %s", session_id, e)
                return AdmitSessionReply(admitted=True, policy=SessionPolicy(priority=request.priority, **declared))

        replies = await asyncio.gather(*[admit(e.executor_id) for e in executors])
        refused = {
            e.executor_id: reply.reason for e, reply in zip(executors, replies, strict=True) if not reply.admitted
        }
        for executor_id, reason in refused.items():
            log.warning("session %s is not admitted: %s", session_id, reason)
            failed[executor_id] = RefusedError("scheduler.refused", f"not admitted: {reason}", retryable=True)
        return None if refused else [reply.policy for reply in replies]

    # -- living ------------------------------------------------------------------------------------------------------

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Prolong a lease, on all executors of the session and here."""
        record = await self.store.get(request.session_id)
        if record is None or not _same(record.token, request.token):
            raise RefusedError("router.no_session", f"session {request.session_id} is not open")
        names = [p.executor_id for p in record.parts]
        answers = await asyncio.gather(
            *[
                self._app.request(
                    subjects.executor_session_renew(name), request, RenewSessionReply, timeout=EXECUTOR_TIMEOUT_S
                )
                for name in names
            ],
            return_exceptions=True,
        )
        leases: list[float] = []
        problems: list[tuple[str, BaseException]] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, RefusedError) and answer.code == "executor.no_session":
                await self._lose_part(record, name)
                raise RefusedError("router.no_session", f"executor {name}: {answer}") from answer
            if isinstance(answer, BaseException):
                problems.append((name, answer))
            else:
                leases.append(answer.lease_s)
        for name, problem in problems:
            if isinstance(problem, (NoResponderError, BusTimeoutError)):
                raise RefusedError(
                    "router.executor_lost", f"executor {name} does not answer", retryable=True
                ) from problem
            raise problem
        await self.store.prolong(record.id, self.clock() + min(leases))
        return RenewSessionReply(lease_s=min(leases))

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
        if await self.store.remove(record.id):
            await self._close_on([p.executor_id for p in record.parts], record.id, reason)

    async def _lose_part(self, record: SessionRecord, executor_id: str) -> None:
        """One executor has the session no more: it is over, and the others are told while whoever calls goes on."""
        others = [p.executor_id for p in record.parts if p.executor_id != executor_id]
        if await self.store.remove(record.id) and others:
            closing = asyncio.create_task(self._close_on(others, record.id, f"it ended on executor {executor_id}"))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_on(self, executor_ids: list[str], session_id: str, reason: str) -> None:
        async def close(executor_id: str) -> None:
            try:
                await self._app.request(
                    subjects.executor_session_close(executor_id),
                    CloseSessionRequest(session_id=session_id, reason=reason),
                    CloseSessionReply,
                    timeout=EXECUTOR_TIMEOUT_S,
                )
            except BusError as e:
                # Its own lease ends the session there if the executor still lives.
                log.warning("executor %s was not told that %s ended: %s", executor_id, session_id, e)

        await asyncio.gather(*[close(executor_id) for executor_id in executor_ids])

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
                log.warning("session %s is over: executor %s does not have it", record.id, heartbeat.executor_id)
                await self._lose_part(record, heartbeat.executor_id)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """An executor ended its part of a session, and with it the session."""
        record = await self.store.get(event.session_id)
        if record is not None:
            await self._lose_part(record, event.executor_id)

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


def _no_fit(request: OpenSessionRequest, alive: int, placement: Placement, failed: dict[str, BusError]) -> str:
    """Why a session fits nowhere, with the numbers."""
    reasons = [f"{name} {why}" for name, why in placement.reasons.items()] + [f"{n}: {e}" for n, e in failed.items()]
    if request.gpu_count == 1:
        return "no executor fits: " + "; ".join(reasons)
    fitting = alive - len(reasons)
    return f"{request.gpu_count} devices were asked for, and {fitting} of {alive} executors fit: " + "; ".join(reasons)


def _none_took_it(failed: dict[str, BusError]) -> RefusedError:
    """Why no executor took a session: its own refusal if there is one."""
    for error in failed.values():
        if isinstance(error, RefusedError):
            return RefusedError(error.code, str(error), retryable=error.retryable)
    names = ", ".join(failed)
    return RefusedError(
        "router.executor_silent", f"executor {names} is registered but does not answer; see its log", retryable=True
    )
