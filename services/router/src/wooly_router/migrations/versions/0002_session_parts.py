"""Sessions on several executors: a row per device.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Move each session's executor to a row of its own."""
    op.create_table(
        "session_parts",
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("executor_id", sa.String(128), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
    )
    op.create_index("ix_session_parts_executor_id", "session_parts", ["executor_id"])
    op.execute(
        "INSERT INTO session_parts (session_id, position, executor_id, node) SELECT id, 0, executor_id, node FROM sessions"
    )
    with op.batch_alter_table("sessions") as table:
        table.drop_index("ix_sessions_executor_id")
        table.drop_column("executor_id")
        table.drop_column("node")


def downgrade() -> None:
    """Keep the first device of each session."""
    with op.batch_alter_table("sessions") as table:
        table.add_column(sa.Column("executor_id", sa.String(128), nullable=False, server_default=""))
        table.add_column(sa.Column("node", sa.String(255), nullable=False, server_default=""))
        table.create_index("ix_sessions_executor_id", ["executor_id"])
    for column in ("executor_id", "node"):
        first = f"SELECT p.{column} FROM session_parts p WHERE p.session_id = sessions.id AND p.position = 0"
        op.execute(f"UPDATE sessions SET {column} = ({first})")
    op.drop_table("session_parts")
