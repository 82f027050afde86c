"""Contents that the last run of the same model or module shared, so that placement can prefer devices that already have them.

This is a guess about a future run. A run that brings other contents is placed no worse than by chance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from wooly_router.state.database import Database, insert_of
from wooly_router.state.tables import BroughtRow

#: Number of names in one query.
NAMES_AT_ONCE = 500


class BroughtStore:
    """Shared contents by tenant, name (a session's model or a job's module) and sharing domain.

    A tenant never sees other tenants' contents.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    async def remember(self, tenant: str, name: str, dedup: str, contents: Sequence[str], at: float) -> None:
        """Store the contents that an ended run shared, largest first. They replace the contents of the run before."""
        values = {"contents": list(contents), "at": at}
        async with self.database.writing() as s:
            added = insert_of(s, BroughtRow).values(tenant=tenant, name=name, dedup=dedup, **values)
            await s.execute(added.on_conflict_do_update(index_elements=["tenant", "name", "dedup"], set_=values))

    async def of(self, tenant: str, name: str, dedup: str) -> list[str]:
        """Return the contents that the last such run shared; empty if no such run is known."""
        async with self.database.reading() as s:
            row = await s.get(BroughtRow, (tenant, name, dedup))
            return [] if row is None else list(row.contents)

    async def of_all(
        self, s: AsyncSession, names: Collection[tuple[str, str]], dedup: str
    ) -> dict[tuple[str, str], list[str]]:
        """Return the contents of several runs, by tenant and name. Unknown runs are left out."""
        found: dict[tuple[str, str], list[str]] = {}
        wanted = sorted({name for _, name in names})
        for at in range(0, len(wanted), NAMES_AT_ONCE):
            some = BroughtRow.name.in_(wanted[at : at + NAMES_AT_ONCE])
            for row in await s.scalars(select(BroughtRow).where(some, BroughtRow.dedup == dedup)):
                if (row.tenant, row.name) in names:
                    found[row.tenant, row.name] = list(row.contents)
        return found

    async def forget(self, before: float) -> None:
        """Drop older entries."""
        async with self.database.writing() as s:
            await s.execute(delete(BroughtRow).where(BroughtRow.at < before))
