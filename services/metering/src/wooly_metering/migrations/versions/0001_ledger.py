"""The first schema of the ledger: entries that never change, their sums, budgets, plans, statements, quarantine.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_FINAL = ("entries", "statements")


def _big(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def _sums() -> list[sa.Column[int]]:
    names = (
        "runs",
        "gpu_ns",
        "core_ns",
        "moved_bytes",
        "flops",
        "resident_mib_us",
        "idle_mib_us",
        "core_ucr",
        "vram_ucr",
    )
    return _big("entries", *names)


def upgrade() -> None:
    """Create the tables, and triggers that refuse changes of entries and statements."""
    op.create_table(
        "sources",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(192), nullable=False, unique=True),
        *_big("batch"),
    )
    op.create_table(
        "positions",
        sa.Column("stream", sa.String(64), primary_key=True),
        sa.Column("created", sa.String(64), nullable=False),
        *_big("sequence"),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("device_kind", sa.String(64), nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=True),
        *_big("valid_from_us"),
        sa.Column("valid_until_us", sa.BigInteger, nullable=True),
        *_big("core_rate", "vram_rate", "idle_rate"),
    )
    op.create_table(
        "entries",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("source_id", sa.Integer, sa.ForeignKey("sources.id"), nullable=False),
        *_big("batch"),
        sa.Column("item", sa.Integer, nullable=False),
        sa.Column("kind", sa.SmallInteger, nullable=False),
        sa.Column("corrects", sa.BigInteger, nullable=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("executor_id", sa.String(128), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("device_kind", sa.String(64), nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        *_big(
            "begin_us", "end_us", "runs", "gpu_ns", "core_ns", "moved_bytes", "flops", "resident_mib_us", "idle_mib_us"
        ),
        sa.Column("plan_id", sa.Integer, nullable=False),
        *_big("core_ucr", "vram_ucr"),
        sa.Column("reason", sa.String(1024), nullable=False),
        sa.UniqueConstraint("source_id", "batch", "item"),
    )
    op.create_index("ix_entries_session", "entries", ["session_id", "id"])
    op.create_index("ix_entries_tenant", "entries", ["tenant", "id"])
    op.create_table(
        "runs",
        sa.Column("session_id", sa.String(64), primary_key=True),
        sa.Column("executor_id", sa.String(128), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        *_big("began_us", "until_us"),
        sa.Column("ended", sa.Boolean, nullable=False),
        *_sums(),
    )
    op.create_index("ix_runs_tenant", "runs", ["tenant", "began_us"])
    op.create_index("ix_runs_began", "runs", ["began_us"])
    op.create_index("ix_runs_ended", "runs", ["ended"])
    op.create_table(
        "hours",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("hour_us", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("device_kind", sa.String(64), primary_key=True),
        sa.Column("priority", sa.SmallInteger, primary_key=True, autoincrement=False),
        *_sums(),
    )
    op.create_index("ix_hours_hour", "hours", ["hour_us"])
    op.create_table(
        "budgets",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("period", sa.String(16), nullable=False),
        sa.Column("soft_ucr", sa.BigInteger, nullable=True),
        sa.Column("hard_ucr", sa.BigInteger, nullable=True),
    )
    op.create_table(
        "statements",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        *_big("first_entry", "last_entry", "made_us"),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
    )
    op.create_table(
        "quarantine",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        *_big("sequence"),
        sa.Column("source", sa.String(192), nullable=False),
        *_big("batch"),
        sa.Column("item", sa.Integer, nullable=False),
        *_big("at_us"),
        sa.Column("reason", sa.String(1024), nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION wooly_final() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION '% is never changed: add a counter-entry', TG_TABLE_NAME; END $$"
        )
        for table in _FINAL:
            op.execute(
                f"CREATE TRIGGER {table}_final BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION wooly_final()"
            )
    else:
        for table in _FINAL:
            for verb in ("UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is never changed: add a counter-entry'); END"
                )


def downgrade() -> None:
    """Drop all tables and triggers."""
    postgres = op.get_bind().dialect.name == "postgresql"
    for table in _FINAL:
        for name in (f"{table}_final",) if postgres else (f"{table}_no_update", f"{table}_no_delete"):
            op.execute(f"DROP TRIGGER {name}" + (f" ON {table}" if postgres else ""))
    if postgres:
        op.execute("DROP FUNCTION wooly_final()")
    for table in ("quarantine", "statements", "budgets", "hours", "runs", "entries", "plans", "positions", "sources"):
        op.drop_table(table)
