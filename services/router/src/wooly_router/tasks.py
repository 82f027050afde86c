"""Tasks for users: lists, stories, cancelling, changing the class. It answers over NATS, and REST calls it, too."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, RefusedError
from wooly_wis.messages import (
    JobOutput,
    MoveTaskRequest,
    PrioritizeTaskRequest,
    SteerSessionRequest,
    TaskInfo,
    TaskReply,
    TaskRequest,
    TasksReply,
    TasksRequest,
    TaskStep,
)
from wooly_wis.messages.sessions import GANG_ID_CHARS

from wooly_router.actor import RouterActor
from wooly_router.core.ceilings import Wish
from wooly_router.core.gangs import state_of
from wooly_router.core.tasks import ENDED
from wooly_router.gate import Caller
from wooly_router.jobs import JobActor
from wooly_router.state.tasks import TaskFilter, TaskRecord, session_of

STEER_TIMEOUT_S = 2.0
Q = TypeVar("Q", TasksRequest, TaskRequest, MoveTaskRequest, PrioritizeTaskRequest)
R = TypeVar("R", TasksReply, TaskReply)


class TaskActor:
    """Answers requests about tasks."""

    def __init__(self, app: ServiceApp, router: RouterActor, jobs: JobActor) -> None:
        self._app, self._router, self.jobs = app, router, jobs
        self._tasks = router.world.tasks
        app.serve(contracts.ROUTER_TASK_LIST, self._authorized(self.on_tasks, "tasks:read"))
        app.serve(contracts.ROUTER_TASK_GET, self._authorized(self.on_task, "tasks:read"))
        cancel = self._authorized(self.on_cancel_task, "tasks:write")
        app.serve(contracts.ROUTER_TASK_CANCEL, cancel)
        app.serve(contracts.ROUTER_TASK_MOVE, self._authorized(self.on_move_task, "tasks:write"))
        app.serve(contracts.ROUTER_TASK_HIBERNATE, self._authorized(self.on_hibernate_task, "tasks:write"))
        app.serve(contracts.ROUTER_TASK_WAKE, self._authorized(self.on_wake_task, "tasks:write"))
        app.serve(contracts.ROUTER_TASK_PRIORITIZE, self._on_prioritize)
        app.serve_tenants(contracts.ROUTER_TASK_LIST, self._of_tenant(self.on_tasks))
        app.serve_tenants(contracts.ROUTER_TASK_GET, self._of_tenant(self.on_task))
        app.serve_tenants(contracts.ROUTER_TASK_CANCEL, self._of_tenant(self.on_cancel_task))
        app.serve_tenants(contracts.ROUTER_TASK_MOVE, self._of_tenant(self.on_move_task))
        app.serve_tenants(contracts.ROUTER_TASK_HIBERNATE, self._of_tenant(self.on_hibernate_task))
        app.serve_tenants(contracts.ROUTER_TASK_WAKE, self._of_tenant(self.on_wake_task))
        app.serve_tenants(contracts.ROUTER_TASK_PRIORITIZE, self._on_prioritize_of)

    def _authorized(self, handler: Callable[[Q], Awaitable[R]], scope: str) -> Callable[[Q], Awaitable[R]]:
        """Wrap a handler: check the caller's scope, and limit the request to the tasks that the caller sees."""

        async def check(request: Q) -> R:
            caller = await self._router.gate.over_nats(request.credential, request.tenant, scope)
            return await handler(request.model_copy(update={"tenant": caller.tenant, "credential": ""}))

        return check

    def _of_tenant(self, handler: Callable[[Q], Awaitable[R]]) -> Callable[[Q, str], Awaitable[R]]:
        """Wrap a handler for a tenant's NATS users."""

        async def check(request: Q, tenant: str) -> R:
            caller = await self._router.gate.of_tenant(tenant, request.tenant)
            return await handler(request.model_copy(update={"tenant": caller.tenant, "credential": ""}))

        return check

    async def _on_prioritize(self, request: PrioritizeTaskRequest) -> TaskReply:
        caller = await self._router.gate.over_nats(request.credential, request.tenant, "tasks:write")
        return await self.on_prioritize_task(_seen_by(request, caller), caller)

    async def _on_prioritize_of(self, request: PrioritizeTaskRequest, tenant: str) -> TaskReply:
        caller = await self._router.gate.of_tenant(tenant, request.tenant)
        return await self.on_prioritize_task(_seen_by(request, caller), caller)

    async def on_tasks(self, request: TasksRequest) -> TasksReply:
        """Return a page of tasks, newest first. The ranks of a program are one task, at the place of the newest rank."""
        chosen = TaskFilter(
            tenant=request.tenant,
            states=request.states,
            kind=request.kind,
            priority=request.priority,
            executor_id=request.executor_id,
            text=request.text,
        )
        found = await self._tasks.page(chosen, request.limit, _cursor(request.after))
        last = found[-1] if len(found) == request.limit else None
        after = "" if last is None else f"{last.created_at!r}:{last.id}"
        return TasksReply(tasks=tuple([i for t in found if (i := await self._shown(t, chosen))]), next=after)

    async def _shown(self, task: TaskRecord, chosen: TaskFilter) -> TaskInfo | None:
        """What a list shows of a task; None for a rank that is not the newest one that the list has of its program."""
        if not task.gang.task_id:
            return info(task)
        ranks = await self._tasks.gang(task.gang.task_id)
        listed = [r for r in ranks if not chosen.states or r.state in chosen.states]
        newest = max(listed, key=lambda r: (r.created_at, r.id), default=task)
        return gang_info(ranks) if newest.id == task.id else None

    async def on_task(self, request: TaskRequest) -> TaskReply:
        """Return one task and its story."""
        ranks = await self._ranks(request.task_id, request.tenant)
        if ranks:
            return await self._on_gang(ranks)
        task = await self._get(request.task_id, request.tenant)
        story = await self._tasks.story(task.id)
        steps = [
            TaskStep.model_validate({"number": e.number, "at": e.at, "state": e.state, "reason": e.reason})
            for e in story
        ]
        checkpoint = self._router.registry.checkpoint(task.parts[0].executor_id, task.id) if task.parts else None
        return TaskReply(task=info(task), story=tuple(steps), checkpoint=checkpoint)

    async def _on_gang(self, ranks: Sequence[TaskRecord]) -> TaskReply:
        """Return the ranks of a program as one task. Its story has the steps of all ranks, oldest first."""
        steps = [(e.at, r.rank, e) for r in ranks for e in await self._tasks.story(r.id)]
        steps.sort(key=lambda step: step[:2])
        story = [
            TaskStep(number=k + 1, at=at, state=e.state, reason=f"rank {rank}: {e.reason}")  # type: ignore[arg-type]
            for k, (at, rank, e) in enumerate(steps)
        ]
        return TaskReply(task=gang_info(ranks), story=tuple(story), ranks=tuple([info(r) for r in ranks]))

    async def on_cancel_task(self, request: TaskRequest) -> TaskReply:
        """End a task: a job, a session, or all ranks of a program. A task that has already ended does not change."""
        reason = request.reason or "cancelled on request"
        ranks = await self._ranks(request.task_id, request.tenant)
        if ranks:
            for rank in ranks:  # the end of one ends the others; one that has just completed ends none
                if rank.state not in ENDED and await self._router.end(rank, "cancelled", reason):
                    break
            return await self.on_task(request)
        task = await self._get(request.task_id, request.tenant)
        if task.kind == "job":
            await self.jobs.end(task, "cancelled", reason)
        else:
            await self._router.end(task, "cancelled", reason)
        return await self.on_task(request)

    async def on_move_task(self, request: MoveTaskRequest) -> TaskReply:
        """Ask the client of a running session to move it to another device; of a program, the clients of all ranks."""
        ranks = await self._ranks(request.task_id, request.tenant)
        if ranks:
            await self._move_ranks(ranks, request.node)
            return await self.on_task(TaskRequest(task_id=request.task_id, tenant=request.tenant))
        task = await self._get(request.task_id, request.tenant)
        await self._router.moves.move_to(task, _moved_to(request.node), request.node)
        return await self.on_task(TaskRequest(task_id=task.id, tenant=request.tenant))

    async def _move_ranks(self, ranks: Sequence[TaskRecord], to: str) -> None:
        """Ask all ranks of a program that run to move, or none of them."""
        asked: list[TaskRecord] = []
        for rank in [r for r in ranks if r.state == "started"] or ranks[:1]:
            try:
                await self._router.moves.move_to(rank, _moved_to(to), to)
            except RefusedError as e:
                for each in asked:
                    wishes = await self._router.world.tasks.get(each.id)
                    await self._router.moves.stays(wishes or each, str(e))
                raise
            asked.append(rank)

    async def on_hibernate_task(self, request: TaskRequest) -> TaskReply:
        """Ask the client of a running session to let it hibernate."""
        task = await self._get(request.task_id, request.tenant)
        await self._router.moves.hibernate(task, request.reason or "hibernated on request")
        return await self.on_task(TaskRequest(task_id=task.id, tenant=request.tenant))

    async def on_wake_task(self, request: TaskRequest) -> TaskReply:
        """Ask the client of a hibernated session to take a device again."""
        task = await self._get(request.task_id, request.tenant)
        await self._router.moves.wake(task, request.reason or "woken on request")
        return await self.on_task(TaskRequest(task_id=task.id, tenant=request.tenant))

    async def on_prioritize_task(self, request: PrioritizeTaskRequest, caller: Caller | None = None) -> TaskReply:
        """Change a task's class, in the queue and, if a scheduler answers, on its devices.

        `caller`: the caller that asks; the ceiling of the task's tenant does not bind an administrator.
        """
        task = await self._get(request.task_id, request.tenant)
        await self._router.ceilings.granted(task.tenant, Wish(request.priority), caller)
        if not await self._tasks.set_priority(task.id, request.priority):
            raise RefusedError(
                "router.task_ended", f"the class of task {task.id} cannot change: the task is already {task.state}"
            )
        task = await self._tasks.get(task.id) or task  # it may have started meanwhile
        if task.state == "started":
            steer = SteerSessionRequest(session_id=session_of(task), priority=request.priority)
            with contextlib.suppress(BusError):  # it continues in its old class; a new attempt gets the new class
                await self._app.request(contracts.SCHEDULER_SESSION_STEER, steer, timeout=STEER_TIMEOUT_S)
        return await self.on_task(TaskRequest(task_id=task.id))

    async def _ranks(self, task_id: str, tenant: str | None) -> list[TaskRecord]:
        """The ranks of a program by the id of its task; empty: no program has this id."""
        if len(task_id) != GANG_ID_CHARS or await self._tasks.get(task_id) is not None:
            return []
        return [r for r in await self._tasks.gang(task_id) if tenant in (None, r.tenant)]

    async def _get(self, task_id: str, tenant: str | None) -> TaskRecord:
        task = await self._tasks.get(task_id)
        if task is None or (tenant is not None and task.tenant != tenant):
            raise RefusedError("router.no_task", f"task {task_id} does not exist")
        return task


def _seen_by(request: PrioritizeTaskRequest, caller: Caller) -> PrioritizeTaskRequest:
    return request.model_copy(update={"tenant": caller.tenant, "credential": ""})


def _moved_to(to: str) -> str:
    """Why a session moves, for its story. The client of a session names the wish that it refuses by this reason."""
    return f"moved on request to {to}" if to else "moved on request"


def _cursor(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    at, colon, last = text.partition(":")
    try:
        if colon and last:
            return float(at), last
    except ValueError:
        pass
    raise RefusedError("router.bad_cursor", f"{text!r} is not a valid cursor: pass the field `next` of the last page")


def info(task: TaskRecord) -> TaskInfo:
    """Return a task for display."""
    want = task.want()
    return TaskInfo(
        task_id=task.id,
        kind=task.kind,
        tenant=task.tenant,
        name=task.name,
        client_host=task.client_host,
        state=task.state,  # type: ignore[arg-type]
        reason=task.reason,
        priority=task.priority,
        gpu_mode=task.gpu_mode,  # type: ignore[arg-type]
        gpu_count=want.gpu_count,
        required_vram=task.required_vram,
        noswap=task.noswap,
        node_groups=want.groups,
        executors=tuple([p.executor_id for p in task.parts]),
        nodes=tuple(dict.fromkeys([p.node for p in task.parts])),
        attempt=task.attempt,
        created_at=task.created_at,
        started_at=task.started_at,
        ended_at=task.ended_at,
        deadline_at=task.deadline_at,
        placement=task.placement,
        outputs=tuple([JobOutput(**o) for o in task.outputs or ()]),
        gang=task.gang.task_id,
        rank=task.rank,
        ranks=task.gang.size if task.gang.task_id else 0,
    )


def gang_info(ranks: Sequence[TaskRecord]) -> TaskInfo:
    """Return the ranks of a program as one task, for display."""
    state = state_of([(r.state, r.started_at is not None) for r in ranks])
    shown = next((r for r in ranks if r.state == state), ranks[0])
    parts = [p for r in ranks for p in r.parts]
    times = [r.ended_at for r in ranks if r.ended_at is not None]
    changes = {
        "task_id": shown.gang.task_id,
        "state": state,
        "gang": "",
        "rank": 0,
        "executors": tuple(dict.fromkeys([p.executor_id for p in parts])),
        "nodes": tuple(dict.fromkeys([p.node for p in parts])),
        "created_at": min([r.created_at for r in ranks]),
        "started_at": min([r.started_at for r in ranks if r.started_at is not None], default=None),
        "ended_at": max(times) if len(times) == len(ranks) else None,
    }
    return info(shown).model_copy(update=changes)
