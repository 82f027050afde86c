"""The controller: sessions become tasks with a story; nodes, devices, groups, tenants, tokens, config, audit, samples.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def _tables() -> dict[str, tuple[sa.schema.SchemaItem, ...]]:
    """Return the new tables except `tasks` and `task_parts`, in the order in which they can be created."""
    return {
        "leases": (
            sa.Column("task_id", sa.String(64), sa.ForeignKey("tasks.id"), primary_key=True),
            sa.Column("token", sa.String(128), nullable=False),
            sa.Column("lease_until", sa.Float, nullable=False, index=True),
        ),
        "task_events": (
            sa.Column("task_id", sa.String(64), sa.ForeignKey("tasks.id"), primary_key=True),
            sa.Column("number", sa.Integer, primary_key=True),
            sa.Column("at", sa.Float, nullable=False),
            sa.Column("state", sa.String(16), nullable=False),
            sa.Column("reason", sa.Text, nullable=False),
            sa.Column("told", sa.Boolean, nullable=False),
            sa.Index(
                "ix_task_events_untold", "at", sqlite_where=sa.text("NOT told"), postgresql_where=sa.text("NOT told")
            ),
        ),
        "nodes": (
            sa.Column("id", sa.String(255), primary_key=True),
            sa.Column("wish", sa.String(16), nullable=False),
            sa.Column("overcommit_vram_percent", sa.Integer, nullable=True),
            sa.Column("first_seen", sa.Float, nullable=False),
        ),
        "gpus": (
            sa.Column("executor_id", sa.String(128), primary_key=True),
            sa.Column("node_id", sa.String(255), sa.ForeignKey("nodes.id"), nullable=False, index=True),
            sa.Column("facts", sa.JSON, nullable=False),
            sa.Column("last_seen", sa.Float, nullable=False),
        ),
        "groups": (
            sa.Column("name", sa.String(128), primary_key=True),
            sa.Column("description", sa.String(1024), nullable=False),
            sa.Column("created_at", sa.Float, nullable=False),
        ),
        "group_members": (
            sa.Column("group_name", sa.String(128), sa.ForeignKey("groups.name"), primary_key=True),
            sa.Column("node_id", sa.String(255), primary_key=True, index=True),
        ),
        "tenants": (
            sa.Column("name", sa.String(128), primary_key=True),
            sa.Column("description", sa.String(1024), nullable=False),
            sa.Column("disabled", sa.Boolean, nullable=False),
            sa.Column("created_at", sa.Float, nullable=False),
        ),
        "tokens": (
            sa.Column("id", sa.String(32), primary_key=True),
            sa.Column("tenant", sa.String(128), sa.ForeignKey("tenants.name"), nullable=False, index=True),
            sa.Column("name", sa.String(128), nullable=False),
            sa.Column("role", sa.String(16), nullable=False),
            sa.Column("scopes", sa.JSON, nullable=False),
            sa.Column("secret_hash", sa.String(64), nullable=False),
            sa.Column("created_at", sa.Float, nullable=False),
            sa.Column("expires_at", sa.Float, nullable=True),
            sa.Column("revoked_at", sa.Float, nullable=True),
            sa.UniqueConstraint("secret_hash"),
        ),
        "config": (
            sa.Column("name", sa.String(64), primary_key=True),
            sa.Column("value", sa.JSON, nullable=False),
            sa.Column("updated_at", sa.Float, nullable=False),
            sa.Column("updated_by", sa.String(255), nullable=False),
        ),
        "audit": (
            sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
            sa.Column("at", sa.Float, nullable=False, index=True),
            sa.Column("actor", sa.String(255), nullable=False),
            sa.Column("tenant", sa.String(128), nullable=False, index=True),
            sa.Column("action", sa.String(64), nullable=False),
            sa.Column("target", sa.String(255), nullable=False),
            sa.Column("detail", sa.JSON, nullable=False),
        ),
        "samples": (
            sa.Column("at", sa.Float, primary_key=True),
            sa.Column("executor_id", sa.String(128), primary_key=True),
            sa.Column("node_id", sa.String(255), nullable=False),
            sa.Column("utilization", sa.Float, nullable=False),
            sa.Column("starvation", sa.Float, nullable=False),
            sa.Column("memory_used", sa.BigInteger, nullable=False),
            sa.Column("memory_total", sa.BigInteger, nullable=False),
            sa.Column("sessions", sa.Integer, nullable=False),
        ),
    }


def upgrade() -> None:
    """Create the tables; open sessions become started tasks."""
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False, index=True),
        sa.Column("name", sa.String(1024), nullable=False),
        sa.Column("client_host", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("gpu_mode", sa.String(16), nullable=False),
        sa.Column("required_vram", sa.BigInteger, nullable=True),
        sa.Column("noswap", sa.Boolean, nullable=False),
        sa.Column("wants", sa.JSON, nullable=False),
        sa.Column("spec", sa.JSON, nullable=True),
        sa.Column("outputs", sa.JSON, nullable=True),
        sa.Column("placement", sa.JSON, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float, nullable=True),
        sa.Column("ended_at", sa.Float, nullable=True),
        sa.Column("deadline_at", sa.Float, nullable=True),
        sa.Column("retry_at", sa.Float, nullable=True),
    )
    op.create_index("ix_tasks_state_created_at", "tasks", ["state", "created_at"])
    op.create_index("ix_tasks_created_at_id", "tasks", ["created_at", "id"])
    op.create_table(
        "task_parts",
        sa.Column("task_id", sa.String(64), sa.ForeignKey("tasks.id"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("executor_id", sa.String(128), nullable=False, index=True),
        sa.Column("node", sa.String(255), nullable=False),
    )
    for name, columns in _tables().items():
        op.create_table(name, *columns)
    op.execute(
        "INSERT INTO tasks (id, kind, tenant, name, client_host, state, reason, priority, gpu_mode, required_vram, noswap, "
        "wants, placement, attempt, created_at, started_at) "
        "SELECT id, 'session', tenant, program, client_host, 'started', '', priority, gpu_mode, required_vram, false, '{}', "
        "'{}', 1, opened_at, opened_at FROM sessions"
    )
    op.execute("INSERT INTO leases (task_id, token, lease_until) SELECT id, token, lease_until FROM sessions")
    op.execute(
        "INSERT INTO task_parts (task_id, position, executor_id, node) "
        "SELECT session_id, position, executor_id, node FROM session_parts"
    )
    op.drop_table("session_parts")
    op.drop_table("sessions")


def downgrade() -> None:
    """Keep only the open sessions."""
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), primary_key=True),
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
    for column in ("tenant", "lease_until"):
        op.create_index(f"ix_sessions_{column}", "sessions", [column])
    op.create_table(
        "session_parts",
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("executor_id", sa.String(128), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
    )
    op.create_index("ix_session_parts_executor_id", "session_parts", ["executor_id"])
    op.execute(
        "INSERT INTO sessions (id, token, tenant, priority, gpu_mode, required_vram, program, client_host, "
        "opened_at, lease_until) SELECT t.id, l.token, t.tenant, t.priority, t.gpu_mode, t.required_vram, t.name, t.client_host, "
        "t.started_at, l.lease_until "
        "FROM tasks t JOIN leases l ON l.task_id = t.id WHERE t.state = 'started' AND t.kind = 'session'"
    )
    op.execute(
        "INSERT INTO session_parts (session_id, position, executor_id, node) "
        "SELECT p.task_id, p.position, p.executor_id, p.node FROM task_parts p JOIN sessions s ON s.id = p.task_id"
    )
    for name in [*reversed(_tables()), "task_parts", "tasks"]:
        op.drop_table(name)
