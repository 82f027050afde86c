"""Nodes, their devices and groups: the states that operators set, and the last facts from heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, cast, delete, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from wooly_router.state.database import Database, insert_of
from wooly_router.state.tables import GpuRow, GroupRow, MemberRow, NodeRow, SampleRow

Wish = Literal["active", "cordoned", "draining"]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A machine. `wish`: the state that its operator set; `overcommit_vram_percent`: None inherits the cluster's value."""

    id: str
    wish: Wish = "active"
    overcommit_vram_percent: int | None = None
    first_seen: float = 0.0
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """A device with the facts of its last heartbeat. `facts`: the fields of `DeviceFacts`."""

    executor_id: str
    node_id: str
    facts: dict[str, Any]
    last_seen: float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A named set of nodes."""

    name: str
    description: str
    created_at: float
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of one device at one time. Shares are from 0 to 1, memory is in bytes."""

    at: float
    executor_id: str
    node_id: str
    utilization: float
    starvation: float
    memory_used: int
    memory_total: int
    sessions: int


class NodeStore:
    """All nodes, devices, groups, and the history of their metrics."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- nodes and devices -------------------------------------------------------------------------------------------

    async def see(self, gpus: Iterable[GpuRecord]) -> None:
        """Store what heartbeats report: new nodes and devices, changed facts, and the time of each device's last heartbeat."""
        async with self.database.writing() as s:
            for gpu in sorted(gpus, key=lambda g: g.executor_id):
                if await s.get(NodeRow, gpu.node_id) is None:
                    s.add(
                        NodeRow(id=gpu.node_id, wish="active", overcommit_vram_percent=None, first_seen=gpu.last_seen)
                    )
                    await s.flush()
                row = await s.get(GpuRow, gpu.executor_id)
                if row is None:
                    s.add(
                        GpuRow(
                            executor_id=gpu.executor_id, node_id=gpu.node_id, facts=gpu.facts, last_seen=gpu.last_seen
                        )
                    )
                else:
                    row.node_id, row.facts, row.last_seen = gpu.node_id, gpu.facts, max(row.last_seen, gpu.last_seen)

    async def nodes(self, s: AsyncSession | None = None) -> dict[str, NodeRecord]:
        """All nodes, by id."""
        if s is None:
            async with self.database.reading() as s:
                return await self.nodes(s)
        groups: dict[str, set[str]] = {}
        for name, node in await s.execute(select(MemberRow.group_name, MemberRow.node_id)):
            groups.setdefault(node, set()).add(name)
        found = {
            r.id: NodeRecord(r.id, r.wish, r.overcommit_vram_percent, r.first_seen, frozenset(groups.get(r.id, ())))  # type: ignore[arg-type]
            for r in await s.scalars(select(NodeRow).order_by(NodeRow.id))
        }
        return found | {n: NodeRecord(n, groups=frozenset(g)) for n, g in groups.items() if n not in found}

    async def gpus(self) -> list[GpuRecord]:
        """Return all known devices, by id."""
        async with self.database.reading() as s:
            rows = await s.scalars(select(GpuRow).order_by(GpuRow.executor_id))
            return [GpuRecord(r.executor_id, r.node_id, r.facts, r.last_seen) for r in rows]

    async def set_wish(self, node_id: str, wish: Wish) -> bool:
        """Set the state that an operator wants for a node. Returns False if the node is unknown."""
        return await self._set(node_id, wish=wish)

    async def set_overcommit(self, node_id: str, percent: int | None) -> bool:
        """Set a node's overcommit percentage; None inherits the cluster's. Returns False if the node is unknown."""
        return await self._set(node_id, overcommit_vram_percent=percent)

    async def _set(self, node_id: str, **values: Any) -> bool:
        async with self.database.writing() as s:
            found = await s.execute(update(NodeRow).where(NodeRow.id == node_id).values(values).returning(NodeRow.id))
            return found.first() is not None

    async def forget_gpu(self, executor_id: str) -> bool:
        """Drop a device that will not return; with its last device, a node is dropped, too.

        Returns False if the device is unknown.
        """
        async with self.database.writing() as s:
            row = await s.get(GpuRow, executor_id)
            if row is None:
                return False
            node_id = row.node_id
            await s.delete(row)
            await s.flush()
            if await s.scalar(select(GpuRow.executor_id).where(GpuRow.node_id == node_id).limit(1)) is None:
                await s.execute(delete(NodeRow).where(NodeRow.id == node_id))
            return True

    # -- groups ------------------------------------------------------------------------------------------------------

    async def groups(self) -> list[GroupRecord]:
        """All groups, by name."""
        async with self.database.reading() as s:
            members: dict[str, list[str]] = {}
            for name, node in await s.execute(
                select(MemberRow.group_name, MemberRow.node_id).order_by(MemberRow.group_name, MemberRow.node_id)
            ):
                members.setdefault(name, []).append(node)
            rows = await s.scalars(select(GroupRow).order_by(GroupRow.name))
            return [GroupRecord(r.name, r.description, r.created_at, tuple(members.get(r.name, ()))) for r in rows]

    async def put_group(self, group: GroupRecord) -> bool:
        """Create or replace a group. Returns True if the group is new."""
        async with self.database.writing() as s:
            new = insert_of(s, GroupRow).values(
                name=group.name, description=group.description, created_at=group.created_at
            )
            found = await s.execute(new.on_conflict_do_nothing().returning(GroupRow.name))
            is_new = found.first() is not None
            if not is_new:  # lock the row: writers of one group take turns
                changed = update(GroupRow).where(GroupRow.name == group.name)
                await s.execute(changed.values(description=group.description))
            await s.execute(delete(MemberRow).where(MemberRow.group_name == group.name))
            s.add_all([MemberRow(group_name=group.name, node_id=n) for n in sorted(set(group.nodes))])
            return is_new

    async def remove_group(self, name: str) -> bool:
        """Delete a group. Nodes without another group return to the common pool. Returns False if the group does not exist."""
        async with self.database.writing() as s:
            await s.execute(delete(MemberRow).where(MemberRow.group_name == name))
            gone = await s.execute(delete(GroupRow).where(GroupRow.name == name).returning(GroupRow.name))
            return gone.first() is not None

    # -- history -----------------------------------------------------------------------------------------------------

    async def sample(self, samples: Iterable[Sample]) -> None:
        """Store samples. If two samples have the same time and device, the first one is kept."""
        async with self.database.writing() as s:
            found = {(sample.at, sample.executor_id): sample for sample in reversed(list(samples))}
            times = select(SampleRow.at, SampleRow.executor_id).where(SampleRow.at.in_({at for at, _ in found}))
            kept = {(at, executor_id) for at, executor_id in await s.execute(times)}
            s.add_all([SampleRow(**_values(sample)) for key, sample in found.items() if key not in kept])

    async def history(
        self, since: float, until: float, executor_id: str | None = None, limit: int = 10_000
    ) -> list[Sample]:
        """Return the samples of a time span, oldest first."""
        query = select(SampleRow).where(SampleRow.at >= since, SampleRow.at < until)
        if executor_id is not None:
            query = query.where(SampleRow.executor_id == executor_id)
        async with self.database.reading() as s:
            rows = await s.scalars(query.order_by(SampleRow.at, SampleRow.executor_id).limit(limit))
            return [Sample(**{f: getattr(r, f) for f in Sample.__slots__}) for r in rows]

    async def means(
        self, since: float, until: float, step: int, executor_id: str | None = None, limit: int = 10_000
    ) -> list[Sample]:
        """Return one sample per device and `step` seconds of a time span, oldest first. Its time is the first second of its step.

        Shares are means. Memory and sessions are maxima.
        """
        width = literal(step, literal_execute=True)  # as text: two parameters would not count as the same expression
        bucket = (cast(SampleRow.at, BigInteger) // width).label("bucket")
        query = (
            select(
                bucket,
                SampleRow.executor_id,
                func.max(SampleRow.node_id),
                func.avg(SampleRow.utilization),
                func.avg(SampleRow.starvation),
                func.max(SampleRow.memory_used),
                func.max(SampleRow.memory_total),
                func.max(SampleRow.sessions),
            )
            .where(SampleRow.at >= since, SampleRow.at < until)
            .group_by(bucket, SampleRow.executor_id)
            .order_by(bucket, SampleRow.executor_id)
            .limit(limit)
        )
        if executor_id is not None:
            query = query.where(SampleRow.executor_id == executor_id)
        async with self.database.reading() as s:
            return [Sample(float(row[0] * step), *row[1:]) for row in await s.execute(query)]

    async def forget_samples(self, before: float) -> None:
        """Drop older samples."""
        async with self.database.writing() as s:
            await s.execute(delete(SampleRow).where(SampleRow.at < before))


def _values(sample: Sample) -> Mapping[str, Any]:
    return {f: getattr(sample, f) for f in Sample.__slots__}
