"""Alembic's entry: runs migrations on the URL that the caller configured, through a synchronous engine."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, make_url, text
from wooly_router.state.database import PLACEMENT_LOCK
from wooly_router.state.tables import Base


def run() -> None:
    """Migrate. Routers that start together on PostgreSQL take turns; SQLite's file has a lock of its own."""
    url = make_url(context.config.get_main_option("sqlalchemy.url") or "")
    if url.drivername == "sqlite+aiosqlite":
        url = url.set(drivername="sqlite")
    engine = create_engine(url)
    with engine.connect() as connection:
        if url.get_backend_name() == "sqlite":  # kept in the file: readers do not wait for the writer
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.commit()
        context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
        with context.begin_transaction():
            if url.get_backend_name() == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PLACEMENT_LOCK})
            context.run_migrations()
    engine.dispose()


run()
