"""Alembic's entry: runs migrations on the URL that the caller configured."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text
from wooly_metering.ledger.database import WRITE_LOCK, connect
from wooly_metering.ledger.tables import metadata


def run() -> None:
    """Migrate in one transaction: who is killed in it leaves the schema of before. Processes that start together take turns."""
    url = context.config.get_main_option("sqlalchemy.url") or ""
    engine = connect(url)
    if engine.dialect.name == "sqlite":  # kept in the file: readers do not wait for the writer
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
