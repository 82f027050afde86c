"""Traces of tasks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from wooly_bus.errors import RefusedError
from wooly_wis.traces import MAX_TRACE_SPANS, TraceRequest, TracesRequest

from wooly_router.gate import Caller
from wooly_router.rest.access import needs
from wooly_router.rest.models import Trace, TraceList
from wooly_router.traces import TraceActor

router = APIRouter()


@router.get("/traces")
async def list_traces(
    request: Request,
    caller: Annotated[Caller, Depends(needs("tasks", "read"))],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> TraceList:
    """Recent traces, newest first."""
    traces: TraceActor = request.app.state.traces
    reply = await traces.on_traces(TracesRequest(tenant=caller.tenant, limit=limit))
    return TraceList(traces=list(reply.traces))


@router.get("/traces/{trace_id}")
async def get_trace(
    request: Request,
    trace_id: Annotated[str, Path(max_length=32)],
    caller: Annotated[Caller, Depends(needs("tasks", "read"))],
) -> Trace:
    """One trace: its spans in the order in which they began."""
    return await _trace(request, caller, trace_id=trace_id)


@router.get("/tasks/{task_id}/trace")
async def get_task_trace(
    request: Request, task_id: str, caller: Annotated[Caller, Depends(needs("tasks", "read"))]
) -> Trace:
    """The trace of a task."""
    return await _trace(request, caller, task_id=task_id)


async def _trace(request: Request, caller: Caller, **which: str) -> Trace:
    traces: TraceActor = request.app.state.traces
    try:
        ask = TraceRequest(tenant=caller.tenant, **which)  # type: ignore[arg-type]
    except ValueError as e:  # a malformed id cannot exist
        raise RefusedError("router.no_trace", "this trace does not exist") from e
    reply = await traces.on_trace(ask, MAX_TRACE_SPANS)
    return Trace(trace_id=reply.trace_id, spans=list(reply.spans))
