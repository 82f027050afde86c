"""Ceilings of tenants: highest class, largest weight, exclusive devices.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
COLUMNS = (("class_ceiling", sa.Integer), ("weight_ceiling", sa.Integer), ("exclusive", sa.Boolean))


def upgrade() -> None:
    """Add the columns. At first, every tenant has the installation's defaults."""
    for name, kind in COLUMNS:
        op.add_column("tenants", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("tenants") as table:
        for name, _ in COLUMNS:
            table.drop_column(name)
