"""Add the table of repeated work that was billed before the usage of the lost work arrived.

Revision ID: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table. It is empty: nothing is known about earlier repetitions."""
    op.create_table(
        "paid_repeats",
        sa.Column("session_id", sa.String(64), primary_key=True),
        sa.Column("part", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("core_ns", sa.BigInteger, nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_paid_repeats_at", "paid_repeats", ["at_us"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("paid_repeats")
