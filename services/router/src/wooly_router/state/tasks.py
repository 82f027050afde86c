"""Tasks with their devices, leases and stories.

Every change of state is conditional, so a change that comes too late has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, and_, cast, delete, func, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from wooly_dispatch.overcommit import counted
from wooly_wis.messages.sessions import GANG_MARK

from wooly_router.core.gangs import ALONE, Gang
from wooly_router.core.placement import Claim, DeviceRequest
from wooly_router.core.queue import Waiting
from wooly_router.core.tasks import ENDED, Kind, sources
from wooly_router.state.database import Database, insert_of
from wooly_router.state.tables import LeaseRow, PartRow, TaskEventRow, TaskRow

#: Maximum length of a stored reason, in characters.
REASON_CHARS = 4096
#: Maximum number of steps of a story to which clients add lines.
STEPS = 256


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The executor and node of one device of a task."""

    executor_id: str
    node: str


@dataclass(frozen=True, slots=True)
class TaskWish:
    """What a session's client was asked to do, as `RenewSessionReply.wish` says.

    Attributes:
        do: move, hibernate, wake; empty: nothing.
        reason: why.
        node: the node or the executor to use from now on; empty: as before.
        barred: executors that may not take it.
    """

    do: str = ""
    reason: str = ""
    node: str = ""
    barred: Sequence[str] = ()


NO_WISH = TaskWish()


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task, detached from the database. `parts` are its devices, in order. The other fields are as in `TaskRow`."""

    id: str
    kind: Kind
    tenant: str
    created_at: float
    name: str = ""
    client_host: str = ""
    state: str = "pending"
    reason: str = ""
    priority: int = 2
    gpu_mode: str = "shared"
    required_vram: int | None = None
    noswap: bool = False
    wants: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] | None = None
    outputs: list[Any] | None = None
    placement: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    deadline_at: float | None = None
    retry_at: float | None = None
    parts: tuple[PartRecord, ...] = ()

    def want(self) -> DeviceRequest:
        """Return the input of placement."""
        more = self.wants
        return DeviceRequest(
            gpu_count=int(more.get("gpu_count", 1)),
            required_vram=self.required_vram,
            exclusive=self.gpu_mode == "exclusive",
            swappable=not self.noswap,
            groups=tuple(more.get("groups", ())),
            node=str(more.get("node", "")),
            near=str(more.get("near", "")),
            vendor=str(more.get("vendor", "")),
            arch=str(more.get("arch", "")),
            weights=tuple(more.get("weights", ())),
            barred=frozenset(more.get("barred", ())),
            claim=int(more.get("claim", 0)),
            store=str(more.get("store", "")),
        )

    @property
    def gang(self) -> Gang:
        """The gang of which the session is a rank."""
        more = self.wants.get("gang")
        return Gang(more["task"], more["size"], more["devices"]) if more else ALONE

    @property
    def rank(self) -> int:
        """Number of the rank in its gang; 0 without a gang."""
        return int((self.wants.get("gang") or {}).get("rank", 0))

    @property
    def wish(self) -> TaskWish:
        """What the session's client was asked to do."""
        return TaskWish(**(self.wants.get("wish") or {}))

    def waiting(self) -> Waiting:
        """Return the task as an entry of the queue."""
        gang = self.gang if not self.attempt else ALONE  # a rank that lost its executor gets another one alone
        return Waiting(self.id, self.priority, self.created_at, self.want(), self.retry_at or 0.0, gang)


def session_of(task: TaskRecord) -> str:
    """Return the id of a task's session on its executors: the task's id; for a job, also the number of the current attempt."""
    return f"{task.id}-{task.attempt}" if task.kind == "job" else task.id


def rank_id(gang: str, rank: int) -> str:
    """The id of the session of a gang's rank."""
    return f"{gang}{GANG_MARK}{rank}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a session that is open or waits in the queue: its client's token, and when it ends."""

    task_id: str
    token: str
    lease_until: float


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """One step of a task's story."""

    number: int
    at: float
    state: str
    reason: str


class TaskGlance(NamedTuple):
    """The columns of a task that are compared to find changes. Followers get an event for each change."""

    tenant: str
    state: str
    reason: str
    priority: int


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """A filter for lists of tasks; fields with None match everything. `text` is searched in ids and names."""

    tenant: str | None = None
    states: tuple[str, ...] = ()
    kind: str | None = None
    priority: int | None = None
    executor_id: str | None = None
    text: str | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the filter as SQL conditions."""
        found: list[ColumnElement[bool]] = []
        if self.tenant is not None:
            found.append(TaskRow.tenant == self.tenant)
        if self.states:
            found.append(TaskRow.state.in_(self.states))
        if self.kind is not None:
            found.append(TaskRow.kind == self.kind)
        if self.priority is not None:
            found.append(TaskRow.priority == self.priority)
        if self.executor_id is not None:
            found.append(TaskRow.parts.any(PartRow.executor_id == self.executor_id))
        if self.text:
            found.append(
                or_(TaskRow.id.contains(self.text, autoescape=True), TaskRow.name.contains(self.text, autoescape=True))
            )
        return found


class TaskStore:
    """All tasks. Methods with a session `s` run inside the caller's transaction."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- changes -----------------------------------------------------------------------------------------------------

    async def add(self, s: AsyncSession, task: TaskRecord) -> bool:
        """Add a task, with the first line of its story. Returns False if its id is in use."""
        if await s.get(TaskRow, task.id) is not None:
            return False
        try:
            async with s.begin_nested():
                s.add(TaskRow(parts=_parts(task.parts), **{f: getattr(task, f) for f in _COLUMNS}))
        except IntegrityError:
            if await s.get(TaskRow, task.id) is None:
                raise
            return False  # another router or another message added the task first
        await self._tell(s, task.id, task.created_at, task.state, task.reason)
        return True

    async def move(
        self,
        s: AsyncSession,
        task_id: str,
        state: str,
        reason: str,
        at: float,
        *,
        attempt: int | None = None,
        only_from: Iterable[str] = (),
        lapsed: float | None = None,
        **changes: Any,
    ) -> bool:
        """Change a task's state. Returns False, without a change, if the task is in a wrong state or at another attempt.

        Args:
            attempt: the attempt that the change is about; None: any attempt.
            only_from: the states from which the change is allowed; empty: all states that may come before `state`.
            lapsed: change it only if its lease was over at this time; None: with any lease.
            changes: other columns to set in the same statement.
        """
        allowed = tuple(only_from) or sources(state)
        condition = and_(TaskRow.id == task_id, TaskRow.state.in_(allowed))
        if attempt is not None:
            condition = and_(condition, TaskRow.attempt == attempt)
        if lapsed is not None:
            over = select(LeaseRow.task_id).where(LeaseRow.task_id == task_id, LeaseRow.lease_until < lapsed)
            condition = and_(condition, over.exists())
        if state == "started":
            changes["started_at"] = at
        elif state in ENDED:
            changes["ended_at"] = at
        reason = reason[:REASON_CHARS]
        values = {"state": state, "reason": reason} | changes
        moved = await s.execute(update(TaskRow).where(condition).values(values).returning(TaskRow.id))
        if moved.first() is None:
            return False
        if state in ENDED or state in ("pending", "hibernated"):
            await s.execute(delete(LeaseRow).where(LeaseRow.task_id == task_id))
        if state in ("pending", "hibernated"):
            await s.execute(delete(PartRow).where(PartRow.task_id == task_id))
        await self._tell(s, task_id, at, state, reason)
        return True

    async def leave(
        self, s: AsyncSession, task: TaskRecord, state: str, reason: str, at: float, lease: Lease, **wants: Any
    ) -> bool:
        """Let a session leave its executor: it waits (`pending`) until its client asks for another one, or hibernates.

        The client may be dead, so the session has no place in the queue before. Its attempt grows, so that what its last executor
        still says about it has no effect. Returns False, without a change, if the session has ended or changed meanwhile.

        Args:
            s: the transaction.
            task: the session.
            state: pending or hibernated.
            reason: why it leaves.
            at: the time.
            lease: its client's token, and until when the client must ask or renew.
            wants: changes of its wants.
        """
        moved = await self.move(s, task.id, state, reason, at, attempt=task.attempt, only_from=["started", "pending"])
        if not moved:
            return False
        current = await self.get(task.id, s) or task  # its wants may have changed since it was read
        changed = current.wants | {"away": True, "wish": None, "barred": [], "repeats": False} | wants
        changes = {"attempt": task.attempt + 1, "wants": changed}
        await s.execute(update(TaskRow).where(TaskRow.id == task.id).values(changes))
        await self.set_lease(s, lease)
        return True

    async def change_wants(
        self,
        s: AsyncSession,
        task_id: str,
        *,
        state: str = "",
        attempt: int | None = None,
        wished: TaskWish | None = None,
        tell: tuple[float, str] | None = None,
        **changes: Any,
    ) -> bool:
        """Change some of a task's wants. Returns False, without a change, if the task is in another state or at another attempt.

        Args:
            s: the transaction.
            task_id: the task.
            state: the state in which the task must be; empty: any.
            attempt: the attempt at which it must be; None: any.
            wished: what its client must have been asked for; None: anything.
            tell: time and text of a step for the task's story.
            changes: the new values.
        """
        row = await s.scalar(select(TaskRow).where(TaskRow.id == task_id).with_for_update())
        if row is None or (state and row.state != state) or (attempt is not None and row.attempt != attempt):
            return False
        if wished is not None and TaskWish(**(row.wants.get("wish") or {})) != wished:
            return False
        row.wants = row.wants | changes
        if tell is not None:
            await self._tell(s, task_id, tell[0], row.state, tell[1], limited=True)
        return True

    async def _tell(
        self, s: AsyncSession, task_id: str, at: float, state: str, reason: str, *, limited: bool = False
    ) -> None:
        """Add a step to a task's story; with `limited`, only if the story has less than `STEPS`."""
        last = select(func.coalesce(func.max(TaskEventRow.number), 0)).where(TaskEventRow.task_id == task_id)
        if limited and (await s.scalar(last) or 0) >= STEPS:
            return
        values = {
            "task_id": task_id,
            "number": last.scalar_subquery() + 1,
            "at": at,
            "state": state,
            "reason": reason[:REASON_CHARS],
            "told": False,
        }
        await s.execute(insert(TaskEventRow).values(values))

    async def is_at(self, s: AsyncSession, task_id: str, state: str, attempt: int) -> bool:
        """Tell whether a task is in a state and at an attempt. The row stays locked until the transaction ends."""
        query = select(TaskRow.id).where(TaskRow.id == task_id, TaskRow.state == state, TaskRow.attempt == attempt)
        return await s.scalar(query.with_for_update()) is not None

    async def is_on(self, s: AsyncSession, task_id: str, attempt: int, executor_id: str) -> bool:
        """Tell whether a task is at an attempt and has a device of an executor. The row stays locked, as by `locked`."""
        mine = TaskRow.parts.any(PartRow.executor_id == executor_id)
        query = select(TaskRow.id).where(TaskRow.id == task_id, TaskRow.attempt == attempt, mine)
        return await s.scalar(query.with_for_update()) is not None

    async def take_devices(self, s: AsyncSession, task_id: str, parts: Sequence[PartRecord], **changes: Any) -> None:
        """Replace a task's devices, and set columns in the same transaction."""
        await s.execute(delete(PartRow).where(PartRow.task_id == task_id))
        s.add_all(
            [PartRow(task_id=task_id, position=i, executor_id=p.executor_id, node=p.node) for i, p in enumerate(parts)]
        )
        if changes:
            await s.execute(update(TaskRow).where(TaskRow.id == task_id).values(changes))

    async def take_over(self, s: AsyncSession, task: TaskRecord) -> None:
        """Store the client and the wants of a session that was stored before its client asked for it."""
        changes = {"name": task.name, "client_host": task.client_host, "wants": task.wants}
        await s.execute(update(TaskRow).where(TaskRow.id == task.id).values(changes))

    async def amend(self, task_id: str, reason: str, at: float, told: str = "") -> None:
        """Replace the reason of an ended task and add a step to its story.

        `told`: the text of this step, if it is not `reason`.
        """
        condition = and_(TaskRow.id == task_id, TaskRow.state.in_(ENDED))
        async with self.database.writing() as s:
            changed = await s.execute(
                update(TaskRow).where(condition).values(reason=reason[:REASON_CHARS]).returning(TaskRow.state)
            )
            state = changed.scalar()
            if state is not None:
                await self._tell(s, task_id, at, state, told or reason)

    async def note(self, task_id: str, text: str, at: float) -> bool:
        """Add a step to the story of a started task. Returns False if the story has it already, or has `STEPS` steps."""
        story = select(TaskEventRow.reason).where(TaskEventRow.task_id == task_id)
        async with self.database.writing() as s:
            started = select(TaskRow.id).where(TaskRow.id == task_id, TaskRow.state == "started")
            told = list(await s.scalars(story))
            if await s.scalar(started) is None or text[:REASON_CHARS] in told or len(told) >= STEPS:
                return False
            await self._tell(s, task_id, at, "started", text)
        return True

    async def set_lease(self, s: AsyncSession, lease: Lease) -> None:
        """Add or replace the lease of a session that is open or waits in the queue."""
        until = {"token": lease.token, "lease_until": lease.lease_until}
        added = insert_of(s, LeaseRow).values(task_id=lease.task_id, **until)
        await s.execute(added.on_conflict_do_update(index_elements=["task_id"], set_=until))

    async def set_priority(self, task_id: str, priority: int) -> bool:
        """Change a task's class, unless the task has ended."""
        condition = and_(TaskRow.id == task_id, TaskRow.state.not_in(ENDED))
        async with self.database.writing() as s:
            found = await s.execute(update(TaskRow).where(condition).values(priority=priority).returning(TaskRow.id))
            return found.first() is not None

    async def bring_down(self, tenant: str, priority: int, weight: int, *, exclusive: bool) -> None:
        """Lower the class of a tenant's tasks, and the weight of its jobs, unless they have ended.

        Args:
            tenant: name of the tenant.
            priority: the highest allowed class.
            weight: the largest allowed weight.
            exclusive: whether waiting tasks may get a device to themselves; if not, they will share one.
        """
        query = select(TaskRow).where(TaskRow.tenant == tenant, TaskRow.state.not_in(ENDED))
        async with self.database.writing() as s:
            for row in await s.scalars(query):
                row.priority = max(row.priority, priority)
                if not exclusive and row.state == "pending":
                    row.gpu_mode = "shared"
                if row.spec is not None and row.spec.get("weight", 1) > weight:
                    row.spec = row.spec | {"weight": weight}

    async def note_waiting(
        self, s: AsyncSession, task_id: str, placement: dict[str, Any], reason: str, tell_at: float | None = None
    ) -> None:
        """Store why a pending task waits. With `tell_at`, it is also a step of the task's story."""
        noted = await s.execute(
            update(TaskRow)
            .where(TaskRow.id == task_id, TaskRow.state == "pending")
            .values(placement=placement, reason=reason[:REASON_CHARS])
            .returning(TaskRow.id)
        )
        if tell_at is not None and noted.first() is not None:
            await self._tell(s, task_id, tell_at, "pending", reason)

    async def postpone(self, s: AsyncSession, task_ids: Collection[str], until: float) -> None:
        """Let the queue skip some jobs until a time."""
        ids = list(task_ids)
        for i in range(0, len(ids), 500):  # a statement has a limited number of parameters
            chosen = and_(TaskRow.id.in_(ids[i : i + 500]), TaskRow.state == "pending")
            await s.execute(update(TaskRow).where(chosen).values(retry_at=until))

    async def forget_ended(self, before: float) -> int:
        """Drop tasks that ended before a time, at most 1,000. Returns their number."""
        async with self.database.writing() as s:
            old = list(await s.scalars(select(TaskRow.id).where(TaskRow.ended_at < before).limit(1000)))
            for table in (PartRow, TaskEventRow):
                await s.execute(delete(table).where(table.task_id.in_(old)))
            await s.execute(delete(TaskRow).where(TaskRow.id.in_(old)))
        return len(old)

    # -- leases ------------------------------------------------------------------------------------------------------

    async def lease(self, task_id: str, s: AsyncSession | None = None) -> Lease | None:
        """Return the lease of a session that is open or waits in the queue."""
        if s is None:
            async with self.database.reading() as s:
                return await self.lease(task_id, s)
        row = await s.get(LeaseRow, task_id)
        return None if row is None else Lease(row.task_id, row.token, row.lease_until)

    async def lapsed(self, now: float) -> list[str]:
        """Return the sessions whose lease is over."""
        async with self.database.reading() as s:
            return list(await s.scalars(select(LeaseRow.task_id).where(LeaseRow.lease_until < now)))

    async def keep_lease(self, s: AsyncSession, task_id: str, until: float) -> None:
        """Extend one lease, if it exists, inside the caller's transaction."""
        mine = LeaseRow.task_id == task_id, LeaseRow.lease_until < until
        await s.execute(update(LeaseRow).where(*mine).values(lease_until=until))

    async def prolong(self, leases: Mapping[str, float]) -> None:
        """Extend leases: by session, the new end."""
        async with self.database.writing() as s:
            for task_id, until in leases.items():
                # Another router may have extended this lease further.
                mine = LeaseRow.task_id == task_id, LeaseRow.lease_until < until
                await s.execute(update(LeaseRow).where(*mine).values(lease_until=until))

    async def prolong_all(self, until: float) -> None:
        """Extend every lease that would end before `until`."""
        async with self.database.writing() as s:
            await s.execute(update(LeaseRow).where(LeaseRow.lease_until < until).values(lease_until=until))

    # -- questions ---------------------------------------------------------------------------------------------------

    async def get(self, task_id: str, s: AsyncSession | None = None) -> TaskRecord | None:
        """One task."""
        if s is None:
            async with self.database.reading() as s:
                return await self.get(task_id, s)
        row = await s.get(TaskRow, task_id, populate_existing=True)
        return None if row is None else _record(row)

    async def locked(self, s: AsyncSession, task_id: str) -> TaskRecord | None:
        """One task. Its row stays locked until the transaction ends."""
        await s.execute(select(TaskRow.id).where(TaskRow.id == task_id).with_for_update())
        return await self.get(task_id, s)

    async def leased(self, task_id: str) -> tuple[Lease | None, TaskRecord | None]:
        """Return a session's lease and the session, read together."""
        async with self.database.reading() as s:
            row = await s.get(LeaseRow, task_id)
            lease = None if row is None else Lease(row.task_id, row.token, row.lease_until)
            return lease, await self.get(task_id, s)

    async def of_session(self, session_id: str) -> TaskRecord | None:
        """The task of a session of an executor, as `session_of` names it: a session, or the current attempt of a job."""
        known = await self.get(session_id)
        if known is not None and known.kind == "session":
            return known
        job = await self.get(session_id.rpartition("-")[0])
        return job if job is not None and job.kind == "job" and session_of(job) == session_id else None

    async def gang(self, gang: str, s: AsyncSession | None = None) -> list[TaskRecord]:
        """Return the sessions of a gang's ranks, in the order of the ranks."""
        if s is None:
            async with self.database.reading() as s:
                return await self.gang(gang, s)
        mine = TaskRow.id.startswith(gang + GANG_MARK, autoescape=True)
        query = select(TaskRow).where(mine).execution_options(populate_existing=True)
        found = [_record(r) for r in await s.scalars(query)]
        return sorted([r for r in found if r.gang.task_id == gang], key=lambda r: r.rank)

    async def in_states(self, *states: str, kind: str | None = None, s: AsyncSession | None = None) -> list[TaskRecord]:
        """Return all tasks in some states, oldest first."""
        chosen = TaskFilter(states=states, kind=kind)
        query = select(TaskRow).where(*chosen.conditions()).order_by(TaskRow.created_at, TaskRow.id)
        if s is not None:
            return [_record(r) for r in await s.scalars(query)]
        async with self.database.reading() as s:
            return [_record(r) for r in await s.scalars(query)]

    async def exist(self, *states: str, kind: str) -> bool:
        """Whether there are tasks of a kind in some states."""
        query = select(TaskRow.id).where(*TaskFilter(states=states, kind=kind).conditions()).limit(1)
        async with self.database.reading() as s:
            return await s.scalar(query) is not None

    async def started_on(self, executor_id: str) -> list[TaskRecord]:
        """Return the tasks that run on one executor, oldest first."""
        conditions = TaskFilter(states=("started",), executor_id=executor_id).conditions()
        query = select(TaskRow).where(*conditions).order_by(TaskRow.created_at, TaskRow.id)
        async with self.database.reading() as s:
            return [_record(r) for r in await s.scalars(query)]

    async def claims(
        self, s: AsyncSession, used: Mapping[tuple[str, str], int] | None = None, *, without: str = ""
    ) -> list[Claim]:
        """Return the claims of all tasks that run or are being started.

        Args:
            s: the transaction.
            used: bytes that sessions use, by executor and session. They count for tasks that declare no size.
            without: a task whose claims do not count.
        """
        used = used or {}
        query = (
            select(
                PartRow.executor_id, TaskRow.id, TaskRow.required_vram, TaskRow.gpu_mode, TaskRow.noswap, TaskRow.wants
            )
            .join(TaskRow, TaskRow.id == PartRow.task_id)
            .where(TaskRow.state.not_in(ENDED))
            .order_by(PartRow.task_id, PartRow.position)
        )
        return [
            Claim(e, counted(vram, wants.get("claim", 0), used.get((e, i), 0)) or None, mode == "exclusive", not noswap)
            for e, i, vram, mode, noswap, wants in await s.execute(query)
            if i != without
        ]

    async def queueing_tenants(self) -> set[str]:
        """Return the tenants with jobs that wait for devices."""
        waiting = and_(TaskRow.state == "pending", TaskRow.kind == "job", ~TaskRow.parts.any())
        async with self.database.reading() as s:
            return set(await s.scalars(select(TaskRow.tenant).where(waiting).distinct()))

    async def queue(self, s: AsyncSession) -> list[TaskRecord]:
        """Return the jobs and sessions that wait for devices."""
        return [t for t in await self.in_states("pending", s=s) if not t.parts and not t.wants.get("away")]

    async def returned(self, s: AsyncSession, task: TaskRecord, at: float) -> None:
        """Let a session without an executor wait in the queue, because its client asks for one."""
        if task.state == "hibernated":
            lease = await s.get(LeaseRow, task.id)
            await self.move(s, task.id, "pending", "it wakes up", at, attempt=task.attempt, only_from=["hibernated"])
            if lease is not None:
                await self.set_lease(s, Lease(task.id, lease.token, lease.lease_until))
        await self.change_wants(s, task.id, attempt=task.attempt, away=False, wish=None)

    async def page(self, chosen: TaskFilter, limit: int, after: tuple[float, str] | None = None) -> list[TaskRecord]:
        """Return a page of tasks, newest first, after the position (created_at, id)."""
        query = (
            select(TaskRow)
            .where(*chosen.conditions())
            .order_by(TaskRow.created_at.desc(), TaskRow.id.desc())
            .limit(limit)
        )
        if after is not None:
            at, last = after
            query = query.where(or_(TaskRow.created_at < at, and_(TaskRow.created_at == at, TaskRow.id < last)))
        async with self.database.reading() as s:
            return [_record(r) for r in await s.scalars(query)]

    async def counts(self, tenant: str | None = None) -> dict[str, int]:
        """Return the number of tasks in each state."""
        query = (
            select(TaskRow.state, func.count()).where(*TaskFilter(tenant=tenant).conditions()).group_by(TaskRow.state)
        )
        async with self.database.reading() as s:
            return {row[0]: row[1] for row in await s.execute(query)}

    async def count(self, s: AsyncSession, tenant: str, kind: Kind, *states: str) -> int:
        """Return the number of a tenant's tasks of one kind in some states."""
        chosen = TaskFilter(tenant=tenant, states=states, kind=kind)
        return await s.scalar(select(func.count()).select_from(TaskRow).where(*chosen.conditions())) or 0

    async def activity(
        self, since: float, until: float, step: int, tenant: str | None = None
    ) -> list[tuple[float, int, int]]:
        """Return (time, waiting tasks, running tasks) for the end of every `step` seconds of a span. Only last attempts count."""
        made, began, ended = TaskRow.created_at, TaskRow.started_at, TaskRow.ended_at
        mine = TaskFilter(tenant=tenant).conditions()
        goes_on = or_(ended.is_(None), ended >= since)
        waiting = select(func.count()).where(*mine, made < since, goes_on, or_(began.is_(None), began >= since))
        running = select(func.count()).where(*mine, began < since, goes_on)
        width = literal(step, literal_execute=True)  # as text: two parameters would not count as the same expression
        first = literal(int(since), literal_execute=True)
        #: Transitions of a task: the column with the time, a condition, and the changes of the waiting and running counts.
        turns = (
            (made, None, 1, 0),
            (began, None, -1, 1),
            (ended, began.is_(None), -1, 0),
            (ended, began.is_not(None), 0, -1),
        )
        changes: dict[int, list[int]] = {}
        async with self.database.reading() as s:
            now = [(await s.execute(query)).scalar_one() for query in (waiting, running)]
            for column, condition, *effects in turns:
                bucket = ((cast(column, BigInteger) - first) // width).label("bucket")
                query = select(bucket, func.count()).where(*mine, column >= since, column < until).group_by(bucket)
                for number, count in await s.execute(query if condition is None else query.where(condition)):
                    change = changes.setdefault(max(0, int(number)), [0, 0])
                    for i, effect in enumerate(effects):
                        change[i] += effect * count
        found = []
        for number in range(math.ceil((until - since) / step)):
            now = [a + b for a, b in zip(now, changes.get(number, (0, 0)), strict=True)]
            found.append((min(since + (number + 1) * step, until), now[0], now[1]))
        return found

    async def glance(self, since: float) -> dict[str, TaskGlance]:
        """Return every task that has not ended or was created after `since`, by id."""
        query = select(TaskRow.id, TaskRow.tenant, TaskRow.state, TaskRow.reason, TaskRow.priority).where(
            or_(TaskRow.state.not_in(ENDED), TaskRow.created_at > since)
        )
        async with self.database.reading() as s:
            return {r.id: TaskGlance(r.tenant, r.state, r.reason, r.priority) for r in await s.execute(query)}

    async def untold(self, limit: int = 500) -> list[tuple[TaskRecord, TaskEvent]]:
        """Return steps that are not published yet, oldest first, each with its task as it is now."""
        query = (
            select(TaskEventRow)
            .where(TaskEventRow.told.is_(False))
            .order_by(TaskEventRow.at, TaskEventRow.number)
            .limit(limit)
        )
        async with self.database.reading() as s:
            found = []
            for r in list(await s.scalars(query)):
                task = await self.get(r.task_id, s)
                if task is not None:
                    found.append((task, TaskEvent(r.number, r.at, r.state, r.reason)))
            return found

    async def tell(self, steps: Iterable[tuple[str, int]]) -> None:
        """Mark steps, (task id, number), as published."""
        async with self.database.writing() as s:
            for task_id, number in steps:
                condition = and_(TaskEventRow.task_id == task_id, TaskEventRow.number == number)
                await s.execute(update(TaskEventRow).where(condition).values(told=True))

    async def story(self, task_id: str) -> list[TaskEvent]:
        """Return the steps of a task, in order."""
        query = select(TaskEventRow).where(TaskEventRow.task_id == task_id).order_by(TaskEventRow.number)
        async with self.database.reading() as s:
            return [TaskEvent(r.number, r.at, r.state, r.reason) for r in await s.scalars(query)]


_COLUMNS = [f.name for f in fields(TaskRecord) if f.name != "parts"]


def _parts(parts: Iterable[PartRecord]) -> list[PartRow]:
    return [PartRow(position=i, executor_id=p.executor_id, node=p.node) for i, p in enumerate(parts)]


def _record(row: TaskRow) -> TaskRecord:
    parts = tuple([PartRecord(p.executor_id, p.node) for p in row.parts])
    return TaskRecord(parts=parts, **{f: getattr(row, f) for f in _COLUMNS})
