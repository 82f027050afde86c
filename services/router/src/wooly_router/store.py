"""Sessions in the database, so that a restarted router still knows them. SQLite embedded, PostgreSQL in production."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Float,
    ForeignKey,
    Integer,
    String,
    delete,
    event,
    make_url,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from wooly_router.core.placement import Claim


class Base(DeclarativeBase):
    """Declarative base of the router's tables."""


class SessionRow(Base):
    """One open session. Times are seconds since the epoch."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    token: Mapped[str] = mapped_column(String(128))
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    priority: Mapped[int] = mapped_column(Integer)
    gpu_mode: Mapped[str] = mapped_column(String(16))
    required_vram: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    program: Mapped[str] = mapped_column(String(1024))
    client_host: Mapped[str] = mapped_column(String(255))
    opened_at: Mapped[float] = mapped_column(Float)
    lease_until: Mapped[float] = mapped_column(Float, index=True)
    parts: Mapped[list[PartRow]] = relationship(
        order_by="PartRow.position", cascade="all, delete-orphan", lazy="selectin"
    )


class PartRow(Base):
    """One device of an open session: `position` is its index there."""

    __tablename__ = "session_parts"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    executor_id: Mapped[str] = mapped_column(String(128), index=True)
    node: Mapped[str] = mapped_column(String(255))


@dataclass(frozen=True, slots=True)
class PartRecord:
    """Who serves one device of a session."""

    executor_id: str
    node: str


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session, detached from the database; its parts are its devices, in order."""

    id: str
    parts: tuple[PartRecord, ...]
    token: str
    tenant: str
    priority: int
    gpu_mode: str
    required_vram: int | None
    program: str
    client_host: str
    opened_at: float
    lease_until: float

    def claims(self) -> list[Claim]:
        """What the session takes of each of its executors."""
        return [Claim(p.executor_id, self.required_vram, self.gpu_mode == "exclusive") for p in self.parts]


def migrate(url: str, revision: str = "head") -> None:
    """Bring the database at `url` to a schema, the newest by default (blocking)."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    command.upgrade(config, revision)


class SessionStore:
    """The table of open sessions.

    Args:
        url: an async SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`).
    """

    def __init__(self, url: str) -> None:
        self._engine: AsyncEngine = create_async_engine(url)
        if make_url(url).get_backend_name() == "sqlite":
            event.listen(self._engine.sync_engine, "connect", _tune_sqlite)
        self._session = async_sessionmaker(self._engine, expire_on_commit=False)

    async def add(self, record: SessionRecord) -> None:
        """Remember a session."""
        async with self._session.begin() as db:
            parts = [PartRow(position=i, executor_id=p.executor_id, node=p.node) for i, p in enumerate(record.parts)]
            db.add(SessionRow(parts=parts, **{f: getattr(record, f) for f in _OWN_COLUMNS}))

    async def get(self, session_id: str) -> SessionRecord | None:
        """One session, if it is open."""
        async with self._session() as db:
            row = await db.get(SessionRow, session_id)
            return None if row is None else _record(row)

    async def all(self) -> list[SessionRecord]:
        """All open sessions, oldest first."""
        return await self._where()

    async def on_executor(self, executor_id: str) -> list[SessionRecord]:
        """The open sessions that have a device on one executor, oldest first."""
        return await self._where(SessionRow.parts.any(PartRow.executor_id == executor_id))

    async def lapsed(self, now: float) -> list[SessionRecord]:
        """The sessions whose lease is over, oldest first."""
        return await self._where(SessionRow.lease_until < now)

    async def _where(self, *conditions: ColumnElement[bool]) -> list[SessionRecord]:
        query = select(SessionRow).where(*conditions).order_by(SessionRow.opened_at, SessionRow.id)
        async with self._session() as db:
            return [_record(r) for r in await db.scalars(query)]

    async def prolong(self, session_id: str, until: float) -> None:
        """Move a session's lease."""
        async with self._session.begin() as db:
            await db.execute(update(SessionRow).where(SessionRow.id == session_id).values(lease_until=until))

    async def prolong_all(self, until: float) -> None:
        """Move every lease that would end before `until`."""
        async with self._session.begin() as db:
            await db.execute(update(SessionRow).where(SessionRow.lease_until < until).values(lease_until=until))

    async def remove(self, session_id: str) -> bool:
        """Forget a session. False if it is not there (any more)."""
        async with self._session.begin() as db:
            await db.execute(delete(PartRow).where(PartRow.session_id == session_id))
            gone = await db.execute(delete(SessionRow).where(SessionRow.id == session_id).returning(SessionRow.id))
            return gone.first() is not None

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()


def _tune_sqlite(connection: Any, _: Any) -> None:
    """A write costs no wait for the disk: after a power cut no session is left that would need its row."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


_OWN_COLUMNS = [f for f in SessionRecord.__slots__ if f != "parts"]


def _record(row: SessionRow) -> SessionRecord:
    parts = tuple([PartRecord(p.executor_id, p.node) for p in row.parts])
    return SessionRecord(parts=parts, **{f: getattr(row, f) for f in _OWN_COLUMNS})
