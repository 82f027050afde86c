"""Add the speed of the device's cores to entries.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column. Existing entries were priced at full speed."""
    op.add_column("entries", sa.Column("pace_ppm", sa.BigInteger, nullable=False, server_default="1000000"))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("entries", "pace_ppm")
