"""Entries know how fast the device's cores were.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """What is booked was priced in full."""
    op.add_column("entries", sa.Column("pace_ppm", sa.BigInteger, nullable=False, server_default="1000000"))


def downgrade() -> None:
    """Forget it."""
    op.drop_column("entries", "pace_ppm")
