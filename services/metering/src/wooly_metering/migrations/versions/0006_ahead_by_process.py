"""Usage that was booked from a journal belongs to one process of an executor.

Revision ID: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the process to the key. Existing rows apply to usage records of all processes, as before."""
    _recreate([sa.Column("process", sa.String(192), primary_key=True, server_default="")])


def downgrade() -> None:
    """Remove the process. Rows of named processes are lost: their late usage records are then booked in full."""
    op.execute(sa.text("DELETE FROM ahead WHERE process <> ''"))
    _recreate([])


def _recreate(more: list[sa.Column[str]]) -> None:
    """Create the table anew with its rows: not every database can change a primary key."""
    kept = ["session_id", "executor_id", "gpu_ns", "core_ns", "at_us"]
    rows = op.get_bind().execute(sa.text(f"SELECT {', '.join(kept)} FROM ahead")).mappings().all()
    op.drop_table("ahead")
    table = op.create_table(
        "ahead",
        sa.Column("session_id", sa.String(64), primary_key=True),
        sa.Column("executor_id", sa.String(128), primary_key=True),
        *more,
        sa.Column("gpu_ns", sa.BigInteger, nullable=False),
        sa.Column("core_ns", sa.BigInteger, nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_ahead_at", "ahead", ["at_us"])
    op.bulk_insert(table, [dict(row) for row in rows])
