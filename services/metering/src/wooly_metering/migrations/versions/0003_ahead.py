"""Add a table of usage that was booked from journals, for runs whose last usage records are late or lost.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table, empty."""
    op.create_table(
        "ahead",
        sa.Column("session_id", sa.String(64), primary_key=True),
        sa.Column("executor_id", sa.String(128), primary_key=True),
        sa.Column("gpu_ns", sa.BigInteger, nullable=False),
        sa.Column("core_ns", sa.BigInteger, nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_ahead_at", "ahead", ["at_us"])


def downgrade() -> None:
    """Drop the table. Late usage records are then booked in full."""
    op.drop_table("ahead")
