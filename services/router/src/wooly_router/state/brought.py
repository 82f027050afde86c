"""What runs bring with them: which contents the last run of the same thing shared, so that placement can look where they lie.

It is a guess about a run that has not begun: who brings other contents this time is placed no worse than by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete

from wooly_router.state.database import Database, insert_of
from wooly_router.state.tables import BroughtRow


class BroughtStore:
    """By tenant, what ran (a session's model or a job's module), and with whom it shared: nobody learns of others' contents."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def remember(self, tenant: str, name: str, dedup: str, contents: Sequence[str], at: float) -> None:
        """A run ended that shared these contents, largest first; what an earlier one shared is forgotten."""
        values = {"contents": list(contents), "at": at}
        async with self.database.writing() as s:
            added = insert_of(s, BroughtRow).values(tenant=tenant, name=name, dedup=dedup, **values)
            await s.execute(added.on_conflict_do_update(index_elements=["tenant", "name", "dedup"], set_=values))

    async def of(self, tenant: str, name: str, dedup: str) -> list[str]:
        """What the last such run shared; nothing where there was none."""
        async with self.database.reading() as s:
            row = await s.get(BroughtRow, (tenant, name, dedup))
            return [] if row is None else list(row.contents)

    async def forget(self, before: float) -> None:
        """Drop what is older."""
        async with self.database.writing() as s:
            await s.execute(delete(BroughtRow).where(BroughtRow.at < before))
