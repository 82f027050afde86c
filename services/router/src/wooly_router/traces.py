"""Traces of tasks: where a trace begins, who may add spans to it, and who may read it.

Services send spans in messages that no sender waits for; spans are written in batches. A trace belongs to the tenant of its
first task. If a client names another tenant's trace, its task gets a new trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from sqlalchemy.exc import SQLAlchemyError
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_bus.tracing import QUEUE_SPANS, trace_id_of, traceparent, tracer
from wooly_wis.traces import (
    AddSpansReply,
    AddSpansRequest,
    SpanRecord,
    SpansRecorded,
    TraceReply,
    TraceRequest,
    TracesReply,
    TracesRequest,
)

from wooly_router.gate import Caller, Gate
from wooly_router.state.tasks import TaskRecord
from wooly_router.state.traces import OWNER, TraceStore
from wooly_router.state.world import World

log = logging.getLogger("wooly.router")
#: Seconds between two writes of spans.
WRITE_S = 0.3
#: Maximum number of spans in one reply, because a message has a limited size.
PAGE = 256
#: Shares of the queue of unwritten spans: a quarter for the clients of one tenant, and a half for all clients. A client that
#: sends more loses its own spans, but no span of a service or of another tenant.
TENANTS_SHARE, CLIENTS_SHARE = 4, 2


@contextlib.asynccontextmanager
async def trace_of(store: TraceStore, task: TaskRecord, name: str = "") -> AsyncIterator[str]:
    """Make the trace of a requested task the current trace in the block.

    Yields its `traceparent`, empty if the trace is not recorded.

    The trace is the client's own (named `name`, or as the task). If the client has no trace, or names one of another tenant, it
    is a new trace.
    """
    current = trace.get_current_span().get_span_context()
    if current.is_valid and not current.trace_flags.sampled:
        yield ""
        return
    asked = traceparent(current)
    if asked and (not store.keeps or await _bind(store, asked, task, name)):
        yield asked
        return
    if asked:  # marks the span's owner: it is not kept in another tenant's trace
        trace.get_current_span().set_attribute(OWNER, task.tenant)
    attributes = {"task_id": task.id}
    with tracer("router").start_as_current_span(f"router.{task.kind}", Context(), attributes=attributes) as root:
        begun = traceparent(root)
        if begun and store.keeps:
            await _bind(store, begun, task, name)
        yield begun


async def _bind(store: TraceStore, parent: str, task: TaskRecord, name: str) -> bool:
    return await store.bind(trace_id_of(parent), task.id, task.tenant, name or task.name or task.id, task.created_at)


class TraceActor:
    """Stores spans and returns them.

    Attributes:
        kept: number of stored spans.
        dropped: number of dropped spans, by service and reason: `sender` (the sender dropped them), `unknown` (their trace is
            not kept), `full` (their trace has reached its limit), `queue` (they came faster than they are written), `database`.
    """

    def __init__(self, app: ServiceApp, world: World, gate: Gate) -> None:
        self.store = world.traces
        self.kept = 0
        self.dropped: Counter[tuple[str, str]] = Counter()
        self._world, self._gate = world, gate
        #: Service, span and, for a client's span, its tenant; below, the number of waiting client spans by tenant.
        self._waiting: deque[tuple[str, SpanRecord, str]] = deque()
        self._of_clients: Counter[str] = Counter()
        if self.store.keeps:
            app.listen(contracts.SERVICE_SPAN_RECORDED, self.on_spans)
        app.serve(contracts.ROUTER_TRACE_ADD, self.on_add_spans)
        app.serve(contracts.ROUTER_TRACE_GET, self._read_trace)
        app.serve(contracts.ROUTER_TRACE_LIST, self._read_traces)
        app.serve_tenants(contracts.ROUTER_TRACE_ADD, self._add_of)
        app.serve_tenants(contracts.ROUTER_TRACE_GET, self._read_trace_of)
        app.serve_tenants(contracts.ROUTER_TRACE_LIST, self._read_traces_of)

    # -- taking in ---------------------------------------------------------------------------------------------------

    async def on_spans(self, message: SpansRecorded) -> None:
        """Take spans from a service."""
        if message.dropped:
            self.dropped[message.service, "sender"] += message.dropped
        self._take(message.service, message.spans)

    async def on_add_spans(self, request: AddSpansRequest) -> AddSpansReply:
        """Take spans from a client, for a task of its own tenant."""
        caller = await self._gate.over_nats(request.credential, request.tenant, "tasks:write")
        return await self._add(request, caller)

    async def _add_of(self, request: AddSpansRequest, tenant: str) -> AddSpansReply:
        return await self._add(request, await self._gate.of_tenant(tenant, request.tenant))

    async def _add(self, request: AddSpansRequest, caller: Caller) -> AddSpansReply:
        trace_id = await self.store.of_task(request.task_id, caller.tenant)
        if trace_id is None:
            raise _no_trace(f"task {request.task_id} has no trace")
        mine = [s for s in request.spans if s.trace_id == trace_id]
        self.dropped["client", "unknown"] += len(request.spans) - len(mine)
        room = min(
            QUEUE_SPANS // TENANTS_SHARE - self._of_clients[caller.own],
            QUEUE_SPANS // CLIENTS_SHARE - self._of_clients.total(),
        )
        taken = self._take("client", mine, max(room, 0), caller.own)
        self._of_clients[caller.own] += taken
        return AddSpansReply(taken=taken)

    def _take(self, service: str, spans: Sequence[SpanRecord], most: int = QUEUE_SPANS, tenant: str = "") -> int:
        room = min(max(QUEUE_SPANS - len(self._waiting), 0), most)
        self._waiting.extend([(service, s, tenant) for s in spans[:room]])
        if len(spans) > room:
            self.dropped[service, "queue"] += len(spans) - room
        return min(len(spans), room)

    async def run(self) -> None:
        """Write waiting spans until cancelled."""
        try:
            while True:
                await asyncio.sleep(WRITE_S)
                await self.write()
        finally:
            await self.write()

    async def write(self) -> None:
        """Write the waiting spans. If the database does not answer, spans are dropped, so that memory stays bounded."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(512, len(self._waiting)))]
            self._of_clients -= Counter([tenant for service, _, tenant in batch if service == "client"])
            spans = [(service, span) for service, span, _ in batch]
            try:
                unknown, full = await self.store.add(spans)
            except SQLAlchemyError as e:
                log.warning("%d spans are dropped, because the database failed: %s", len(spans), type(e).__name__)
                self.dropped["router", "database"] += len(spans)
                continue
            self.kept += len(spans) - unknown - full
            for count, why in ((unknown, "unknown"), (full, "full")):
                if count:
                    self.dropped["router", why] += count

    # -- telling -----------------------------------------------------------------------------------------------------

    async def _read_trace(self, request: TraceRequest) -> TraceReply:
        caller = await self._gate.over_nats(request.credential, request.tenant, "tasks:read")
        return await self.on_trace(request.model_copy(update={"tenant": caller.tenant, "credential": ""}))

    async def _read_traces(self, request: TracesRequest) -> TracesReply:
        caller = await self._gate.over_nats(request.credential, request.tenant, "tasks:read")
        return await self.on_traces(request.model_copy(update={"tenant": caller.tenant, "credential": ""}))

    async def _read_trace_of(self, request: TraceRequest, tenant: str) -> TraceReply:
        caller = await self._gate.of_tenant(tenant, request.tenant)
        return await self.on_trace(request.model_copy(update={"tenant": caller.tenant, "credential": ""}))

    async def _read_traces_of(self, request: TracesRequest, tenant: str) -> TracesReply:
        caller = await self._gate.of_tenant(tenant, request.tenant)
        return await self.on_traces(request.model_copy(update={"tenant": caller.tenant, "credential": ""}))

    async def on_traces(self, request: TracesRequest) -> TracesReply:
        """Return recent traces that a tenant may see (None: all traces), newest first."""
        return TracesReply(traces=tuple(await self.store.recent(request.tenant, request.limit)))

    async def on_trace(self, request: TraceRequest, most: int = PAGE) -> TraceReply:
        """Return a page of one trace's spans."""
        trace_id = request.trace_id
        if request.task_id is not None:
            trace_id = await self.store.of_task(request.task_id, request.tenant)
        found = None
        if trace_id is not None:
            found = await self.store.spans(trace_id, request.tenant, request.offset, most + 1)
        if trace_id is None or found is None:
            what = (
                f"task {request.task_id} has no trace"
                if request.task_id
                else f"trace {request.trace_id} does not exist"
            )
            raise _no_trace(what)
        return TraceReply(trace_id=trace_id, spans=tuple(found[:most]), more=len(found) > most)


def _no_trace(what: str) -> RefusedError:
    return RefusedError(
        "router.no_trace",
        f"{what}; the router keeps traces for a limited time, if WOOLY_TRACES=router is set (`wooly up` sets it)",
    )
