"""The connection to the database: migrations, and three kinds of transaction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

#: The key of PostgreSQL's advisory lock around decisions that read all claims before they add one ("wooly").
PLACEMENT_LOCK = 0x776F6F6C79
#: Both have ON CONFLICT, and no type in common that says so.
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
#: Seconds that a writer waits for another one (SQLite has one at a time).
BUSY_S = 30.0


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[1] / "migrations"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def migrate(url: str, revision: str = "head") -> None:
    """Bring the database at `url` up to a schema, the newest by default (blocking). Several routers may do so at once."""
    command.upgrade(_config(url), revision)


def revert(url: str, revision: str) -> None:
    """Bring the database at `url` back to an earlier schema (blocking)."""
    command.downgrade(_config(url), revision)


class Database:
    """A pool of connections.

    Args:
        url: an async SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`).
        durable: whether a commit waits for SQLite's disk: what was acknowledged survives a power cut.
    """

    def __init__(self, url: str, *, durable: bool = True) -> None:
        self._sqlite = make_url(url).get_backend_name() == "sqlite"
        options: dict[str, Any] = {"connect_args": {"timeout": BUSY_S}} if self._sqlite else {"pool_pre_ping": True}
        self._engine: AsyncEngine = create_async_engine(url, **options)
        if self._sqlite:

            def connected(connection: Any, _: Any) -> None:
                _tune_sqlite(connection, "FULL" if durable else "OFF")

            event.listen(self._engine.sync_engine, "connect", connected)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
        # Who waits for another writer must not keep a connection meanwhile: readers would find none left.
        self._turn, self._decision = asyncio.Lock(), asyncio.Lock()
        self._reading = async_sessionmaker(self._engine, expire_on_commit=False)
        writer = self._engine.execution_options(wooly_begin="BEGIN IMMEDIATE")
        self._writing = async_sessionmaker(writer, expire_on_commit=False)

    def reading(self) -> AsyncSession:
        """A transaction that changes nothing: `async with db.reading() as s`."""
        return self._reading()

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A transaction that is committed at the end of the block, or undone where the block raises."""
        async with self._turn if self._sqlite else contextlib.nullcontext(), self._writing.begin() as session:
            yield session

    @contextlib.asynccontextmanager
    async def deciding(self) -> AsyncIterator[AsyncSession]:
        """`writing`, of which one is open at a time in all routers: what it reads stays true until it is committed."""
        async with self._turn if self._sqlite else self._decision, self._writing.begin() as session:
            if not self._sqlite:
                await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PLACEMENT_LOCK})
            yield session

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()


def _tune_sqlite(connection: Any, synchronous: str) -> None:
    """Transactions begin where we say (`_begin_sqlite`), not at the first write."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA synchronous={synchronous}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("wooly_begin", "BEGIN"))


def insert_of(s: AsyncSession, table: Any) -> Any:
    """An INSERT that has ON CONFLICT, of the kind of database that the session is on."""
    return _INSERT[s.get_bind().dialect.name](table)
