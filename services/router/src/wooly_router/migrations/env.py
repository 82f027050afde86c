"""Alembic's entry: runs migrations on the URL that the caller configured, through a synchronous engine."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, make_url
from wooly_router.store import Base


def run() -> None:
    """Migrate."""
    url = make_url(context.config.get_main_option("sqlalchemy.url") or "")
    if url.drivername == "sqlite+aiosqlite":
        url = url.set(drivername="sqlite")
    engine = create_engine(url)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
