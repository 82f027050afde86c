"""The router's actor: hears of executors, asks the pure core where sessions go, talks to executors, keeps sessions as tasks.

It decides in the database's turns (`Database.deciding`), so that several routers promise nothing twice; it waits for executors
outside of them, so that a frozen executor stops nobody but itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from opentelemetry import trace
from wooly_bus import subjects
from wooly_bus.app import ServiceApp
from wooly_bus.channel.token import channel_token
from wooly_bus.errors import BusError, BusTimeoutError, NoResponderError, RefusedError, shown
from wooly_bus.tracing import step, trace_id_of
from wooly_wis.credits import CheckBudgetReply, CheckBudgetRequest
from wooly_wis.messages import (
    AdmitSessionReply,
    AdmitSessionRequest,
    CheckTokenReply,
    CheckTokenRequest,
    CloseSessionReply,
    CloseSessionRequest,
    ExecutorHeartbeat,
    HostSessionReply,
    HostSessionRequest,
    NodeInfo,
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

from wooly_router.core.cluster import overcommit_of
from wooly_router.core.placement import Want, as_record, summary
from wooly_router.core.queue import held_devices
from wooly_router.core.registry import LOST_AFTER_S, Registry
from wooly_router.gate import Caller, Gate
from wooly_router.settings import RouterSettings
from wooly_router.state.tasks import Lease, PartRecord, TaskRecord
from wooly_router.state.world import World
from wooly_router.traces import trace_of

log = logging.getLogger("wooly.router")
#: Seconds that one executor has for an answer.
EXECUTOR_TIMEOUT_S = 2.0
#: Seconds that the scheduler has for one; without it sessions are opened as they ask to be.
SCHEDULER_TIMEOUT_S = 0.5
#: Seconds that metering has for one; without it nobody's budget is looked at.
METERING_TIMEOUT_S = 0.5
#: Seconds after which an opening client is answered in any case; it waits a little longer itself. Executors that were silent
#: are asked again within them: a host that swaps, or writes much, may hold one up for longer than one answer may take.
OPEN_BUDGET_S = 15.0
#: Seconds after its start in which a router that knows no executor waits for the first heartbeat.
HEARTBEAT_GRACE_S = 2.0
#: Seconds in which a client whose connection broke may still say that it closed its session.
ORDERLY_S = 0.5
#: A session younger than this may be missing in a heartbeat that was on its way when it was opened.
FRESH_S = 5.0
#: A session that is still being opened after this long belongs to a router that died.
ABANDONED_S = 2 * OPEN_BUDGET_S


class RouterActor:
    """Owns the registry of executors, and the sessions of those who ask this router.

    Args:
        settings: lease length.
        app: the connection to NATS.
        world: what all routers share.
        gate: who may ask.
        clock: seconds since the epoch; leases outlive the process.
    """

    def __init__(
        self,
        settings: RouterSettings,
        app: ServiceApp,
        world: World,
        gate: Gate,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.registry = Registry()
        self.world = world
        self.gate = gate
        self.clock = clock
        self.settings = settings
        self._app = app
        self._started = clock()
        self._channel_key = settings.channel_signer()
        self.issuer = settings.issuer()
        self.credentials_s = settings.credentials_s
        self.client_nats_url = settings.client_nats_url or shown(settings.nats_url)
        self._closing: set[asyncio.Task[None]] = set()
        app.serve(subjects.ROUTER_SESSION_OPEN, OpenSessionRequest, self.on_open_session, queue="router")
        app.serve(subjects.ROUTER_SESSION_RENEW, RenewSessionRequest, self.on_renew_session, queue="router")
        app.serve(subjects.ROUTER_SESSION_CLOSE, CloseSessionRequest, self.on_close_session, queue="router")
        app.serve(subjects.ROUTER_NODE_LIST, NodesRequest, self.on_nodes, queue="router")
        app.serve(subjects.ROUTER_TOKEN_CHECK, CheckTokenRequest, self.on_check_token, queue="router")
        app.serve_tenants(subjects.ROUTER_SESSION_OPEN, OpenSessionRequest, self.on_open_tenants, queue="router")
        app.serve_tenants(subjects.ROUTER_SESSION_RENEW, RenewSessionRequest, self.on_renew_tenants, queue="router")
        app.serve_tenants(subjects.ROUTER_SESSION_CLOSE, CloseSessionRequest, self.on_close_tenants, queue="router")
        app.serve_tenants(subjects.ROUTER_NODE_LIST, NodesRequest, self.on_nodes_of, queue="router")
        app.listen(subjects.EXECUTOR_HEARTBEAT, ExecutorHeartbeat, self.on_heartbeat)
        app.listen(subjects.EXECUTOR_SESSION_CLOSED, SessionClosed, self.on_session_closed)

    @property
    def bus(self) -> ServiceApp:
        """The connection to NATS, for who asks other services."""
        return self._app

    async def on_check_token(self, request: CheckTokenRequest) -> CheckTokenReply:
        """Who shows a token to another service."""
        caller = await self.gate.of_hash(request.secret_hash, "nats")
        return CheckTokenReply(
            actor=caller.actor,
            tenant=caller.tenant,
            may=tuple(sorted(caller.may)),
            until=caller.until,
            auth=self.gate.auth,
        )

    async def resume(self) -> None:
        """Take over the sessions of routers before: while none was there, no client could renew its lease."""
        await self.world.tasks.prolong_all(self.clock() + self.settings.lease_s)

    # -- opening -----------------------------------------------------------------------------------------------------

    async def on_open_session(self, request: OpenSessionRequest) -> OpenSessionReply:
        """Open a session for who shows a token, or anybody where none is asked for."""
        caller = await self.gate.over_nats(request.credential, request.tenant, "tasks:write")
        return await self._open_for(caller, request)

    async def on_open_tenants(self, request: OpenSessionRequest, tenant: str) -> OpenSessionReply:
        """Open a session for a tenant's NATS user."""
        return await self._open_for(await self.gate.of_tenant(tenant, request.tenant), request)

    async def _open_for(self, caller: Caller, request: OpenSessionRequest) -> OpenSessionReply:
        """Place a session: each of its devices on another executor, the best that answer and do not refuse; all or none."""
        request = request.model_copy(update={"tenant": caller.own, "credential": ""})
        until = self.clock() + OPEN_BUDGET_S
        await self._first_heartbeat()
        task = TaskRecord(
            id=secrets.token_hex(8),
            kind="session",
            tenant=request.tenant,
            created_at=self.clock(),
            name=request.client.program[:1024],
            client_host=request.client.host,
            priority=request.priority,
            gpu_mode=request.gpu_mode,
            required_vram=request.required_vram,
            noswap=not request.swap,
            wants={
                "gpu_count": request.gpu_count,
                "groups": list(request.node_groups),
                "vendor": request.vendor,
                "arch": request.arch,
                "brings": {"name": _model(request), "dedup": request.dedup},
                "weights": await self._expected(request),
            },
        )
        async with trace_of(self.world.traces, task, request.model) as parent:
            trace_id = trace_id_of(parent) if self.world.traces.keeps else ""
            trace.get_current_span().set_attribute("task_id", task.id)
            return await self._open_task(request, task, until, trace_id)

    async def _expected(self, request: OpenSessionRequest) -> list[str]:
        """The contents that a session will probably share: those that the tenant's last one of this model did."""
        if request.dedup == "off":
            return []
        return await self.world.brought.of(request.tenant, _model(request), request.dedup)

    async def _open_task(
        self, request: OpenSessionRequest, task: TaskRecord, until: float, trace_id: str
    ) -> OpenSessionReply:
        async with self.world.database.writing() as s:
            await self.world.tasks.add(s, task)
        failed: dict[str, BusError] = {}
        token = secrets.token_urlsafe(32)
        try:
            if refusal := await self.over_budget(task.tenant):
                raise RefusedError("router.over_budget", f"no session is opened: {refusal}")
            while True:
                with step("router", "place") as span:
                    executors, percents = await self._choose_again(task, failed, until)
                    span.set_attribute("executors", ", ".join([e.executor_id for e in executors]))
                with step("router", "host"):
                    reply = await self._host_all(request, task, token, executors, percents, until, failed)
                if reply is not None:
                    return reply.model_copy(update={"trace_id": trace_id})
                if self.clock() > until:
                    raise _none_took_it(failed)
        except BaseException as e:
            async with self.world.database.writing() as s:
                await self.world.tasks.move(
                    s, task.id, "failed", str(e) or type(e).__name__, self.clock(), only_from=["pending"]
                )
            raise

    async def over_budget(self, tenant: str) -> str:
        """Why a tenant may start nothing: it has spent its hard limit. Empty: it may.

        Without an answer it may, too: metering holds its sessions as soon as it can.
        """
        ask = CheckBudgetRequest(tenant=tenant)
        try:
            reply = await self._app.request(
                subjects.METERING_BUDGET_CHECK, ask, CheckBudgetReply, timeout=METERING_TIMEOUT_S
            )
        except BusError as e:
            if not isinstance(e, NoResponderError):
                log.warning("nobody says whether %s has credits left: %s", tenant, e)
            return ""
        return reply.refusal

    async def _first_heartbeat(self) -> None:
        while not self.registry.alive(self.clock()) and self.clock() - self._started < HEARTBEAT_GRACE_S:
            await asyncio.sleep(0.05)

    async def _choose_again(
        self, task: TaskRecord, failed: dict[str, BusError], until: float
    ) -> tuple[tuple[ExecutorHeartbeat, ...], tuple[int, ...]]:
        """Choose among those that have not failed; where none is left, among those that were only silent, too."""
        try:
            return await self._choose(task, failed)
        except RefusedError:
            silent = [name for name, error in failed.items() if isinstance(error, BusTimeoutError)]
            if not silent or self.clock() > until:
                raise
            for name in silent:
                del failed[name]
            return await self._choose(task, failed)

    async def _choose(
        self, task: TaskRecord, failed: dict[str, BusError]
    ) -> tuple[tuple[ExecutorHeartbeat, ...], tuple[int, ...]]:
        """Executors and the overcommit in force on each, with the session's claims on them noted: the next choice sees them."""
        now = self.clock()
        want = replace(task.want(), barred=frozenset(failed))
        alive = {e.executor_id: e for e in self.registry.alive(now)}
        if not alive:
            raise RefusedError(
                "router.no_executor",
                "no executor is registered; start one with `wooly up`, or with `python -m wooly_executor` on a machine "
                "that has the device",
                retryable=True,
            )
        if want.gpu_count > len(alive):
            have = "1 executor is alive" if len(alive) == 1 else f"{len(alive)} executors are alive"
            raise RefusedError(
                "router.too_few",
                f"{want.gpu_count} devices were asked for, and {have}, one device each; start more (`wooly up --gpus "
                f"{want.gpu_count}` for a local stack), or ask for fewer (WOOLYAI_GPU_COUNT)",
                retryable=True,
            )
        async with self.world.database.deciding() as s:
            await self.world.tasks.take_devices(s, task.id, ())
            config, nodes, pool = await self.world.pool(s, self.registry, now)
            queue = [t.waiting() for t in await self.world.tasks.queue(s)]
            held = held_devices(queue, pool, now, config.patience())
            placement = pool.place(want, held)
            if not placement.gpus:
                waits = {n: why for n, why in placement.waits.items() if n in alive}
                if want.gpu_count == 1 and failed and not waits.keys() - failed.keys():
                    raise _none_took_it(failed)
                raise RefusedError(
                    "router.no_fit", _no_fit(want, len(alive), placement.fitting, waits, failed), retryable=True
                )
            executors = tuple([alive[g.executor_id] for g in placement.gpus])
            parts = [PartRecord(e.executor_id, e.node) for e in executors]
            await self.world.tasks.take_devices(
                s, task.id, parts, placement=as_record(want, placement), attempt=task.attempt
            )
        return executors, tuple([overcommit_of(nodes.get(e.node), config) for e in executors])

    async def _host_all(
        self,
        request: OpenSessionRequest,
        task: TaskRecord,
        token: str,
        executors: tuple[ExecutorHeartbeat, ...],
        percents: tuple[int, ...],
        until: float,
        failed: dict[str, BusError],
    ) -> OpenSessionReply | None:
        """Have every executor take its part. None if one did not: it is in `failed` then, and the others have let go."""
        session_id = task.id
        policies = await self._admit_all(request, session_id, executors, percents, failed)
        if policies is None:
            return None
        lease = self.settings.lease_s
        opaque = await self.world.tenants.opaque_kernels(request.tenant)
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
                        swap=request.swap,
                        dedup=request.dedup,
                        overcommit_vram_percent=percent,
                        model=_model(request),
                        opaque_kernels=opaque,
                        lease_s=lease,
                        channel_key=self._channel_key.public,
                        at=self.clock(),
                    ),
                    HostSessionReply,
                    timeout=timeout,
                )
                for e, policy, percent in zip(executors, policies, percents, strict=True)
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
                    token=channel_token(
                        self._channel_key,
                        session_id=session_id,
                        tenant=request.tenant,
                        executor_id=executor.executor_id,
                        now=self.clock(),
                    ),
                )
                parts.append(part)
        if len(parts) < len(executors):
            taken = [p.executor_id for p in parts]
            await self.close_on(taken, session_id, "another executor did not take its part of the session")
            if unexpected:
                raise unexpected[0]
            return None
        now = self.clock()
        async with self.world.database.writing() as s:
            on = ", ".join(e.executor_id for e in executors)
            opened = await self.world.tasks.move(s, session_id, "started", f"on {on}", now, attempt=0)
            if opened:
                await self.world.tasks.set_lease(s, Lease(session_id, token, now + lease))
        if not opened:  # cancelled meanwhile
            await self.close_on([p.executor_id for p in parts], session_id, "the session was cancelled")
            raise RefusedError("router.cancelled", f"session {session_id} was cancelled while it was being opened")
        credentials = ""
        if self.issuer is not None:
            names, ttl_s = [e.executor_id for e in executors], self.settings.session_credentials_s
            credentials = self.issuer.session(request.tenant, session_id, names, ttl_s=ttl_s).text()
        return OpenSessionReply(
            session_id=session_id, token=token, lease_s=lease, parts=tuple(parts), credentials=credentials
        )

    async def _admit_all(
        self,
        request: OpenSessionRequest,
        session_id: str,
        executors: tuple[ExecutorHeartbeat, ...],
        percents: tuple[int, ...],
        failed: dict[str, BusError],
    ) -> list[SessionPolicy | None] | None:
        """The session's policy on each executor. None if the scheduler refuses one: it is in `failed` then."""
        asks = [
            AdmitSessionRequest(
                session_id=session_id,
                executor_id=e.executor_id,
                tenant=request.tenant,
                priority=request.priority,
                weight=request.weight,
                service_ns=request.service_ns,
                objective_ns=request.objective_ns,
                interval_ns=request.interval_ns,
                required_vram=request.required_vram or 0,
                swappable=request.swap,
                overcommit_vram_percent=percent,
            )
            for e, percent in zip(executors, percents, strict=True)
        ]
        replies = await asyncio.gather(*[self.admit(ask) for ask in asks])
        refused = {
            e.executor_id: reply.reason for e, reply in zip(executors, replies, strict=True) if not reply.admitted
        }
        for executor_id, reason in refused.items():
            log.warning("session %s is not admitted: %s", session_id, reason)
            failed[executor_id] = RefusedError("scheduler.refused", f"not admitted: {reason}", retryable=True)
        return None if refused else [reply.policy for reply in replies]

    async def admit(self, ask: AdmitSessionRequest) -> AdmitSessionReply:
        """What the scheduler says; where there is none, everything is admitted as it declares itself."""
        try:
            return await self._app.request(
                subjects.SCHEDULER_SESSION_ADMIT, ask, AdmitSessionReply, timeout=SCHEDULER_TIMEOUT_S
            )
        except BusError as e:
            if not isinstance(e, NoResponderError):
                log.warning("session %s is opened without the scheduler: %s", ask.session_id, e)
            policy = SessionPolicy(
                priority=ask.priority, weight=ask.weight, service_ns=ask.service_ns, objective_ns=ask.objective_ns
            )
            return AdmitSessionReply(admitted=True, policy=policy)

    # -- living ------------------------------------------------------------------------------------------------------

    async def _open(self, session_id: str, token: str) -> TaskRecord | None:
        """An open session, if there is one.

        Raises:
            RefusedError: the token is not the session's.
        """
        lease = await self.world.tasks.lease(session_id)
        if lease is None:
            return None
        if not _same(lease.token, token):
            raise RefusedError("router.no_session", f"session {session_id} is not yours")
        return await self.world.tasks.get(session_id)

    async def _must_be_of(self, session_id: str, tenant: str) -> None:
        """A session that there is must be this tenant's: its token alone does not do.

        Raises:
            RefusedError: it is another's.
        """
        record = await self.world.tasks.get(session_id)
        if record is not None and record.tenant != tenant:
            raise RefusedError("router.no_session", f"session {session_id} is not yours")

    async def on_renew_tenants(self, request: RenewSessionRequest, tenant: str) -> RenewSessionReply:
        """Prolong a lease of a tenant's."""
        await self.gate.of_tenant(tenant, None)
        await self._must_be_of(request.session_id, tenant)
        return await self.on_renew_session(request)

    async def on_close_tenants(self, request: CloseSessionRequest, tenant: str) -> CloseSessionReply:
        """End a session of a tenant's."""
        await self._must_be_of(request.session_id, tenant)
        return await self.on_close_session(request)

    async def on_renew_session(self, request: RenewSessionRequest) -> RenewSessionReply:
        """Prolong a lease, on all executors of the session and here."""
        record = await self._open(request.session_id, request.token)
        if record is None:
            raise RefusedError("router.no_session", await self._why_over(request.session_id))
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
                await self.lose_part(record, name, f"executor {name} has it no more")
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
        await self.world.tasks.prolong(record.id, self.clock() + min(leases))
        return RenewSessionReply(lease_s=min(leases))

    async def _why_over(self, session_id: str) -> str:
        task = await self.world.tasks.get(session_id)
        if task is None or task.kind != "session":
            return f"session {session_id} is not open"
        return f"session {session_id} is not open: it is {task.state}" + (f" ({task.reason})" if task.reason else "")

    async def on_close_session(self, request: CloseSessionRequest) -> CloseSessionReply:
        """End a session at its client's wish. Closing twice is no error."""
        record = await self._open(request.session_id, request.token)
        if record is None:
            return CloseSessionReply(closed=False)
        await self.end(record, "completed", request.reason or "closed by its client")
        return CloseSessionReply(closed=True)

    async def end(self, record: TaskRecord, state: str, reason: str) -> bool:
        """End a running session, here and on its executors. False if it has ended already."""
        async with self.world.database.writing() as s:
            ended = await self.world.tasks.move(s, record.id, state, reason, self.clock())
        if ended:
            await self.close_on([p.executor_id for p in record.parts], record.id, reason)
        return ended

    async def lose_part(self, record: TaskRecord, executor_id: str, reason: str, state: str = "failed") -> None:
        """One executor has the session no more: it is over, and the others are told while whoever calls goes on."""
        others = [p.executor_id for p in record.parts if p.executor_id != executor_id]
        async with self.world.database.writing() as s:
            lost = await self.world.tasks.move(s, record.id, state, reason, self.clock(), only_from=["started"])
        if lost and others:
            closing = asyncio.create_task(self.close_on(others, record.id, f"it ended on executor {executor_id}"))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _lose_soon(self, record: TaskRecord, executor_id: str, reason: str) -> None:
        """A client that leaves breaks its connection and says so to us: what it says comes first, if it comes."""
        await asyncio.sleep(ORDERLY_S)
        await self.lose_part(record, executor_id, reason)

    async def close_on(self, executor_ids: list[str], session_id: str, reason: str) -> None:
        """Have executors let a session go. One that does not answer is left to the session's lease there."""

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
        config, nodes = await self.world.settings()
        found: list[NodeInfo] = []
        for info in self.registry.nodes(self.clock()):
            node = nodes.get(info.node)
            more: dict[str, Any] = {"overcommit_vram_percent": overcommit_of(node, config)}
            if node is not None:
                more |= {"wish": node.wish, "groups": tuple(sorted(node.groups))}
            found.append(info.model_copy(update=more))
        return NodesReply(nodes=tuple(found))

    async def on_nodes_of(self, request: NodesRequest, tenant: str) -> NodesReply:
        """List all executors, with what a tenant may know of them: nothing of others' sessions."""
        await self.gate.of_tenant(tenant, None)
        reply = await self.on_nodes(request)
        found = [n.model_copy(update={"memory": n.memory and n.memory.of_tenant(tenant)}) for n in reply.nodes]
        return NodesReply(nodes=tuple(found))

    async def on_heartbeat(self, heartbeat: ExecutorHeartbeat) -> None:
        """An executor lives."""
        if self.registry.hear(heartbeat, self.clock()):
            log.info("executor %s (%s) is there", heartbeat.executor_id, heartbeat.device.name)

    async def on_session_closed(self, event: SessionClosed) -> None:
        """An executor ended its part of a session, and with it the session."""
        record = await self.world.tasks.get(event.session_id)
        brings = None if record is None else record.wants.get("brings")
        if record is not None and brings and event.contents:
            await self.world.brought.remember(
                record.tenant, brings["name"], brings["dedup"], event.contents, self.clock()
            )
        if record is not None and record.kind == "session" and record.state == "started":
            if event.reason:
                why = f"it ended on executor {event.executor_id}: {event.reason}"
                losing = asyncio.create_task(self._lose_soon(record, event.executor_id, why))
                self._closing.add(losing)
                losing.add_done_callback(self._closing.discard)
            else:
                await self.lose_part(record, event.executor_id, "closed by its client", "completed")

    # -- duties of the leader ----------------------------------------------------------------------------------------

    async def lapse(self) -> int:
        """End sessions whose lease is over, or that were never opened. Returns how many ended."""
        now = self.clock()
        self.registry.forget_old(now)
        records = [await self.world.tasks.get(task_id) for task_id in await self.world.tasks.lapsed(now)]
        ended = await asyncio.gather(
            *[self.end(r, "failed", "the session's lease lapsed") for r in records if r is not None]
        )
        for record in await self.world.tasks.in_states("pending", kind="session"):
            if now - record.created_at > ABANDONED_S:
                ended.append(await self.end(record, "failed", "the router that was opening it is gone"))
        return sum(ended)

    async def reconcile(self) -> int:
        """End sessions that an executor of theirs does not have (it was restarted), or whose executor is lost; how many."""
        now, count = self.clock(), 0
        for record in await self.world.tasks.in_states("started", kind="session"):
            for part in record.parts:
                reason = self.missing(part.executor_id, record.id, record.started_at or now)
                if reason:
                    log.warning("session %s is over: %s", record.id, reason)
                    await self.lose_part(record, part.executor_id, reason)
                    count += 1
                    break
        return count

    def missing(self, executor_id: str, session_id: str, since: float) -> str:
        """Why an executor cannot be serving a session that it took at a time; empty if it can.

        A router that has just started gives executors as long to be heard of as it takes to lose one.
        """
        now = self.clock()
        heard = max(self.registry.heard(executor_id) or 0.0, self._started)
        if now - heard > LOST_AFTER_S:
            return f"executor {executor_id} is lost: nothing was heard of it for {now - heard:.0f} s"
        if now - since <= FRESH_S or self.registry.heard(executor_id) is None:
            return ""
        return "" if self.registry.has(executor_id, session_id) else f"executor {executor_id} does not have it"


def _model(request: OpenSessionRequest) -> str:
    """What a session runs: as its client calls it, or the program's file."""
    return request.model or request.client.program.replace("\\", "/").rpartition("/")[2][:256]


def _same(token: str, given: str) -> bool:
    return secrets.compare_digest(token.encode(), given.encode())


def _no_fit(want: Want, alive: int, fitting: int, waits: Mapping[str, str], failed: Mapping[str, BusError]) -> str:
    """Why a session fits nowhere, with the numbers."""
    others = summary({n: why for n, why in waits.items() if n not in failed})
    reasons = "; ".join(([others] if others else []) + [f"{n}: {e}" for n, e in failed.items()])
    if want.gpu_count == 1:
        return f"no executor fits: {reasons}"
    return f"{want.gpu_count} devices were asked for, and {fitting} of {alive} executors fit: {reasons}"


def _none_took_it(failed: dict[str, BusError]) -> RefusedError:
    """Why no executor took a session: its own refusal if there is one."""
    for error in failed.values():
        if isinstance(error, RefusedError):
            return RefusedError(error.code, str(error), retryable=error.retryable)
    names = ", ".join(failed)
    return RefusedError(
        "router.executor_silent", f"executor {names} is registered but does not answer; see its log", retryable=True
    )
