"""Contents that a tenant's last run of a model shared.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "brought",
        sa.Column("tenant", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(256), primary_key=True),
        sa.Column("dedup", sa.String(16), primary_key=True),
        sa.Column("contents", sa.JSON, nullable=False),
        sa.Column("at", sa.Float, nullable=False, index=True),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("brought")
