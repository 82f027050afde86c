"""Recent traces: the owner, the tasks and the spans of each.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "traces",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(128), nullable=False, index=True),
        sa.Column("task_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(1024), nullable=False),
        sa.Column("begun_at", sa.Float, nullable=False, index=True),
        sa.Column("start_ns", sa.BigInteger, nullable=False),
        sa.Column("end_ns", sa.BigInteger, nullable=False),
        sa.Column("spans", sa.Integer, nullable=False),
        sa.Column("error", sa.Boolean, nullable=False),
    )
    op.create_table(
        "trace_tasks",
        sa.Column("task_id", sa.String(64), primary_key=True),
        sa.Column("trace_id", sa.String(32), sa.ForeignKey("traces.id"), nullable=False, index=True),
    )
    op.create_table(
        "spans",
        sa.Column("trace_id", sa.String(32), sa.ForeignKey("traces.id"), primary_key=True),
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("parent_id", sa.String(16), nullable=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("service", sa.String(64), nullable=False),
        sa.Column("start_ns", sa.BigInteger, nullable=False),
        sa.Column("end_ns", sa.BigInteger, nullable=False),
        sa.Column("error", sa.Boolean, nullable=False),
        sa.Column("attributes", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    """Drop the tables with all traces."""
    for name in ("spans", "trace_tasks", "traces"):
        op.drop_table(name)
