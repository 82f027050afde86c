"""Alembic's entry point: runs migrations on the caller's URL, through a synchronous engine."""

from __future__ import annotations

from typing import Any

from alembic import context
from sqlalchemy import Connection, create_engine, event, make_url, text
from wooly_bus import postgresql
from wooly_router.state.database import BUSY_S, PLACEMENT_LOCK
from wooly_router.state.tables import Base


def run() -> None:
    """Migrate in one transaction, so that a killed process leaves the old schema. Routers that start together take turns."""
    url = make_url(context.config.get_main_option("sqlalchemy.url") or "")
    if url.drivername == "sqlite+aiosqlite":
        url = url.set(drivername="sqlite")
    sqlite = url.get_backend_name() == "sqlite"
    engine = create_engine(url, connect_args={"timeout": BUSY_S} if sqlite else postgresql.options(url.query))
    if sqlite:
        event.listen(engine, "connect", _leave_transactions_to_us)
        event.listen(engine, "begin", _begin)
    with engine.connect() as connection:
        context.configure(
            connection=connection, target_metadata=Base.metadata, render_as_batch=True, transactional_ddl=True
        )
        with context.begin_transaction():
            if not sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PLACEMENT_LOCK})
            context.run_migrations()
    engine.dispose()


def _leave_transactions_to_us(connection: Any, _: Any) -> None:
    """Turn off the driver's own transactions: Python's driver would begin one at the first row, after changes of the schema."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")  # kept in the file: readers do not wait for the writer


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


run()
