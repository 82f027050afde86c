"""The tables. Times are microseconds since 1970, amounts are micro-credits, quantities are as in `wooly_wis.credits.UsageRecord`.

Entries and statements are only added: triggers refuse changes.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from wooly_metering.core.booking import SUMS

metadata = MetaData()


def _big(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


#: Sources of usage: a process of an executor, or a request for a correction. `batch`: the last booked batch.
sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", String(192), nullable=False, unique=True),
    _big("batch"),
)

#: The booked position in each stream. `created` distinguishes streams of the same name.
positions = Table(
    "positions",
    metadata,
    Column("stream", String(64), primary_key=True),
    Column("created", String(64), nullable=False),
    _big("sequence"),
)

plans = Table(
    "plans",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", String(128), nullable=False, unique=True),
    Column("device_kind", String(64), nullable=False),
    Column("priority", SmallInteger, nullable=True),
    _big("valid_from_us"),
    Column("valid_until_us", BigInteger, nullable=True),
    _big("core_rate"),
    _big("vram_rate"),
    _big("idle_rate"),
)

entries = Table(
    "entries",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("source_id", Integer, ForeignKey("sources.id"), nullable=False),
    _big("batch"),
    Column("item", Integer, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    Column("corrects", BigInteger, nullable=True),
    Column("tenant", String(128), nullable=False),
    Column("session_id", String(64), nullable=False),
    Column("executor_id", String(128), nullable=False),
    Column("model", String(256), nullable=False),
    Column("device_kind", String(64), nullable=False),
    Column("priority", SmallInteger, nullable=False),
    *[
        _big(name)
        for name in (
            "begin_us",
            "end_us",
            "runs",
            "gpu_ns",
            "core_ns",
            "pace_ppm",
            "moved_bytes",
            "flops",
            "resident_mib_us",
            "idle_mib_us",
        )
    ],
    Column("part", SmallInteger, nullable=False, server_default="0"),
    Column("epoch", Integer, nullable=False, server_default="0"),
    Column("repeated_core_ns", BigInteger, nullable=False, server_default="0"),
    Column("unsaved_core_ns", BigInteger, nullable=True),
    Column("plan_id", Integer, nullable=False),
    _big("core_ucr"),
    _big("vram_ucr"),
    Column("reason", String(1024), nullable=False),
    # Makes sure that each event has one entry, even if the event is delivered several times.
    UniqueConstraint("source_id", "batch", "item"),
    Index("ix_entries_session", "session_id", "id"),
    Index("ix_entries_tenant", "tenant", "id"),
)

runs = Table(
    "runs",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("executor_id", String(128), primary_key=True),
    Column("tenant", String(128), nullable=False),
    Column("model", String(256), nullable=False),
    _big("began_us"),
    _big("until_us"),
    Column("ended", Boolean, nullable=False),
    *[_big(name) for name in SUMS],
    Index("ix_runs_tenant", "tenant", "began_us"),
    Index("ix_runs_began", "began_us"),
    Index("ix_runs_ended", "ended"),
)

#: Usage that was booked from a journal before its usage records arrived. Late records of the same process are booked less this
#: usage. Process "": records of all processes.
ahead = Table(
    "ahead",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("executor_id", String(128), primary_key=True),
    Column("process", String(192), primary_key=True, server_default=""),
    _big("gpu_ns"),
    _big("core_ns"),
    _big("at_us"),
    Index("ix_ahead_at", "at_us"),
)

#: Repeated work that was billed, because the ledger had no entry of the lost work yet. When that usage arrives, it is free.
paid_repeats = Table(
    "paid_repeats",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("part", SmallInteger, primary_key=True, autoincrement=False),
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    _big("core_ns"),
    _big("at_us"),
    Index("ix_paid_repeats_at", "at_us"),
)

hours = Table(
    "hours",
    metadata,
    Column("tenant", String(128), primary_key=True),
    Column("hour_us", BigInteger, primary_key=True, autoincrement=False),
    Column("model", String(256), primary_key=True),
    Column("device_kind", String(64), primary_key=True),
    Column("priority", SmallInteger, primary_key=True, autoincrement=False),
    *[_big(name) for name in SUMS],
    Index("ix_hours_hour", "hour_us"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("tenant", String(128), primary_key=True),
    Column("period", String(16), nullable=False),
    Column("soft_ucr", BigInteger, nullable=True),
    Column("hard_ucr", BigInteger, nullable=True),
)

statements = Table(
    "statements",
    metadata,
    Column("tenant", String(128), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    _big("first_entry"),
    _big("last_entry"),
    _big("made_us"),
    Column("body", Text, nullable=False),
    Column("digest", String(64), nullable=False),
)

quarantine = Table(
    "quarantine",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    _big("sequence"),
    Column("source", String(192), nullable=False),
    _big("batch"),
    Column("item", Integer, nullable=False),
    _big("at_us"),
    Column("reason", String(1024), nullable=False),
    Column("payload", Text, nullable=False),
)
