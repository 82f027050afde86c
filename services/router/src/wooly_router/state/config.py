"""Cluster settings that an operator changes at run time, and the audit log."""

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
    """One entry of the audit log: who changed what, and when."""

    at: float
    actor: str
    tenant: str
    action: str
    target: str
    detail: dict[str, Any]
    id: int = 0


class ConfigStore:
    """The changed cluster settings, by name. Defaults are not stored here; the caller has them."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, s: AsyncSession | None = None) -> dict[str, Any]:
        """Return all changed settings."""
        if s is None:
            async with self.database.reading() as s:
                return await self.read(s)
        return {r.name: r.value for r in await s.scalars(select(ConfigRow).order_by(ConfigRow.name))}

    async def write(self, values: Mapping[str, Any], now: float, by: str) -> None:
        """Store settings: all of them or none."""
        async with self.database.writing() as s:
            for name, value in values.items():
                await s.merge(ConfigRow(name=name, value=value, updated_at=now, updated_by=by))


class AuditLog:
    """The audit log. Rows are added and never changed."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def add(self, record: AuditRecord) -> None:
        """Add an entry; the database assigns its id."""
        values = {f: getattr(record, f) for f in AuditRecord.__slots__ if f != "id"}
        async with self.database.writing() as s:
            s.add(AuditRow(**values))

    async def page(self, limit: int, before: int | None = None, tenant: str | None = None) -> list[AuditRecord]:
        """Return the newest entries before an id, newest first."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditRow.id < before)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        async with self.database.reading() as s:
            return [AuditRecord(**{f: getattr(r, f) for f in AuditRecord.__slots__}) for r in await s.scalars(query)]
