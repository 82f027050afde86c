"""Settings of the cluster that an operator changes while it runs, and the log of who did what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from wooly_router.state.database import Database
from wooly_router.state.tables import AuditRow, ConfigRow


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Who did what to what."""

    at: float
    actor: str
    tenant: str
    action: str
    target: str
    detail: dict[str, Any]
    id: int = 0


class ConfigStore:
    """What was configured, by name. What was never configured is not here: its default is the caller's."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, s: AsyncSession | None = None) -> dict[str, Any]:
        """Everything that was configured."""
        if s is None:
            async with self.database.reading() as s:
                return await self.read(s)
        return {r.name: r.value for r in await s.scalars(select(ConfigRow).order_by(ConfigRow.name))}

    async def write(self, values: Mapping[str, Any], now: float, by: str) -> None:
        """Configure. All of it or nothing."""
        async with self.database.writing() as s:
            for name, value in values.items():
                await s.merge(ConfigRow(name=name, value=value, updated_at=now, updated_by=by))


class AuditLog:
    """Rows are added and never changed."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def add(self, record: AuditRecord) -> None:
        """One row more; its id is given by the database."""
        values = {f: getattr(record, f) for f in AuditRecord.__slots__ if f != "id"}
        async with self.database.writing() as s:
            s.add(AuditRow(**values))

    async def page(self, limit: int, before: int | None = None, tenant: str | None = None) -> list[AuditRecord]:
        """The newest rows first, from before an id on."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditRow.id < before)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        async with self.database.reading() as s:
            return [AuditRecord(**{f: getattr(r, f) for f in AuditRecord.__slots__}) for r in await s.scalars(query)]
