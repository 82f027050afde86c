"""The database: connections, schema, and the lock that allows one writer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url, text
from wooly_bus import postgresql

#: Key of PostgreSQL's advisory lock for migrations and all writes ("credit" in ASCII).
WRITE_LOCK = 0x637265646974
#: Errors of transactions while the database does not answer, and what callers are told then.
UNREACHABLE = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
DATABASE_AWAY = "metering.database"
DATABASE_AWAY_TEXT = "the ledger's database does not answer; see metering's log, and try again"
#: Seconds that a writer waits for another writer (SQLite allows one at a time).
BUSY_S = 30.0


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[1] / "migrations"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def migrate(url: str, revision: str = "head") -> None:
    """Migrate the database at `url` to a schema, by default the newest. Several processes may do so at the same time."""
    command.upgrade(_config(url), revision)


def revert(url: str, revision: str) -> None:
    """Migrate the database at `url` back to an earlier schema."""
    command.downgrade(_config(url), revision)


def connect(url: str, begin: str = "BEGIN IMMEDIATE", *, durable: bool = True) -> Engine:
    """A pool of connections.

    Args:
        url: SQLAlchemy URL.
        begin: statement that begins a transaction on SQLite, unless the execution option `wooly_begin` says otherwise.
        durable: whether commits on SQLite wait for the disk.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, connect_args=postgresql.options(parsed.query))
    engine = create_engine(url, connect_args={"timeout": BUSY_S})

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("wooly_begin", begin))

    def connected(connection: Any, _: Any) -> None:
        _tune_sqlite(connection, "FULL" if durable else "OFF")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


class Database:
    """A pool of connections, usable from any thread.

    Args:
        url: SQLAlchemy URL (`sqlite:///…`, `postgresql+psycopg://…`).
        durable: whether commits on SQLite wait for the disk.
    """

    def __init__(self, url: str, *, durable: bool = True) -> None:
        self._engine = connect(url, "BEGIN", durable=durable)
        self.sqlite = self._engine.dialect.name == "sqlite"
        self._writer = self._engine.execution_options(wooly_begin="BEGIN IMMEDIATE")

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only transaction that sees one state of the database."""
        isolation: dict[str, Any] = {} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        with self._engine.connect().execution_options(**isolation) as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A writing transaction: committed at the end of the block, rolled back if the block raises. Only one runs at a time,
        in all processes.
        """
        with self._writer.begin() as connection:
            if not self.sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITE_LOCK})
            yield connection

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def _tune_sqlite(connection: Any, synchronous: str) -> None:
    """Configure a connection. Transactions begin at explicit statements, not at the first write."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA synchronous={synchronous}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
