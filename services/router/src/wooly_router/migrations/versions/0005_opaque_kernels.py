"""Permission of a tenant to launch kernels that executors cannot check.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. At first, no tenant has the permission."""
    op.add_column("tenants", sa.Column("opaque_kernels", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("tenants") as table:
        table.drop_column("opaque_kernels")
