"""The database connection: migrations, and three kinds of transactions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, exc, make_url, text
from sqlalchemy.dialects import postgresql as dialect
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import QueuePool
from wooly_bus import postgresql
from wooly_bus.limited_log import LimitedLog, first_line

from wooly_router.python_private import worker_of

#: Key of PostgreSQL's advisory lock for transactions that read all claims before they add one (the bytes of "wooly").
PLACEMENT_LOCK = 0x776F6F6C79
#: The INSERT constructs with ON CONFLICT. SQLAlchemy has no common type for them.
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": dialect.insert}
#: Errors of transactions while the database does not answer, and what callers are told then.
UNREACHABLE = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
DATABASE_AWAY = "router.database"
DATABASE_AWAY_TEXT = "the controller's database does not answer; see the router's log"
#: What `log_away` has told lately.
_away = LimitedLog(logging.getLogger("wooly.router"), "lines said that the database does not answer", lines=1)
#: Seconds that a writer waits for another writer (SQLite allows one at a time).
BUSY_S = 30.0
#: Seconds that closing waits for transactions in progress, and for operations of SQLite whose callers were cancelled; and seconds
#: between two looks.
LAST_OPERATION_S, LOOK_S = 5.0, 0.01


def log_away(what: str, error: Exception) -> None:
    """Log that the database does not answer, in one line in ten seconds: each request and each round meets it.

    Args:
        what: what fails because of it.
        error: the error.
    """
    _away.warning(f"{what}, because the database does not answer: {first_line(error)}")


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[1] / "migrations"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def migrate(url: str, revision: str = "head") -> None:
    """Migrate the database at `url` to a schema, by default the newest (blocking).

    Several routers may call this at the same time.
    """
    command.upgrade(_config(url), revision)


def revert(url: str, revision: str) -> None:
    """Migrate the database at `url` back to an earlier schema (blocking)."""
    command.downgrade(_config(url), revision)


class Database:
    """A pool of connections.

    Args:
        url: an async SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`).
        durable: whether an SQLite commit waits for the disk, so that acknowledged data survives a power cut.
    """

    def __init__(self, url: str, *, durable: bool = True) -> None:
        self._sqlite = make_url(url).get_backend_name() == "sqlite"
        #: The threads in which SQLite's operations run, one per connection.
        self._workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": postgresql.options(make_url(url).query)}
        if self._sqlite:
            options = {"connect_args": {"timeout": BUSY_S, "async_creator_fn": self._connect_sqlite}}
        self._engine: AsyncEngine = create_async_engine(url, **options)
        if self._sqlite:

            def connected(connection: Any, _: Any) -> None:
                _tune_sqlite(connection, "FULL" if durable else "OFF")

            event.listen(self._engine.sync_engine, "connect", connected)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
        # A writer waits for its turn before it takes a connection, so that waiting writers leave connections for readers.
        self._turn, self._decision = asyncio.Lock(), asyncio.Lock()
        self._reading = async_sessionmaker(self._engine, expire_on_commit=False)
        writer = self._engine.execution_options(wooly_begin="BEGIN IMMEDIATE")
        self._writing = async_sessionmaker(writer, expire_on_commit=False)

    def _connect_sqlite(self, *args: Any, **options: Any) -> aiosqlite.Connection:
        connection = aiosqlite.connect(*args, **options)
        worker = worker_of(connection)
        worker.daemon = True  # as SQLAlchemy does for the connections that it makes
        self._workers.add(worker)
        return connection

    def reading(self) -> AsyncSession:
        """Begin a transaction that changes nothing: `async with db.reading() as s`."""
        return self._reading()

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """Begin a transaction that is committed at the end of the block, or rolled back if the block raises."""
        async with self._turn if self._sqlite else contextlib.nullcontext(), self._writing.begin() as session:
            yield session

    @contextlib.asynccontextmanager
    async def deciding(self) -> AsyncIterator[AsyncSession]:
        """Begin a writing transaction. All routers together have one such transaction at a time.

        So everything that it reads stays true until its commit.
        """
        async with self._turn if self._sqlite else self._decision, self._writing.begin() as session:
            if not self._sqlite:
                await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PLACEMENT_LOCK})
            yield session

    async def close(self) -> None:
        """Close the connections, when the transactions in progress have ended: a connection that comes back later stays open.

        An operation of SQLite whose caller was cancelled goes on in its thread and reports to this event loop. This waits for it,
        too.
        """
        loop, pool = asyncio.get_running_loop(), self._engine.pool
        deadline = loop.time() + LAST_OPERATION_S
        while isinstance(pool, QueuePool) and pool.checkedout() and loop.time() < deadline:
            await asyncio.sleep(LOOK_S)
        await self._engine.dispose()
        for worker in tuple(self._workers):
            await asyncio.to_thread(worker.join, max(0.0, deadline - loop.time()))


def _tune_sqlite(connection: Any, synchronous: str) -> None:
    """Turn off the driver's own transactions: they begin in `_begin_sqlite`, not at the first write."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA synchronous={synchronous}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("wooly_begin", "BEGIN"))


def insert_of(s: AsyncSession, table: Any) -> Any:
    """Return an INSERT with ON CONFLICT for the session's kind of database."""
    return _INSERT[s.get_bind().dialect.name](table)
