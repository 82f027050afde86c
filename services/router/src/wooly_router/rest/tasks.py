"""Tasks, sessions, blobs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from wooly_bus.blobs import Upload
from wooly_bus.errors import RefusedError
from wooly_wis.messages import (
    Digest,
    MoveTaskRequest,
    PrioritizeTaskRequest,
    SubmitJob,
    TaskInfo,
    TaskReply,
    TaskRequest,
    TasksRequest,
    TaskState,
)

from wooly_router.blobs import TenantBlobs
from wooly_router.gate import Caller
from wooly_router.rest.access import Access, needs
from wooly_router.rest.held import HeldStream
from wooly_router.rest.models import (
    BlobInfo,
    CancelBody,
    MoveBody,
    PartInfo,
    PriorityBody,
    SessionInfo,
    SessionList,
    Task,
    TaskBody,
    TaskDetail,
    TaskList,
)
from wooly_router.tasks import TaskActor

router = APIRouter()
OfTenant = Annotated[str | None, Query(min_length=1, max_length=128, pattern=r"^[^\x00]*$")]
#: Maximum size, in bytes, of a blob over REST; larger blobs go over NATS.
BLOB_BYTES = 64 << 20


def _task(found: TaskInfo) -> Task:
    return Task.model_validate(found.model_dump() | {"noswap": int(found.noswap)})


def _detail(reply: TaskReply) -> TaskDetail:
    ranks = [_task(r) for r in reply.ranks]
    return TaskDetail(task=_task(reply.task), story=list(reply.story), checkpoint=reply.checkpoint, ranks=ranks)


def _ask(caller: Caller, task_id: str, reason: str = "") -> TaskRequest:
    """Make the request for a task. A malformed id cannot exist."""
    try:
        return TaskRequest(task_id=task_id, tenant=caller.tenant, reason=reason)
    except ValueError as e:
        raise RefusedError("router.no_task", "this task does not exist") from e


async def _steer(
    request: Request, caller: Caller, task_id: str, action: str, do: Callable[[TaskRequest], Awaitable[TaskReply]]
) -> TaskDetail:
    """Change a task, and log the change as `action`."""
    access: Access = request.app.state.access
    reply = await do(_ask(caller, task_id))
    await access.log(caller, action, task_id)
    return _detail(reply)


@router.get("/tasks")
async def list_tasks(
    request: Request,
    caller: Annotated[Caller, Depends(needs("tasks", "read"))],
    state: Annotated[list[TaskState] | None, Query(max_length=6)] = None,
    kind: Literal["session", "job"] | None = None,
    tenant: OfTenant = None,
    priority: Annotated[int | None, Query(ge=0, le=4)] = None,
    executor_id: Annotated[str | None, Query(max_length=128, pattern=r"^[^.*>\s\x00]+$")] = None,
    text: Annotated[str | None, Query(max_length=256, pattern=r"^[^\x00]*$")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 100,
    after: Annotated[str, Query(max_length=128, pattern=r"^[^\x00]*$")] = "",
) -> TaskList:
    """Tasks, newest first, a page at a time."""
    desk: TaskActor = request.app.state.desk
    if caller.tenant is not None and tenant not in (None, caller.tenant):
        raise RefusedError("router.forbidden", f"this token can only read the tasks of its own tenant, {caller.tenant}")
    reply = await desk.on_tasks(
        TasksRequest(
            tenant=caller.tenant or tenant,
            states=tuple(state or ()),
            kind=kind,
            priority=priority,
            executor_id=executor_id,
            text=text,
            limit=limit,
            after=after,
        )
    )
    return TaskList(tasks=[_task(t) for t in reply.tasks], next=reply.next)


@router.post("/tasks", status_code=201)
async def create_task(
    request: Request, body: TaskBody, caller: Annotated[Caller, Depends(needs("tasks", "write"))]
) -> TaskDetail:
    """Submit a job. A second request with the same `job_id` changes nothing."""
    desk: TaskActor = request.app.state.desk
    access: Access = request.app.state.access
    tenant = body.tenant or caller.own
    if tenant != caller.own and not caller.acts_for_all:
        raise RefusedError("router.forbidden", f"this token can only submit jobs for its own tenant, {caller.own}")
    fields = body.model_dump(exclude={"job_id", "tenant", "noswap"})
    job_id = body.job_id or f"job-{secrets.token_hex(8)}"
    job = SubmitJob(job_id=job_id, tenant=tenant, noswap=bool(body.noswap), **fields)
    task = await desk.jobs.on_submit_job(job, caller)
    if task.tenant != tenant:
        raise RefusedError("router.id_taken", f"job id {job_id} is already in use; leave it out to get a new one")
    await access.log(caller, "task.create", task.id, module=body.module)
    return _detail(await desk.on_task(TaskRequest(task_id=task.id)))


@router.get("/tasks/{task_id}")
async def get_task(
    request: Request, task_id: str, caller: Annotated[Caller, Depends(needs("tasks", "read"))]
) -> TaskDetail:
    """One task, its story, and the reason for its placement."""
    desk: TaskActor = request.app.state.desk
    return _detail(await desk.on_task(_ask(caller, task_id)))


@router.post("/tasks/{task_id}/cancel")
async def cancel_task(
    request: Request,
    task_id: str,
    caller: Annotated[Caller, Depends(needs("tasks", "write"))],
    body: CancelBody = CancelBody(),  # noqa: B008  # frozen
) -> TaskDetail:
    """Cancel a task. A task that has already ended does not change."""
    desk: TaskActor = request.app.state.desk
    access: Access = request.app.state.access
    reply = await desk.on_cancel_task(_ask(caller, task_id, body.reason))
    await access.log(caller, "task.cancel", task_id, reason=body.reason)
    return _detail(reply)


@router.put("/tasks/{task_id}/priority")
async def prioritize_task(
    request: Request, task_id: str, body: PriorityBody, caller: Annotated[Caller, Depends(needs("tasks", "write"))]
) -> TaskDetail:
    """Change a task's class, in the queue and on its devices."""
    desk: TaskActor = request.app.state.desk
    access: Access = request.app.state.access
    ask = _ask(caller, task_id)
    reply = await desk.on_prioritize_task(
        PrioritizeTaskRequest(task_id=ask.task_id, tenant=ask.tenant, priority=body.priority), caller
    )
    await access.log(caller, "task.priority", task_id, priority=body.priority)
    return _detail(reply)


@router.post("/tasks/{task_id}/move")
async def move_task(
    request: Request, task_id: str, body: MoveBody, caller: Annotated[Caller, Depends(needs("tasks", "write"))]
) -> TaskDetail:
    """Ask the client of a running session to go on at another device. The task's story says when it has, or why it stays."""
    desk: TaskActor = request.app.state.desk
    access: Access = request.app.state.access
    ask = _ask(caller, task_id)
    reply = await desk.on_move_task(MoveTaskRequest(task_id=ask.task_id, tenant=ask.tenant, node=body.node))
    await access.log(caller, "task.move", task_id, node=body.node)
    return _detail(reply)


@router.post("/tasks/{task_id}/hibernate")
async def hibernate_task(
    request: Request, task_id: str, caller: Annotated[Caller, Depends(needs("tasks", "write"))]
) -> TaskDetail:
    """Ask the client of a running session to free its device until the next operation."""
    desk: TaskActor = request.app.state.desk
    return await _steer(request, caller, task_id, "task.hibernate", desk.on_hibernate_task)


@router.post("/tasks/{task_id}/wake")
async def wake_task(
    request: Request, task_id: str, caller: Annotated[Caller, Depends(needs("tasks", "write"))]
) -> TaskDetail:
    """Ask the client of a hibernated session to take a device again."""
    desk: TaskActor = request.app.state.desk
    return await _steer(request, caller, task_id, "task.wake", desk.on_wake_task)


@router.get("/sessions")
async def list_sessions(request: Request, caller: Annotated[Caller, Depends(needs("tasks", "read"))]) -> SessionList:
    """All open sessions, oldest first."""
    tasks, found = request.app.state.actor.world.tasks, []
    for task in await tasks.in_states("started", kind="session"):
        lease = await tasks.lease(task.id)
        if lease is None or caller.tenant not in (None, task.tenant):
            continue
        found.append(
            SessionInfo(
                session_id=task.id,
                parts=[PartInfo(executor_id=p.executor_id, node=p.node) for p in task.parts],
                tenant=task.tenant,
                priority=task.priority,
                program=task.name,
                client_host=task.client_host,
                opened_at=task.started_at or task.created_at,
                lease_until=lease.lease_until,
            )
        )
    return SessionList(sessions=found)


@router.post(
    "/blobs",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def put_blob(
    request: Request, caller: Annotated[Caller, Depends(needs("blobs", "write"))], tenant: OfTenant = None
) -> BlobInfo:
    """Store the body as a blob of the tenant: a module, a constant or an input. At most 64 MiB; larger blobs go over NATS."""
    own, blobs = _whose(caller, tenant), _blobs(request)
    said = int(request.headers.get("content-length", 0))
    with blobs.transfer(own):
        await blobs.room_for(own, said, begins=True)
        upload = Upload(blobs.store(own))
        try:
            async for part in request.stream():
                await blobs.room_for(own, len(part), begins=False)
                await upload.add(part)
            return BlobInfo(digest=await upload.finish(), nbytes=upload.size)
        except BaseException:
            await upload.abandon()
            raise


@router.get(
    "/blobs/{digest}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def get_blob(
    request: Request,
    digest: Digest,
    caller: Annotated[Caller, Depends(needs("blobs", "read"))],
    tenant: OfTenant = None,
) -> Response:
    """Return a blob of the tenant, at most 64 MiB."""
    own, blobs = _whose(caller, tenant), _blobs(request)
    store = blobs.store(own)
    size = await store.size(digest)
    if size > BLOB_BYTES:
        raise RefusedError(
            "router.too_large", f"the blob has {size} bytes, above REST's limit of {BLOB_BYTES}; use NATS"
        )
    held = contextlib.ExitStack()
    held.enter_context(blobs.transfer(own))
    headers = {"Content-Length": str(size)}
    return HeldStream(store.chunks(digest), held.close, "application/octet-stream", headers)


def _blobs(request: Request) -> TenantBlobs:
    blobs: TenantBlobs = request.app.state.actor.blobs
    return blobs


def _whose(caller: Caller, tenant: str | None) -> str:
    if caller.tenant is not None and tenant not in (None, caller.tenant):
        raise RefusedError("router.forbidden", "this token can only read and write the blobs of its own tenant")
    return tenant or caller.own
