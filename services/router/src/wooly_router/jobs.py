"""Jobs: read from the queue of commands, placed, started on executors, ended by the executors' reports, published as events.

A job whose submission is acknowledged is in the database. Attempts are numbered, and only one of several executions counts: that
of the current attempt, or of an earlier one that has completed before the current one has begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from opentelemetry import trace
from sqlalchemy.ext.asyncio import AsyncSession
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.blobs import BlobCorruptError, BlobMissingError
from wooly_bus.errors import BusError, BusTimeoutError, EnvelopeError, RefusedError
from wooly_bus.queue_reader import Taken, take
from wooly_bus.streams import StreamError, ensure_stream, publish
from wooly_bus.supervision import start_errand
from wooly_bus.tracing import consumer_span, context_of, step, tracer
from wooly_wis.messages import (
    AdmitSessionRequest,
    JobEnded,
    JobOutput,
    RunJobRequest,
    SessionPolicy,
    SubmitJob,
    SubmitJobReply,
    TaskChanged,
)

from wooly_router.actor import RouterActor
from wooly_router.ceilings import ABOVE_CEILING_CODE
from wooly_router.core.ceilings import Wish
from wooly_router.core.cluster import ClusterConfig, overcommit_of
from wooly_router.core.placement import as_record, summary
from wooly_router.core.queue import Waiting, plan
from wooly_router.core.tasks import backoff_s, is_due
from wooly_router.executors import EXECUTOR_TIMEOUT_S
from wooly_router.gate import DEFAULT_TENANT, Caller
from wooly_router.limits import LimitError
from wooly_router.modules import ModuleChecks
from wooly_router.state.database import UNREACHABLE, log_away
from wooly_router.state.tasks import PartRecord, TaskRecord, session_of
from wooly_router.traces import trace_of

log = logging.getLogger("wooly.router")
#: Prefix of a job's reason while the job waits for credits.
OVER_BUDGET = "waits for credits: "
#: Submitted jobs that are examined at the same time; seconds before the job of a tenant at a limit is examined again.
COMMANDS_AT_ONCE, LIMIT_RETRY_S = 16, 5.0
#: With whom jobs share the constants of their modules: with all sessions and jobs of their tenant.
JOBS_DEDUP = "tenant"
#: Seconds for an executor to confirm a job that it was asked to run. After that, the router that asked it counts as dead.
START_CONFIRM_S = 15.0
#: Grace period, in seconds, for a job that its executor's heartbeats do not list: its end report may be on its way.
MISSING_GRACE_S = 5.0
#: Seconds for which metering's answer about a tenant's budget is used, and minimum wait of a job whose tenant has no budget
#: left.
BUDGET_S = 2.0
OVER_BUDGET_S = 3 * BUDGET_S
#: Maximum number of concurrent budget requests to metering.
BUDGETS_AT_ONCE = 16
#: Maximum number of jobs that one round starts.
MAX_STARTS = 64
#: Maximum number of waiting jobs whose reason one round updates, from the front of the queue.
MAX_REASON_UPDATES = 200


class JobActor:
    """The jobs of the cluster. Any router accepts them; the leader places and watches them."""

    def __init__(self, app: ServiceApp, router: RouterActor) -> None:
        self._app, self._router = app, router
        self._tasks, self._world = router.world.tasks, router.world
        self._missing: dict[tuple[str, int], float] = {}
        #: By tenant with waiting jobs: the time of the last budget request, and the reason why the tenant may start nothing.
        self._budgets: dict[str, tuple[float, str]] = {}
        self._changed = asyncio.Event()
        self.modules = ModuleChecks(router.settings)
        app.serve_tenants(contracts.ROUTER_JOB_SUBMIT, self.on_submit_tenants)

    async def prepare(self) -> None:
        """Create what submitters need: the command queue, the event stream, the default tenant's blob store.

        Repeats until JetStream answers.
        """
        complaint = ""
        while True:
            try:
                for event in (contracts.ROUTER_JOB_COMMAND, contracts.ROUTER_TASK_CHANGED):
                    await ensure_stream(self._app.jetstream(), event)
                await self._router.blobs.store(DEFAULT_TENANT).ready()
                return
            except StreamError as e:
                if str(e) != complaint:
                    log.warning("jobs cannot be accepted yet: %s; trying again", e)
                complaint = str(e)
                await asyncio.sleep(2.0)

    # -- taking in ---------------------------------------------------------------------------------------------------

    async def take_commands(self) -> None:
        """Accept submitted jobs until cancelled."""
        await self.prepare()
        turn, working = asyncio.Semaphore(COMMANDS_AT_ONCE), set[asyncio.Task[None]]()
        async for taken in take(self._app.jetstream(), contracts.ROUTER_JOB_COMMAND, "router"):
            await turn.acquire()  # the module of one job may take long; other jobs are examined meanwhile
            task = start_errand(self._take_command(taken), "a submitted job")
            working.add(task)
            task.add_done_callback(working.discard)
            task.add_done_callback(lambda _: turn.release())

    async def _take_command(self, taken: Taken[SubmitJob]) -> None:
        try:
            with consumer_span("router", taken.subject, taken.headers):
                job = taken.payload()
                caller = await self._router.gate.over_nats(job.credential, job.tenant, "tasks:write")
                tenant = self._router.gate.makes_for(caller, job.tenant)
                await self._submit_command(job.model_copy(update={"tenant": tenant, "credential": ""}), caller)
            await taken.done()
        except LimitError as e:  # it stays in the queue: an acknowledged submission becomes a task
            await taken.later(max(e.retry_s, LIMIT_RETRY_S))
        except (EnvelopeError, RefusedError) as e:
            log.warning("a submitted job is dropped, because it is malformed or not permitted: %s", e)
            await taken.done()
        except UNREACHABLE as e:
            log_away("a submitted job is accepted later", e)
            await taken.later(2.0)
        except Exception:
            log.exception("a submitted job could not be accepted; it will be retried")
            await taken.later(2.0)

    async def _submit_command(self, job: SubmitJob, caller: Caller) -> None:
        """Accept a job whose submitter does not wait for an answer. If a ceiling refuses it, it becomes a failed job."""
        try:
            await self.on_submit_job(job, caller)
        except RefusedError as e:
            if e.code != ABOVE_CEILING_CODE:
                raise
            await self._submit(job, f"{e.code}: {e}")

    async def on_submit_tenants(self, job: SubmitJob, tenant: str) -> SubmitJobReply:
        """Accept a job from a tenant's NATS user. The job is in the database before the answer."""
        caller = await self._router.gate.of_tenant(tenant, job.tenant)
        task = await self.on_submit_job(job.model_copy(update={"tenant": caller.own, "credential": ""}), caller)
        if task.tenant != caller.own:
            raise RefusedError("router.id_taken", f"job id {job.job_id} is already in use; choose a random id")
        return SubmitJobReply(job_id=task.id)

    async def on_submit_job(self, job: SubmitJob, caller: Caller | None = None) -> TaskRecord:
        """Accept a job. Afterwards it is pending, or it has failed because it can never run. A second call changes nothing.

        `caller`: the submitter; ceilings do not bind an administrator.

        Raises:
            RefusedError: the job asks for more than its tenant may have.
            LimitError: too many jobs of the tenant wait, or the tenant submits too fast.
            StreamError: the module cannot be read now.
        """
        known = await self._tasks.get(job.job_id)
        if known is not None:
            if known.tenant != job.tenant:
                log.warning("job %s of %s is dropped: a job of another tenant has this id", job.job_id, job.tenant)
            return known
        self._router.limits.begin(job.tenant)
        async with self._world.database.reading() as s:  # before the module is fetched and checked
            await self._room_for(s, job.tenant)
        await self._router.blobs.room_for(job.tenant, 0, begins=True)  # its results will be blobs
        wish = Wish.of_start(job.priority, job.weight, job.gpu_mode)
        granted = await self._router.ceilings.granted(job.tenant, wish, caller)
        return await self._submit(job.model_copy(update={"priority": granted.priority, "weight": granted.weight}))

    async def _submit(self, job: SubmitJob, refusal: str = "") -> TaskRecord:
        """Store a job: as pending or, with a `refusal`, as failed."""
        now = self._router.clock()
        task = TaskRecord(
            id=job.job_id,
            kind="job",
            tenant=job.tenant,
            created_at=now,
            name=job.name,
            priority=job.priority,
            gpu_mode=job.gpu_mode,
            required_vram=job.required_vram,
            noswap=job.noswap,
            wants={
                "groups": list(job.node_groups),
                "vendor": job.vendor,
                "arch": job.arch,
                "brings": {"name": job.module, "dedup": JOBS_DEDUP},
            },
            spec={
                "module": job.module,
                "inputs": [b.model_dump(exclude={"schema_version"}) for b in job.inputs],
                "weight": job.weight,
                "attempts": job.attempts,
            },
            deadline_at=None if job.deadline_s is None else now + job.deadline_s,
        )
        async with trace_of(self._world.traces, task) as parent:
            trace.get_current_span().set_attribute("task_id", task.id)
            traced = replace(task, spec=(task.spec or {}) | {"trace": parent}) if parent else task
            return await self._take_in(job, traced, refusal)

    async def _take_in(self, job: SubmitJob, task: TaskRecord, refusal: str) -> TaskRecord:
        if not refusal:
            task, refusal = await self._check_module(job, task)
        # Of jobs that arrive at the same time, each counts those before it.
        async with self._world.database.deciding() as s:
            if (known := await self._tasks.get(job.job_id, s)) is not None:
                return known
            await self._room_for(s, job.tenant)
            if not await self._tasks.add(s, task):
                return await self._tasks.get(job.job_id, s) or task
            if refusal:
                await self._tasks.move(s, task.id, "failed", refusal, task.created_at)
        self._changed.set()
        return task

    async def _check_module(self, job: SubmitJob, task: TaskRecord) -> tuple[TaskRecord, str]:
        """Check the job's module.

        Returns the job with the memory that the module needs, and the reason why it can never run (or "").
        """
        try:
            checked = await self.modules.check(self._router.blobs.store(job.tenant), job.tenant, job.module)
        except (BlobMissingError, BlobCorruptError) as e:
            return task, f"{e.code}: {e}"
        return replace(task, required_vram=task.required_vram or max(checked.peak, 1)), checked.refusal

    async def _room_for(self, s: AsyncSession, tenant: str) -> None:
        """Check that a tenant may have one more waiting job.

        Raises:
            LimitError: it may not.
        """
        waiting = await self._tasks.count(s, tenant, "job", "pending")
        self._router.limits.check(
            tenant, "waiting jobs", waiting, "tenant_jobs", "wait for some of them, or cancel them"
        )

    # -- ending ------------------------------------------------------------------------------------------------------

    async def take_reports(self) -> None:
        """Record how attempts ended, until cancelled."""
        async for taken in take(self._app.jetstream(), contracts.EXECUTOR_JOB_ENDED, "router"):
            try:
                await self.on_job_ended(taken.payload())
                await taken.done()
            except EnvelopeError as e:
                log.warning("a malformed job report is dropped: %s", e)
                await taken.done()
            except UNREACHABLE as e:
                log_away("a job report is recorded later", e)
                await taken.later(2.0)
            except Exception:
                log.exception("a job report could not be recorded; it will be retried")
                await taken.later(2.0)

    async def on_job_ended(self, ended: JobEnded) -> bool:
        """Record the end of an attempt.

        Returns False, and changes nothing, if the report comes too late: a later attempt has begun, or the job has ended.
        """
        task = await self._tasks.get(ended.task_id)
        if task is None or task.kind != "job" or not _counts(task, ended):
            return False
        if ended.state == "lost":
            return await self._retry_attempt(task, f"lost on {ended.executor_id}: {ended.reason}")
        with step("router", "end_job", _trace(task), task_id=task.id, attempt=ended.attempt, state=ended.state):
            return await self._end_attempt(ended)

    async def _end_attempt(self, ended: JobEnded) -> bool:
        now, on = self._router.clock(), f"on {ended.executor_id}"
        outputs = [o.model_dump(mode="json", exclude={"schema_version"}) for o in ended.outputs]
        async with self._world.database.writing() as s:
            # As it is now: its attempt may just have been taken for lost.
            task = await self._tasks.locked(s, ended.task_id)
            if task is None or not _counts(task, ended):
                return False
            if task.state == "pending":  # its executor has not answered yet, or it was taken for lost
                if (task.attempt, bool(task.parts)) != (ended.attempt, True):
                    node = next((h.node for h in self._router.registry.all() if h.executor_id == ended.executor_id), "")
                    part = PartRecord(ended.executor_id, node)
                    await self._tasks.take_devices(s, task.id, [part], attempt=ended.attempt)
                await self._tasks.move(s, task.id, "started", on, now, attempt=ended.attempt)
            moved = await self._tasks.move(
                s, task.id, ended.state, ended.reason, now, attempt=ended.attempt, outputs=outputs
            )
        self._changed.set()
        return moved

    async def _retry_attempt(self, task: TaskRecord, reason: str) -> bool:
        """Handle a lost attempt: retry the job after a back-off, or fail it after the last attempt."""
        now = self._router.clock()
        config, _ = await self._world.settings()
        allowed = (task.spec or {}).get("attempts") or config.job_attempts
        async with self._world.database.writing() as s:
            if task.attempt >= allowed:
                why = f"{reason}; this was attempt {task.attempt} of {allowed}"
                moved = await self._tasks.move(s, task.id, "failed", why, now, attempt=task.attempt)
            elif task.state == "started":
                retry = now + backoff_s(task.attempt)
                moved = await self._tasks.move(s, task.id, "pending", reason, now, attempt=task.attempt, retry_at=retry)
            elif moved := bool(task.parts) and await self._tasks.is_at(s, task.id, "pending", task.attempt):
                await self._tasks.take_devices(s, task.id, (), retry_at=now + backoff_s(max(task.attempt, 1)))
                await self._tasks.note_waiting(s, task.id, task.placement, reason)
        self._changed.set()
        return moved

    # -- duties of the leader ----------------------------------------------------------------------------------------

    async def wait(self, timeout_s: float) -> None:
        """Wait until something may have changed, at most `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return
        self._changed.clear()

    async def round(self) -> None:
        """Do all periodic work that is due. Without jobs, this asks the database once."""
        if not await self._tasks.exist("pending", "started", kind="job"):
            self._missing = {}
            return
        await self.expire()
        await self.watch()
        await self.place()

    async def expire(self) -> None:
        """Fail jobs that have passed their deadline."""
        now = self._router.clock()
        for task in await self._tasks.in_states("pending", "started", kind="job"):
            if task.deadline_at is not None and now > task.deadline_at:
                await self.end(task, "failed", f"its deadline of {task.deadline_at - task.created_at:g} s has passed")

    async def end(self, task: TaskRecord, state: str, reason: str) -> bool:
        """End a job and its execution. Returns False if it has ended already."""
        async with self._world.database.writing() as s:
            task = await self._tasks.locked(s, task.id) or task  # an attempt may have begun since it was read
            ended = await self._tasks.move(s, task.id, state, reason, self._router.clock())
        if ended:
            self._changed.set()
            await self._router.close_on_executors(task, session_of(task), reason)
        return ended

    async def watch(self) -> None:
        """Retry jobs whose executor is lost, no longer has them, or never answered."""
        now, missing = self._router.clock(), {}
        for task in await self._tasks.in_states("started", kind="job"):
            for part in task.parts:
                reason = self._router.missing(part.executor_id, session_of(task), task.started_at or now)
                if not reason:
                    continue
                key = (task.id, task.attempt)
                missing[key] = self._missing.get(key, now)
                if "is lost" in reason or now - missing[key] > MISSING_GRACE_S:
                    await self._retry_attempt(task, reason)
        self._missing = missing
        for task in await self._tasks.in_states("pending", kind="job"):
            if task.parts and is_due(task.retry_at or 0.0, now):
                await self._retry_attempt(task, "the router that was starting it has ended")

    async def place(self) -> None:
        """Start the jobs that fit, in the queue's order."""
        router, now = self._router, self._router.clock()
        if not router.registry.alive(now):
            return
        over_budget = await self._over_budget(await self._tasks.queueing_tenants())
        chosen: list[tuple[TaskRecord, str, str, int]] = []
        async with self._world.database.deciding() as s:
            queue = {t.id: t for t in await self._tasks.queue(s)}
            jobs = [t for t in queue.values() if t.kind == "job"]
            await self._hold_back([queue.pop(t.id) for t in jobs if t.tenant in over_budget], over_budget, s)
            if not any(t.tenant not in over_budget for t in jobs):
                return
            config, nodes, pool = await self._world.pool(s, router.registry, now)
            waiting_tasks = await self._waiting(s, queue.values())
            noted = 0
            # In a thread: with thousands of jobs in the queue it takes seconds, in which the event loop must receive
            # heartbeats.
            for waiting, placement in await asyncio.to_thread(plan, waiting_tasks, pool, now, config.patience()):
                task = queue[waiting.task_id]
                if task.kind == "session":
                    continue  # it starts when its client asks; until then, its devices are kept for it
                record = as_record(waiting.want, placement)
                if not placement.gpus:
                    reason = f"waits: {summary(placement.waits)}"
                    if task.reason != reason[:4096] and noted < MAX_REASON_UPDATES:
                        noted += 1
                        await self._tasks.note_waiting(s, task.id, record, reason)
                    continue
                if len(chosen) == MAX_STARTS:
                    self._changed.set()
                    break
                (gpu,) = placement.gpus
                changes: dict[str, Any] = {
                    "placement": record,
                    "attempt": task.attempt + 1,
                    "retry_at": now + START_CONFIRM_S,
                }
                await self._tasks.take_devices(s, task.id, [PartRecord(gpu.executor_id, gpu.node)], **changes)
                started = replace(task, parts=(PartRecord(gpu.executor_id, gpu.node),), **changes)
                chosen.append((started, gpu.executor_id, gpu.node, overcommit_of(nodes.get(gpu.node), config)))
        await asyncio.gather(*[self._start(task, executor, percent, config) for task, executor, _, percent in chosen])

    async def _waiting(self, s: AsyncSession, queue: Iterable[TaskRecord]) -> list[Waiting]:
        """The entries of the queue. A job prefers devices that have the constants of its module."""
        runs = {(t.tenant, _module(t)) for t in queue if t.kind == "job"}
        brought = await self._world.brought.of_all(s, runs, JOBS_DEDUP)
        entries = []
        for task in queue:
            weights = brought.get((task.tenant, _module(task))) if task.kind == "job" else None
            entries.append((task if not weights else replace(task, wants=task.wants | {"weights": weights})).waiting())
        return entries

    async def _over_budget(self, tenants: Collection[str]) -> dict[str, str]:
        """Return the tenants, of those given, that may start nothing, each with the reason."""
        now, turn = self._router.clock(), asyncio.Semaphore(BUDGETS_AT_ONCE)
        self._budgets = {t: known for t, known in self._budgets.items() if t in tenants and now - known[0] < BUDGET_S}

        async def ask(tenant: str) -> None:
            async with turn:
                self._budgets[tenant] = (now, await self._router.advice.over_budget(tenant))

        await asyncio.gather(*[ask(t) for t in tenants if t not in self._budgets])
        return {t: why for t, (_, why) in self._budgets.items() if why}

    async def _hold_back(self, tasks: list[TaskRecord], over_budget: dict[str, str], s: AsyncSession) -> None:
        """Keep jobs of tenants without budget in the queue.

        The queue skips them and holds no devices for them until the tenant may start jobs again.
        """
        later = self._router.clock() + OVER_BUDGET_S
        await self._tasks.postpone(s, [t.id for t in tasks if (t.retry_at or 0.0) < later - BUDGET_S], later)
        noted = 0
        for task in tasks:
            reason = f"{OVER_BUDGET}{over_budget[task.tenant]}"
            if task.reason == reason[:4096] or noted == MAX_REASON_UPDATES:
                continue
            noted += 1
            begins = not task.reason.startswith(OVER_BUDGET)  # the amount in the reason may still change
            await self._tasks.note_waiting(s, task.id, {}, reason, tell_at=self._router.clock() if begins else None)

    async def _start(self, task: TaskRecord, executor_id: str, percent: int, config: ClusterConfig) -> None:
        if task.attempt == 1 and _trace(task):
            begun = round(task.created_at * 1e9)
            tracer("router").start_span("router.queue", context_of(_trace(task)), start_time=begun).end()
        with step("router", "start_job", _trace(task), task_id=task.id, attempt=task.attempt, executor=executor_id):
            await self._start_attempt(task, executor_id, percent, config)

    async def _start_attempt(self, task: TaskRecord, executor_id: str, percent: int, config: ClusterConfig) -> None:
        spec = task.spec or {}
        try:
            ask = AdmitSessionRequest(
                session_id=session_of(task),
                executor_id=executor_id,
                tenant=task.tenant,
                priority=task.priority,
                weight=spec.get("weight", 1),
                required_vram=task.required_vram or 0,
                swappable=not task.noswap,
                overcommit_vram_percent=percent,
            )
            admitted = await self._router.advice.admit(ask)
            if not admitted.admitted:
                raise RefusedError("scheduler.refused", f"not admitted: {admitted.reason}", retryable=True)
            request = RunJobRequest(
                task_id=task.id,
                attempt=task.attempt,
                session_id=session_of(task),
                tenant=task.tenant,
                module=spec["module"],
                inputs=spec["inputs"],
                policy=admitted.policy or SessionPolicy(priority=task.priority),
                quota=task.required_vram,
                swap=not task.noswap,
                overcommit_vram_percent=percent,
                opaque_kernels=await self._world.tenants.opaque_kernels(task.tenant),
            )
            await self._app.request(contracts.EXECUTOR_JOB_RUN.at(executor_id), request, timeout=EXECUTOR_TIMEOUT_S)
        except BusError as e:
            log.warning("executor %s did not start job %s: %s", executor_id, task.id, e)
            await self._retry_attempt(task, f"executor {executor_id} did not start it: {e}")
            if isinstance(e, BusTimeoutError):  # it may start it yet
                self._end_unwanted(task, executor_id, "its executor did not confirm it in time")
            return
        async with self._world.database.writing() as s:
            # This router may have been stopped meanwhile: then another one has taken the attempt for lost.
            if started := await self._tasks.is_on(s, task.id, task.attempt, executor_id):
                started = await self._tasks.move(
                    s,
                    task.id,
                    "started",
                    f"on {executor_id}",
                    self._router.clock(),
                    attempt=task.attempt,
                    only_from=["pending"],
                )
        if not started:
            now = await self._tasks.get(task.id)
            if now is None or now.state in ("failed", "cancelled") or _attempt(now) != _attempt(task):
                self._end_unwanted(task, executor_id, now.reason if now is not None else "the job is forgotten")
        self._changed.set()

    def _end_unwanted(self, task: TaskRecord, executor_id: str, reason: str) -> None:
        """End an attempt on an executor that the router no longer waits for, in the background. It would hold the device, and be
        billed.
        """
        closing = self._router.executors.close([executor_id], session_of(task), reason)
        start_errand(closing, f"end of attempt {task.attempt} of job {task.id}")

    # -- telling -----------------------------------------------------------------------------------------------------

    async def tell(self) -> int:
        """Publish every unpublished step of every task's story. Returns the number of published steps."""
        steps = await self._tasks.untold()
        if not steps:
            return 0
        js, told = self._app.jetstream(), []
        try:
            await ensure_stream(js, contracts.ROUTER_TASK_CHANGED)
            for task, step in steps:
                ended = step.state == "completed"
                event = TaskChanged(
                    task_id=task.id,
                    tenant=task.tenant,
                    kind=task.kind,
                    name=task.name,
                    number=step.number,
                    at=step.at,
                    state=step.state,  # type: ignore[arg-type]
                    reason=step.reason[:4096],
                    outputs=tuple([JobOutput(**o) for o in (task.outputs or ())]) if ended else (),
                )
                await publish(js, contracts.ROUTER_TASK_CHANGED.at(task.tenant), event, id=f"{task.id}:{step.number}")
                told.append((task.id, step.number))
        except StreamError as e:
            log.warning("task events cannot be published: %s; trying again", e)
        await self._tasks.tell(told)
        return len(told)


def _counts(task: TaskRecord, ended: JobEnded) -> bool:
    """Whether a report about an attempt may still end a job."""
    if task.attempt == ended.attempt:
        return True
    return ended.state == "completed" and task.state == "pending" and ended.attempt < task.attempt


def _attempt(task: TaskRecord) -> tuple[int, tuple[PartRecord, ...]]:
    return task.attempt, task.parts


def _module(task: TaskRecord) -> str:
    return str((task.spec or {}).get("module", ""))


def _trace(task: TaskRecord) -> str:
    return str((task.spec or {}).get("trace", ""))
