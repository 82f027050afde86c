"""Open sessions.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("executor_id", sa.String(128), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("token", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("gpu_mode", sa.String(16), nullable=False),
        sa.Column("required_vram", sa.BigInteger, nullable=True),
        sa.Column("program", sa.String(1024), nullable=False),
        sa.Column("client_host", sa.String(255), nullable=False),
        sa.Column("opened_at", sa.Float, nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
    )
    for column in ("executor_id", "tenant", "lease_until"):
        op.create_index(f"ix_sessions_{column}", "sessions", [column])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("sessions")
