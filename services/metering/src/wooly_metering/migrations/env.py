"""Alembic's entry point: runs migrations on the URL that the caller configured."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text
from wooly_metering.ledger.database import WRITE_LOCK, connect
from wooly_metering.ledger.tables import metadata


def run() -> None:
    """Migrate in one transaction. A killed process leaves the old schema. Processes that start at the same time take turns."""
    url = context.config.get_main_option("sqlalchemy.url") or ""
    engine = connect(url)
    if engine.dialect.name == "sqlite":  # the database file keeps this setting: readers do not wait for the writer
        raw = engine.raw_connection()
        raw.cursor().execute("PRAGMA journal_mode=WAL")
        raw.close()
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True)
        with context.begin_transaction():
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITE_LOCK})
            context.run_migrations()
    engine.dispose()


run()
