"""Add to entries what repeated work is billed by: device, attempt, the free part, and the work since the newest checkpoint.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns. All work of existing entries was billed."""
    op.add_column("entries", sa.Column("part", sa.SmallInteger, nullable=False, server_default="0"))
    op.add_column("entries", sa.Column("epoch", sa.Integer, nullable=False, server_default="0"))
    op.add_column("entries", sa.Column("repeated_core_ns", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("entries", sa.Column("unsaved_core_ns", sa.BigInteger, nullable=True))


def downgrade() -> None:
    """Drop the columns. Entries keep their prices."""
    for name in ("unsaved_core_ns", "repeated_core_ns", "epoch", "part"):
        op.drop_column("entries", name)
