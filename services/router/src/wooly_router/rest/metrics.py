"""Metrics of devices: current values, the scheduler's audit, and the history."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import NoResponderError, RefusedError
from wooly_wis.messages import GpusRequest, GpuState

from wooly_router.actor import RouterActor
from wooly_router.gate import Caller
from wooly_router.rest.access import needs
from wooly_router.rest.cluster import nodes_of
from wooly_router.rest.models import GpuFigures, History, LiveGpu, Overview, SampleInfo, TaskCount, TaskHistory

router = APIRouter()
Time = Annotated[float, Query(ge=0, le=1e12, allow_inf_nan=False)]
#: Timeout of the scheduler's answer, in seconds.
TIMEOUT_S = 2.0
#: Maximum number of points in one answer about tasks.
MAX_COUNTS = 10_000


def live(actor: RouterActor) -> list[LiveGpu]:
    """Return all devices that are alive, by id."""
    starvation = actor.world.starvation
    return [
        LiveGpu(
            executor_id=h.executor_id,
            node_id=h.node,
            utilization=h.utilization,
            starvation=starvation[h.executor_id] / 1000 if h.executor_id in starvation else None,
            memory_used=h.memory_used,
            memory_total=h.device.total_memory,
            sessions=len(h.sessions),
        )
        for h in actor.registry.alive(actor.clock())
    ]


@router.get("/overview")
async def overview(request: Request, caller: Annotated[Caller, Depends(needs("nodes", "read"))]) -> Overview:
    """The cluster in a few numbers. Only callers that may read tasks get counts of tasks."""
    actor: RouterActor = request.app.state.actor
    nodes: Counter[str] = Counter(n.state for n in await nodes_of(request, caller.tenant))
    tasks = await actor.world.tasks.counts(caller.tenant) if "tasks:read" in caller.may else {}
    return Overview(at=actor.clock(), nodes=dict(nodes), tasks=tasks, gpus=live(actor))


@router.get("/metrics/history")
async def history(
    request: Request,
    caller: Annotated[Caller, Depends(needs("metrics", "read"))],
    since: Time = 0.0,
    until: Time = 1e12,
    executor_id: Annotated[str | None, Query(min_length=1, max_length=128, pattern=r"^[^\x00]*$")] = None,
    step: Annotated[int | None, Query(ge=10, le=86400)] = None,
) -> History:
    """Return the history of devices in a time span: one sample per ten seconds, or per `step` seconds.

    In each step, shares are means, and memory and sessions are maxima.
    """
    nodes = request.app.state.actor.world.nodes
    if step is None:
        found = await nodes.history(since, until, executor_id)
    else:
        found = await nodes.means(since, until, step, executor_id)
    return History(samples=[SampleInfo(**{f: getattr(s, f) for f in SampleInfo.model_fields}) for s in found])


@router.get("/metrics/tasks")
async def tasks_history(
    request: Request,
    caller: Annotated[Caller, Depends(needs("tasks", "read"))],
    since: Time,
    until: Time | None = None,
    step: Annotated[int, Query(ge=1, le=86400)] = 60,
) -> TaskHistory:
    """Return how many tasks waited and ran at the end of every `step` seconds of a span.

    At most 10,000 points, none of them in the future.
    """
    actor: RouterActor = request.app.state.actor
    until = min(actor.clock() if until is None else until, actor.clock(), since + MAX_COUNTS * step)
    found = await actor.world.tasks.activity(since, until, step, caller.tenant) if until > since else []
    return TaskHistory(counts=[TaskCount(at=at, waiting=w, running=r) for at, w, r in found])


@router.get("/metrics/gpus")
async def gpus(request: Request, caller: Annotated[Caller, Depends(needs("metrics", "read"))]) -> GpuFigures:
    """Utilization, starvation, classes, queues and latencies of every device and session, over the last ten seconds."""
    found: list[GpuState] = []
    more = True
    bus: ServiceApp = request.app.state.bus
    while more:
        ask = GpusRequest(after=found[-1].executor_id if found else "")
        try:
            reply = await bus.request(contracts.SCHEDULER_GPU_LIST, ask, timeout=TIMEOUT_S)
        except NoResponderError as e:
            raise RefusedError("router.no_scheduler", "no scheduler answers; start a scheduler", retryable=True) from e
        found += reply.gpus
        more = reply.more and bool(reply.gpus)
    return GpuFigures(gpus=found)
