"""Sessions in the database, so that a restarted router still knows them. SQLite embedded, PostgreSQL in production."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import BigInteger, Float, Integer, String, delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Declarative base of the router's tables."""


class SessionRow(Base):
    """One open session. Times are seconds since the epoch."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    executor_id: Mapped[str] = mapped_column(String(128), index=True)
    node: Mapped[str] = mapped_column(String(255))
    token: Mapped[str] = mapped_column(String(128))
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    priority: Mapped[int] = mapped_column(Integer)
    gpu_mode: Mapped[str] = mapped_column(String(16))
    required_vram: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    program: Mapped[str] = mapped_column(String(1024))
    client_host: Mapped[str] = mapped_column(String(255))
    opened_at: Mapped[float] = mapped_column(Float)
    lease_until: Mapped[float] = mapped_column(Float, index=True)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A row, detached from the database."""

    id: str
    executor_id: str
    node: str
    token: str
    tenant: str
    priority: int
    gpu_mode: str
    required_vram: int | None
    program: str
    client_host: str
    opened_at: float
    lease_until: float


def migrate(url: str) -> None:
    """Bring the database at `url` to the newest schema (blocking)."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    command.upgrade(config, "head")


class SessionStore:
    """The table of open sessions.

    Args:
        url: an async SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`).
    """

    def __init__(self, url: str) -> None:
        self._engine: AsyncEngine = create_async_engine(url)
        self._session = async_sessionmaker(self._engine, expire_on_commit=False)

    async def add(self, record: SessionRecord) -> None:
        """Remember a session."""
        async with self._session.begin() as db:
            db.add(SessionRow(**{f: getattr(record, f) for f in SessionRecord.__slots__}))

    async def get(self, session_id: str) -> SessionRecord | None:
        """One session, if it is open."""
        async with self._session() as db:
            row = await db.get(SessionRow, session_id)
            return None if row is None else _record(row)

    async def all(self) -> list[SessionRecord]:
        """All open sessions, oldest first."""
        async with self._session() as db:
            rows = await db.scalars(select(SessionRow).order_by(SessionRow.opened_at, SessionRow.id))
            return [_record(r) for r in rows]

    async def prolong(self, session_id: str, until: float) -> None:
        """Move a session's lease."""
        async with self._session.begin() as db:
            await db.execute(update(SessionRow).where(SessionRow.id == session_id).values(lease_until=until))

    async def remove(self, session_id: str) -> bool:
        """Forget a session. False if it was not there."""
        async with self._session.begin() as db:
            row = await db.get(SessionRow, session_id)
            if row is None:
                return False
            await db.execute(delete(SessionRow).where(SessionRow.id == session_id))
            return True

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()


def _record(row: SessionRow) -> SessionRecord:
    return SessionRecord(**{f: getattr(row, f) for f in SessionRecord.__slots__})
