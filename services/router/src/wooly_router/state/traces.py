"""Recent traces. A trace is kept as soon as it contains a tenant's task, and it belongs to the tenant of its first task.

Spans of other traces are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from wooly_wis.traces import MAX_TRACE_SPANS, SpanInfo, SpanRecord, TraceInfo

from wooly_router.state.database import Database, insert_of
from wooly_router.state.tables import SpanRow, TraceRow, TraceTaskRow

#: Name of the attribute with a span's owner: the span is not kept in a trace of another tenant.
OWNER = "tenant"
#: Maximum number of traces that one transaction removes.
MAX_REMOVED = 100


class TraceStore:
    """All kept traces.

    Attributes:
        keeps: whether this router keeps traces.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.keeps = False

    async def bind(self, trace_id: str, task_id: str, tenant: str, name: str, now: float) -> bool:
        """Add a tenant's task to a trace.

        Returns False, and stores nothing of the task, if the trace belongs to another tenant.
        """
        start = int(now * 1e9)
        row = {
            "id": trace_id, "tenant": tenant, "task_id": task_id, "name": name[:1024], "begun_at": now, "start_ns": start,
            "end_ns": start, "spans": 0, "error": False,
        }  # fmt: skip
        async with self.database.writing() as s:
            await _insert(s, TraceRow, [row])
            owner = await s.scalar(select(TraceRow.tenant).where(TraceRow.id == trace_id))
            if owner != tenant:
                return False
            await _insert(s, TraceTaskRow, [{"task_id": task_id, "trace_id": trace_id}])
        return True

    async def add(self, spans: Sequence[tuple[str, SpanRecord]]) -> tuple[int, int]:
        """Store spans, each with its service.

        Returns the numbers of spans whose trace is not kept, and of spans whose trace is full.

        A span that is already stored is not added again.
        """
        traces: dict[str, dict[str, tuple[str, SpanRecord]]] = {}
        for service, span in spans:
            traces.setdefault(span.trace_id, {}).setdefault(span.span_id, (service, span))
        unknown = full = 0
        async with self.database.writing() as s:
            query = (
                select(TraceRow.id, TraceRow.spans, TraceRow.tenant)
                .where(TraceRow.id.in_(traces))
                .order_by(TraceRow.id)
            )
            kept = {row.id: (row.spans, row.tenant) for row in await s.execute(query.with_for_update())}
            unknown = sum([len(t) for trace_id, t in traces.items() if trace_id not in kept])
            for trace_id, (count, tenant) in kept.items():
                given = traces[trace_id]
                found = {k: v for k, v in given.items() if v[1].attributes.get(OWNER, tenant) == tenant}
                unknown += len(given) - len(found)
                query_known = select(SpanRow.id).where(SpanRow.trace_id == trace_id, SpanRow.id.in_(found))
                known = set(await s.scalars(query_known))
                new = [each for span_id, each in found.items() if span_id not in known]
                room = max(MAX_TRACE_SPANS - count, 0)
                full += max(len(new) - room, 0)
                await self._extend(s, trace_id, new[:room], first=count == 0)
        return unknown, full

    async def _extend(
        self, s: AsyncSession, trace_id: str, spans: Sequence[tuple[str, SpanRecord]], *, first: bool
    ) -> None:
        if not spans:
            return
        start, end = min([r.start_ns for _, r in spans]), max([r.end_ns for _, r in spans])
        rows = [
            {
                "trace_id": trace_id, "id": r.span_id, "parent_id": r.parent_id, "name": r.name, "service": service,
                "start_ns": r.start_ns, "end_ns": r.end_ns, "error": r.error, "attributes": r.attributes,
            }
            for service, r in spans
        ]  # fmt: skip
        await _insert(s, SpanRow, rows)
        changes: dict[str, Any] = {"spans": TraceRow.spans + len(spans)}
        if first:
            changes |= {"start_ns": start, "end_ns": end}
        else:
            changes["start_ns"] = case((TraceRow.start_ns > start, start), else_=TraceRow.start_ns)
            changes["end_ns"] = case((TraceRow.end_ns < end, end), else_=TraceRow.end_ns)
        if any(r.error for _, r in spans):
            changes["error"] = True
        await s.execute(update(TraceRow).where(TraceRow.id == trace_id).values(changes))

    async def forget(self, before: float, most: int) -> int:
        """Remove traces that began before a time, and the oldest ones beyond `most`; at most `MAX_REMOVED`.

        Returns the number removed.
        """
        async with self.database.writing() as s:
            last = select(TraceRow.begun_at).order_by(TraceRow.begun_at.desc()).offset(most).limit(1)
            edge = await s.scalar(last)
            old = TraceRow.begun_at < before
            condition = old if edge is None else or_(old, TraceRow.begun_at <= edge)
            gone = list(
                await s.scalars(select(TraceRow.id).where(condition).order_by(TraceRow.begun_at).limit(MAX_REMOVED))
            )
            for table in (SpanRow, TraceTaskRow):
                await s.execute(delete(table).where(table.trace_id.in_(gone)))
            await s.execute(delete(TraceRow).where(TraceRow.id.in_(gone)))
        return len(gone)

    # -- questions ---------------------------------------------------------------------------------------------------

    async def of_task(self, task_id: str, tenant: str | None) -> str | None:
        """Return the id of a task's trace, if the tenant may see it (None: a caller that sees all tenants)."""
        query = (
            select(TraceRow.id)
            .join(TraceTaskRow, TraceTaskRow.trace_id == TraceRow.id)
            .where(TraceTaskRow.task_id == task_id, *_seen_by(tenant))
        )
        async with self.database.reading() as s:
            return await s.scalar(query)

    async def recent(self, tenant: str | None, limit: int) -> list[TraceInfo]:
        """Return the traces with spans that a tenant may see, newest first."""
        conditions = (TraceRow.spans > 0, *_seen_by(tenant))
        query = select(TraceRow).where(*conditions).order_by(TraceRow.begun_at.desc(), TraceRow.id).limit(limit)
        async with self.database.reading() as s:
            return [
                TraceInfo(
                    trace_id=r.id,
                    name=r.name,
                    task_id=r.task_id or None,
                    start_ns=r.start_ns,
                    duration_ns=r.end_ns - r.start_ns,
                    spans=r.spans,
                    error=r.error,
                )
                for r in await s.scalars(query)
            ]

    async def spans(
        self, trace_id: str, tenant: str | None, offset: int = 0, limit: int = MAX_TRACE_SPANS
    ) -> list[SpanInfo] | None:
        """Return a trace's spans in the order in which they began; None if no trace has this id or the tenant may not see it."""
        async with self.database.reading() as s:
            if await s.scalar(select(TraceRow.id).where(TraceRow.id == trace_id, *_seen_by(tenant))) is None:
                return None
            query = select(SpanRow).where(SpanRow.trace_id == trace_id).order_by(SpanRow.start_ns, SpanRow.id)
            return [
                SpanInfo(
                    span_id=r.id,
                    parent_id=r.parent_id,
                    name=r.name,
                    service=r.service,
                    start_ns=r.start_ns,
                    end_ns=r.end_ns,
                    error=r.error,
                    attributes=r.attributes,
                )
                for r in await s.scalars(query.offset(offset).limit(limit))
            ]


def _seen_by(tenant: str | None) -> tuple[Any, ...]:
    return () if tenant is None else (TraceRow.tenant == tenant,)


async def _insert(s: AsyncSession, table: Any, rows: list[dict[str, Any]]) -> None:
    """Add rows. A row whose key exists is skipped."""
    await s.execute(insert_of(s, table).on_conflict_do_nothing(), rows)
