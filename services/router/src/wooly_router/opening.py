"""Opens sessions.

Each device of a session goes to another executor: the best executors that answer and do not refuse. A session opens on all of
its devices or on none. The ranks of a gang get their devices together, with the first of them that asks (`gangs`). A session that
finds no room is refused or, if its client wants to wait, joins the queue (`waiting`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from opentelemetry import trace
from wooly_bus.channel.token import channel_token
from wooly_bus.credentials import Issuer
from wooly_bus.errors import BusError, BusTimeoutError, NoResponderError, RefusedError
from wooly_bus.supervision import start_errand
from wooly_bus.tracing import step, trace_id_of
from wooly_wis.messages import (
    AdmitSessionRequest,
    ExecutorHeartbeat,
    HostSessionReply,
    HostSessionRequest,
    OpenSessionReply,
    OpenSessionRequest,
    SessionPart,
    SessionPolicy,
)

from wooly_router.advice import Advice
from wooly_router.core.alternatives import would_fit
from wooly_router.core.cluster import overcommit_of
from wooly_router.core.gangs import ALONE, Gang
from wooly_router.core.placement import DeviceRequest, Pool, as_record, summary
from wooly_router.core.queue import Waiting, turn_of
from wooly_router.core.registry import FORGOTTEN_AFTER_S, Registry
from wooly_router.core.tasks import ENDED
from wooly_router.executors import Executors
from wooly_router.gangs import Gangs, reserved_for
from wooly_router.limits import Limits
from wooly_router.settings import RouterSettings
from wooly_router.state.database import UNREACHABLE
from wooly_router.state.tasks import Lease, PartRecord, TaskRecord
from wooly_router.state.world import World
from wooly_router.traces import trace_of
from wooly_router.waiting import SessionQueue, bound

log = logging.getLogger("wooly.router")
#: Deadline for the answer to an opening client, in seconds; the client itself waits a little longer. Within it, silent
#: executors are asked again: a host that swaps or writes much can delay an executor for longer than `EXECUTOR_TIMEOUT_S`.
OPEN_BUDGET_S = 15.0
#: Age in seconds from which a session that is still opening belongs to a router that has ended.
ABANDONED_S = 2 * OPEN_BUDGET_S
#: Seconds after its start for which a router without any known executor waits for the first heartbeat.
HEARTBEAT_GRACE_S = 2.0
#: Seconds for which an opening client that does not queue waits for a device that other sessions use. A script that has just
#: ended still counts until its executor has released the memory and reported it, and the next script may ask sooner.
LEAVING_S = 2.0
LEAVING_PAUSE_S = 0.4
#: Seconds for which an executor that died counts as one that is being started again: a session that needs it may wait.
RETURNS_S = 60.0

#: Seconds between two attempts to store the end of a session that could not be opened.
FAIL_AGAIN_S = 0.25
#: Codes of refusals for lack of memory by the scheduler and by an executor: they may still count a session that has ended.
FULL = frozenset({"scheduler.full", "executor.admission"})
#: The code of the refusal if executors live, as far as is known, but do not answer. They may have just ended: a moment later they
#: count as lost, and a new session waits for them.
SILENT = "router.executor_silent"
#: Codes of refusals that may end by themselves, so that a session which waits already goes on waiting.
PASSING = frozenset({"router.no_executor", "router.too_few", "router.no_fit"})


class TakenError(RefusedError):
    """A session does not fit next to the sessions that run now, or behind those that wait.

    Attributes:
        would_fit: smaller requests that would start now, in words.
        record: the part of the placement that is stored with the task.
    """

    would_fit = ""
    record: Mapping[str, object] = {}


class OvertakenError(RefusedError):
    """Another router opens the session, or has opened it: this router was silent for longer than `ABANDONED_S`."""

    def __init__(self, session_id: str) -> None:
        super().__init__("router.opening", f"session {session_id} is opened by another router", retryable=True)


class Opening:
    """Opens sessions.

    Args:
        settings: lease length; keys of the installation.
        world: the state that all routers share.
        registry: the known executors.
        executors: asks executors to host sessions.
        advice: asks metering and the scheduler first.
        issuer: signs NATS credentials for sessions; None: NATS requires none.
        clock: returns seconds since the epoch.
        limits: the limits of each tenant.

    Attributes:
        channel_key: signs tokens for data channels.
    """

    def __init__(
        self,
        settings: RouterSettings,
        world: World,
        registry: Registry,
        executors: Executors,
        advice: Advice,
        issuer: Issuer | None,
        clock: Callable[[], float],
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._settings, self._world, self._registry, self._clock = settings, world, registry, clock
        self._executors, self._advice, self._issuer = executors, advice, issuer
        self.channel_key = settings.channel_signer()
        self._started = clock()
        #: Sessions that this router is opening: the time in the database until which no other router opens them.
        self._claimed: dict[str, float] = {}
        self._queue = SessionQueue(world, clock)
        self._gangs = Gangs(world)

    async def open(self, request: OpenSessionRequest, known: TaskRecord | None = None) -> OpenSessionReply:
        """Open a session for the tenant in `request`, or tell its place in the queue if it wants to wait.

        Args:
            request: the client's request.
            known: the session, if it has a place in the queue and was read just now.

        Raises:
            RefusedError: the session cannot be opened now; the message gives the reason with numbers.
        """
        until = self._clock() + OPEN_BUDGET_S
        if request.place is not None:
            task = await self._queue.enter(request.place, request.tenant, known)
            try:
                if task.state == "started":
                    return await self._answer_again(bound(request, task), task, request.place.token, until)
                return await self._open_traced(bound(request, task), task, request.place.token, until)
            finally:
                self._queue.leave(task.id)
        self._limits.begin(request.tenant)
        await self._first_heartbeat()
        config, _ = await self._world.settings()
        recovery = config.recovery if request.asks_recovery else "on"
        task = TaskRecord(
            id=secrets.token_hex(8),
            kind="session",
            tenant=request.tenant,
            created_at=self._clock(),
            name=request.client.program[:1024],
            client_host=request.client.host,
            priority=request.priority,
            gpu_mode=request.gpu_mode,
            required_vram=request.required_vram,
            noswap=not request.swap,
            wants={
                "gpu_count": request.gpu_count,
                "groups": list(request.node_groups),
                "node": request.node,
                "near": request.near,
                "vendor": request.vendor,
                "arch": request.arch,
                "brings": {"name": _model(request), "dedup": request.dedup},
                "pid": request.client.pid,
                "weights": await self._expected(request),
                "claim": config.default_vram_claim,
                "recovers": request.recovers and recovery != "off",
                "recovery": recovery,
            },
        )
        return await self._open_traced(request, task, secrets.token_urlsafe(32), until)

    async def _open_traced(
        self, request: OpenSessionRequest, task: TaskRecord, token: str, until: float
    ) -> OpenSessionReply:
        async with trace_of(self._world.traces, task, request.model) as parent:
            trace_id = trace_id_of(parent) if self._world.traces.keeps else ""
            trace.get_current_span().set_attribute("task_id", task.id)
            return await self._open_task(request, task, token, until, trace_id)

    async def _answer_again(
        self, request: OpenSessionRequest, task: TaskRecord, token: str, until: float
    ) -> OpenSessionReply:
        """Answer a client whose session is open: the answer that opened it was lost, with its router or with NATS.

        Raises:
            RefusedError: an executor of the session does not answer now. If it is lost, the session ends, and its client may ask
                anew.
        """
        alive = {e.executor_id: e for e in self._registry.alive(self._clock())}
        executors = tuple([alive[p.executor_id] for p in task.parts if p.executor_id in alive])
        failed: dict[str, BusError] = {}
        if len(executors) == len(task.parts):
            config, nodes = await self._world.settings()
            percents = tuple([overcommit_of(nodes.get(e.node), config) for e in executors])
            reply = await self._host_all(request, task, token, executors, percents, until, failed)
            if reply is not None:
                return reply
        why = "; ".join([f"{name}: {error}" for name, error in failed.items()]) or "an executor of it is silent"
        raise RefusedError(
            "router.opening", f"session {task.id} is open, but cannot be used yet: {why}", retryable=True
        )

    async def _expected(self, request: OpenSessionRequest) -> list[str]:
        """Return the contents that a session will probably share: those that the tenant's last session of this model shared."""
        if request.dedup == "off":
            return []
        return await self._world.brought.of(request.tenant, _model(request), request.dedup)

    async def _open_task(
        self, request: OpenSessionRequest, task: TaskRecord, token: str, until: float, trace_id: str
    ) -> OpenSessionReply:
        if request.place is None:
            task = await self._add(request, task, token)
        failed: dict[str, BusError] = {}
        silent: set[str] = set()
        try:
            if request.place is None:
                await self._check_budget(task.tenant)
            while True:
                try:
                    with step("router", "place") as span:
                        executors, percents = await self._choose_again(task, request.queue, failed, until)
                        span.set_attribute("executors", ", ".join([e.executor_id for e in executors]))
                    with step("router", "host"):
                        reply = await self._host_all(request, task, token, executors, percents, until, failed)
                    silent |= {name for name, error in failed.items() if isinstance(error, BusTimeoutError)}
                    if reply is not None:
                        silent -= {part.executor_id for part in reply.parts}
                        return reply.model_copy(update={"trace_id": trace_id})
                    if self._clock() > until:
                        raise _no_host(failed)
                except RefusedError as e:
                    if not _waits(request, e):
                        raise
                    taken = e if isinstance(e, TakenError) else TakenError(e.code, str(e))
                    return await self._queue.wait(task, token, str(e), taken.would_fit, taken.record)
        except OvertakenError:
            raise
        except BaseException as e:
            if request.place is not None and isinstance(e, UNREACHABLE):  # its client asks again, or its lease ends
                await self._queue.put_back(task.id)
                raise
            reason, mine = str(e) or type(e).__name__, token if request.queue else ""
            try:
                await self._fail(task, mine, reason)
            except UNREACHABLE:
                start_errand(self._fail_later(task, mine, reason), f"end of session {task.id}")
            raise
        finally:
            self._claimed.pop(task.id, None)
            if silent:  # they may still host the session, which nobody uses
                unused = await self._unused(task.id, silent)
                closing = self._close(unused, task.id, "it was opened elsewhere, or not at all")
                start_errand(closing, f"closing of session {task.id}")

    async def _close(self, names: list[str], session_id: str, reason: str) -> None:
        """Close a session on executors on which it does not run.

        The request may be late, and the session may have been opened there meanwhile: then it goes on in another executor.
        """
        await self._executors.close(names, session_id, reason, passing=True)

    async def _unused(self, session_id: str, names: Collection[str]) -> list[str]:
        """Those of some executors on which no other router has opened a session meanwhile."""
        known = None
        with contextlib.suppress(*UNREACHABLE):
            known = await self._world.tasks.get(session_id)
        used = set() if known is None or known.state in ENDED else {p.executor_id for p in known.parts}
        return sorted(set(names) - used)

    def _check_mine(self, task: TaskRecord, known: TaskRecord | None) -> None:
        """Check, inside a transaction, that no other router opens a session.

        Args:
            task: the session, as this router has read it before.
            known: the session as it is now.

        Raises:
            OvertakenError: another one does, or has.
            RefusedError: the session was cancelled.
        """
        if known is None or known.state in ENDED:
            raise _cancelled(task.id)
        claimed = self._claimed.get(task.id)  # before, a later question of its client may take it over
        mine = claimed is None or known.retry_at == claimed
        if not mine or (known.state, known.attempt) != ("pending", task.attempt):
            raise OvertakenError(task.id)

    async def _fail(self, task: TaskRecord, token: str, reason: str) -> None:
        """End a session that could not be opened.

        Another request of its client may have taken it over: then it has another token. An empty token fits all sessions.
        """
        async with self._world.database.writing() as s:
            lease = await self._world.tasks.lease(task.id, s)
            if lease is None or token in ("", lease.token):
                await self._world.tasks.move(s, task.id, "failed", reason, self._clock(), only_from=["pending"])

    async def _fail_later(self, task: TaskRecord, token: str, reason: str) -> None:
        """End a session that could not be opened, as soon as the database answers. It would keep its place and its devices."""
        until = time.monotonic() + ABANDONED_S
        while time.monotonic() < until:
            await asyncio.sleep(FAIL_AGAIN_S)
            with contextlib.suppress(*UNREACHABLE):
                await self._fail(task, token, reason)
                return

    async def _add(self, request: OpenSessionRequest, task: TaskRecord, token: str) -> TaskRecord:
        """Store a new session; if its client wants to wait, as a part of the queue. Returns it as it is stored.

        Raises:
            LimitError: the tenant has too many sessions, waiting ones included.
        """
        # Each of several simultaneous requests counts the ones before it.
        async with self._world.database.deciding() as s:
            stored = False
            if request.gang is not None:
                task, stored = await self._gangs.enlist(s, task, request.gang)
            if not stored:
                held = await self._world.tasks.count(s, task.tenant, "session", "pending", "started")
                held += max(task.gang.size - 1, 0) if task.gang.task_id else 0
                self._limits.check(task.tenant, "open sessions", held, "tenant_sessions", "close one first")
                await self._world.tasks.add(s, task)
            if request.queue:
                await self._queue.join(s, task, token)
        return task

    async def _check_budget(self, tenant: str) -> None:
        """Check that a tenant may open sessions.

        Raises:
            RefusedError: the tenant has no budget left.
        """
        if refusal := await self._advice.over_budget(tenant):
            raise RefusedError("router.over_budget", f"no session is opened: {refusal}")

    async def _check_tenant(self, request: OpenSessionRequest) -> bool:
        """Return whether the session may launch kernels that executors cannot check.

        Raises:
            RefusedError: the session waited for a device, and its tenant has no budget left.
        """
        if request.place is not None:
            await self._check_budget(request.tenant)
        return await self._world.tenants.opaque_kernels(request.tenant)

    async def _first_heartbeat(self) -> None:
        while not self._registry.alive(self._clock()) and self._clock() - self._started < HEARTBEAT_GRACE_S:
            await asyncio.sleep(0.05)

    async def _choose_again(
        self, task: TaskRecord, queues: bool, failed: dict[str, BusError], until: float
    ) -> tuple[tuple[ExecutorHeartbeat, ...], tuple[int, ...]]:
        """Choose among the executors that have not failed.

        If no executor is left, silent executors are tried again. If other sessions use all devices, and the session does not
        queue, the choice is repeated for `LEAVING_S`.
        """
        leaving = time.monotonic() + LEAVING_S
        while True:
            try:
                return await self._choose(task, queues, failed)
            except RefusedError as e:
                silent = [name for name, error in failed.items() if isinstance(error, BusTimeoutError)]
                taken = isinstance(e, TakenError) and not queues and time.monotonic() < leaving
                if not (silent or taken) or self._clock() > until:
                    raise
            for name in silent:
                del failed[name]
            if not silent:
                await asyncio.sleep(LEAVING_PAUSE_S)

    async def _choose(
        self, task: TaskRecord, queues: bool, failed: dict[str, BusError]
    ) -> tuple[tuple[ExecutorHeartbeat, ...], tuple[int, ...]]:
        """Choose executors, and the overcommit percentage in force on each.

        The claims are stored, so the next choice counts them.
        """
        now = self._clock()
        want = replace(task.want(), barred=task.want().barred | frozenset(failed))
        alive = {e.executor_id: e for e in self._registry.alive(now)}
        if not alive:
            raise await self._none_alive(now)
        count = max(want.gpu_count, task.gang.devices)
        too_few = self._too_few(count, alive, now) if count > len(alive) else None
        if too_few is not None and not task.gang.task_id:
            raise too_few
        async with self._world.database.deciding() as s:
            self._check_mine(task, await self._world.tasks.get(task.id, s))
            gang = task.gang if not task.attempt else ALONE  # after a loss, each rank gets another device alone
            if gang.task_id:
                ranks = {r.id: r for r in await self._world.tasks.gang(gang.task_id, s)}
                chosen = alive.get(reserved_for(ranks[task.id]))
                if chosen is not None and chosen.executor_id not in want.barred:
                    await self._world.tasks.take_devices(
                        s, task.id, [PartRecord(chosen.executor_id, chosen.node)], retry_at=now + ABANDONED_S
                    )
                    self._claimed[task.id] = now + ABANDONED_S
                    config, nodes = await self._world.settings(s)
                    return (chosen,), (overcommit_of(nodes.get(chosen.node), config),)
                if any(r.started_at is not None for r in ranks.values()):
                    gang = ALONE  # the others stay where they are
            if too_few is not None and gang.task_id:
                raise too_few
            if gang.task_id:
                for rank in ranks.values():
                    if rank.state == "pending":
                        await self._world.tasks.take_devices(s, rank.id, ())
            if task.parts or failed:
                await self._world.tasks.take_devices(s, task.id, ())
            config, nodes, pool = await self._world.pool(s, self._registry, now)
            queue = [t.waiting() for t in await self._world.tasks.queue(s)]
            me = Waiting(task.id, task.priority, task.created_at, want, gang=gang)
            # In a thread, because a long queue takes long, and the event loop must receive heartbeats.
            turn = await asyncio.to_thread(turn_of, me, queue, pool, now, config.patience())
            placement = turn.placement
            if not placement.gpus:
                waits = {n: why for n, why in placement.waits.items() if n in alive}
                if want.gpu_count == 1 and failed and not waits.keys() - failed.keys():
                    raise _no_host(failed)
                why = _no_fit(want, gang, len(alive), placement.fitting, waits, failed)
                taken = TakenError("router.no_fit", why, retryable=True)
                if not me.place(Pool(pool.gpus()), ()).gpus:
                    silent = self._silent(alive, now)
                    back = [
                        replace(g, state=nodes[g.node].wish if g.node in nodes else "active")
                        for g in pool.gpus()
                        if g.executor_id in silent
                    ]
                    others = [g for g in pool.gpus() if g.executor_id not in silent]
                    if not me.place(Pool([*others, *back]), ()).gpus:
                        raise RefusedError("router.no_fit", why, retryable=True)
                    taken = TakenError("router.no_fit", f"{why}; {_may_come_back(silent)}", retryable=True)
                taken.would_fit, taken.record = would_fit(want, pool, turn.held), as_record(want, placement)
                raise taken
            alive |= {
                e.executor_id: e for e in self._registry.alive(now)
            }  # some may have come while the database was busy
            executors = tuple([alive[g.executor_id] for g in placement.gpus])
            parts = [PartRecord(e.executor_id, e.node) for e in executors]
            if me.gang.task_id:
                await self._gangs.reserve(s, task, parts, now)
                executors, parts = executors[task.rank : task.rank + 1], parts[task.rank : task.rank + 1]
            begun = {"placement": as_record(want, placement), "attempt": task.attempt, "retry_at": now + ABANDONED_S}
            await self._world.tasks.take_devices(s, task.id, parts, **begun)
            self._claimed[task.id] = now + ABANDONED_S
            if queues:  # while a router opens it, its client does not ask
                await self._queue.keep(s, task, now + ABANDONED_S)
        return executors, tuple([overcommit_of(nodes.get(e.node), config) for e in executors])

    async def _none_alive(self, now: float) -> RefusedError:
        """Explain that there is no executor. If there was one lately, it may come back, and a session may wait for it."""
        remedy = "start one with `wooly up`, or with `python -m wooly_executor` on a machine that has the device"
        heard = {g.executor_id: g.last_seen for g in await self._world.nodes.gpus()}
        heard |= {e.executor_id: self._registry.heard(e.executor_id) or 0.0 for e in self._registry.all()}
        name, at = max(heard.items(), key=lambda item: item[1], default=("", 0.0))
        if now - at > FORGOTTEN_AFTER_S:
            return RefusedError("router.no_executor", f"no executor is registered; {remedy}", retryable=True)
        why = f"no executor is alive; the last one, {name}, was heard {max(now - at, 0.0):.0f} s ago; {remedy}"
        return TakenError("router.no_executor", why, retryable=True)

    def _silent(self, alive: Collection[str], now: float) -> dict[str, float]:
        """The executors that died lately and may be started again, with the seconds since they were heard.

        Not those of the database: a stack that is started again with fewer executors has them, too.
        """
        known = {e.executor_id: now - (self._registry.heard(e.executor_id) or 0.0) for e in self._registry.all()}
        return {name: max(s, 0.0) for name, s in known.items() if name not in alive and s <= RETURNS_S}

    def _too_few(self, count: int, alive: Collection[str], now: float) -> RefusedError:
        """Explain that there are too few executors. Some may have just died, and come back: a session may wait for them."""
        have = "1 executor is alive" if len(alive) == 1 else f"{len(alive)} executors are alive"
        why = f"{count} devices were requested, but only {have}, with one device each"
        silent = self._silent(alive, now)
        if count <= len(alive) + len(silent):
            return TakenError("router.too_few", f"{why}; {_may_come_back(silent)}", retryable=True)
        return RefusedError(
            "router.too_few",
            f"{why}; start more (`wooly up --gpus {count}` for a local stack), or ask for fewer (WOOLYAI_GPU_COUNT)",
            retryable=True,
        )

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
        """Ask every executor to host its part.

        Returns None if one refuses: `failed` names it, and the other executors have closed their parts.
        """
        policies, opaque = await asyncio.gather(
            self._admit_all(request, task, executors, percents, failed), self._check_tenant(request)
        )
        if policies is None:
            return None
        asks = [
            (e.executor_id, self._ask(request, task, token, policy, percent, opaque, part))
            for part, (e, policy, percent) in enumerate(zip(executors, policies, percents, strict=True))
        ]
        answers = await self._executors.host(asks, until - self._clock())
        parts, unexpected = self._parts(request.tenant, task.id, executors, answers, failed)
        taken = [p.executor_id for p in parts]
        if len(parts) < len(executors):
            if task.state == "started":  # it is open there, and its client asks again
                return None
            await self._close(taken, task.id, "another executor did not take its part of the session")
            if unexpected is not None:
                raise unexpected
            return None
        if task.state != "started":
            priority = await self._start(task, token, taken)
            if priority != request.priority:  # it was changed while the executors took the session
                await self._executors.steer(taken, task.id, priority)
        credentials = ""
        if self._issuer is not None:
            ttl_s = self._settings.session_credentials_s
            credentials = self._issuer.session(request.tenant, task.id, taken, ttl_s=ttl_s).text()
        lease = self._settings.lease_s
        return OpenSessionReply(
            session_id=task.id,
            token=token,
            lease_s=lease,
            parts=tuple(parts),
            credentials=credentials,
            recovery=task.wants.get("recovery", "auto"),
        )

    def _ask(
        self,
        request: OpenSessionRequest,
        task: TaskRecord,
        token: str,
        policy: SessionPolicy | None,
        percent: int,
        opaque: bool,
        part: int,
    ) -> HostSessionRequest:
        return HostSessionRequest(
            session_id=task.id,
            token=token,
            tenant=request.tenant,
            priority=request.priority,
            policy=policy,
            quota=request.required_vram,
            claim=task.want().claim,
            swap=request.swap,
            dedup=request.dedup,
            overcommit_vram_percent=percent,
            model=_model(request),
            opaque_kernels=opaque,
            lease_s=self._settings.lease_s,
            channel_key=self.channel_key.public,
            at=self._clock(),
            epoch=task.attempt,
            part=part,
            repeats=bool(task.wants.get("repeats")),
        )

    def _parts(
        self,
        tenant: str,
        session_id: str,
        executors: Sequence[ExecutorHeartbeat],
        answers: Sequence[HostSessionReply | BaseException],
        failed: dict[str, BusError],
    ) -> tuple[list[SessionPart], BaseException | None]:
        """Return the hosted parts, and the first unexpected answer.

        Executors that refused or did not answer are added to `failed`.
        """
        parts: list[SessionPart] = []
        unexpected: BaseException | None = None
        for executor, answer in zip(executors, answers, strict=True):
            name = executor.executor_id
            if isinstance(answer, (NoResponderError, BusTimeoutError, RefusedError)):
                log.warning("executor %s did not take a session: %s", name, answer)
                failed[name] = answer
            elif isinstance(answer, BaseException):
                unexpected = unexpected or answer
            else:
                token = channel_token(
                    self.channel_key, session_id=session_id, tenant=tenant, executor_id=name, now=self._clock()
                )
                part = SessionPart(
                    executor_id=name,
                    node=executor.node,
                    endpoints=answer.endpoints,
                    device=executor.device,
                    token=token,
                )
                parts.append(part)
        return parts, unexpected

    async def _start(self, task: TaskRecord, token: str, names: list[str]) -> int:
        """Mark the session as started: all executors host it. Returns the class that it should have now.

        Raises:
            RefusedError: the session was cancelled meanwhile.
            OvertakenError: another router opens it.
        """
        now, session_id = self._clock(), task.id
        try:
            async with self._world.database.writing() as s:
                known = await self._world.tasks.locked(s, session_id)
                self._check_mine(task, known)
                await self._world.tasks.move(s, session_id, "started", f"on {', '.join(names)}", now)
                await self._world.tasks.set_lease(s, Lease(session_id, token, now + self._settings.lease_s))
        except RefusedError as e:
            await self._close(await self._unused(session_id, names), session_id, str(e))
            raise
        except Exception as e:
            await self._close(names, session_id, f"its start could not be stored: {type(e).__name__}")
            raise
        return task.priority if known is None else known.priority

    async def _admit_all(
        self,
        request: OpenSessionRequest,
        task: TaskRecord,
        executors: tuple[ExecutorHeartbeat, ...],
        percents: tuple[int, ...],
        failed: dict[str, BusError],
    ) -> list[SessionPolicy | None] | None:
        """Return the session's policy on each executor. None if the scheduler refuses one: it is in `failed` then."""
        asks = [
            AdmitSessionRequest(
                session_id=task.id,
                executor_id=e.executor_id,
                tenant=request.tenant,
                priority=request.priority,
                weight=request.weight,
                service_ns=request.service_ns,
                objective_ns=request.objective_ns,
                interval_ns=request.interval_ns,
                required_vram=task.want().asked,
                swappable=request.swap,
                overcommit_vram_percent=percent,
            )
            for e, percent in zip(executors, percents, strict=True)
        ]
        replies = await asyncio.gather(*[self._advice.admit(ask) for ask in asks])
        refused = {e.executor_id: reply for e, reply in zip(executors, replies, strict=True) if not reply.admitted}
        for executor_id, reply in refused.items():
            log.warning("session %s is not admitted: %s", task.id, reply.reason)
            code = "scheduler.full" if reply.full else "scheduler.refused"
            failed[executor_id] = RefusedError(code, f"not admitted: {reply.reason}", retryable=True)
        return None if refused else [reply.policy for reply in replies]


def _waits(request: OpenSessionRequest, refusal: RefusedError) -> bool:
    """Tell whether a session that is refused now waits in the queue, or goes on waiting."""
    if not request.queue:
        return False
    if isinstance(refusal, TakenError) or refusal.code == SILENT or refusal.code in FULL:
        return True
    return request.place is not None and refusal.code in PASSING


def _cancelled(session_id: str) -> RefusedError:
    return RefusedError("router.cancelled", f"session {session_id} was cancelled while it was being opened")


def _model(request: OpenSessionRequest) -> str:
    """Return the model of a session: the name that the client gave, or the file name of the program."""
    return request.model or request.client.program.replace("\\", "/").rpartition("/")[2][:256]


def _no_fit(
    want: DeviceRequest, gang: Gang, alive: int, fitting: int, waits: Mapping[str, str], failed: Mapping[str, BusError]
) -> str:
    """Explain with numbers why a session does not fit."""
    others = summary({n: why for n, why in waits.items() if n not in failed})
    reasons = "; ".join(([others] if others else []) + [f"{n}: {e}" for n, e in failed.items()])
    if gang.task_id:
        return f"no executors can take the {gang.size} ranks of the program together: {reasons}"
    if want.gpu_count == 1:
        return f"no executor can take the session: {reasons}"
    return f"{want.gpu_count} devices were requested, but only {fitting} of {alive} executors can take one: {reasons}"


def _may_come_back(silent: Mapping[str, float]) -> str:
    told = ", ".join([f"{name} was heard {s:.0f} s ago" for name, s in sorted(silent.items())])
    return f"others may come back: {told}"


def _no_host(failed: dict[str, BusError]) -> RefusedError:
    """Explain why no executor hosts a session: an executor's own refusal, if there is one."""
    for error in failed.values():
        if isinstance(error, RefusedError):
            return RefusedError(error.code, str(error), retryable=error.retryable)
    names = ", ".join(failed)
    return RefusedError(SILENT, f"executor {names} is alive but does not answer; see its log", retryable=True)
