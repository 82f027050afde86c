"""The database tables. Times are in seconds since the epoch, sizes in bytes. Names that people choose are keys."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class Base(DeclarativeBase):
    """Declarative base of the controller's tables."""


class TaskRow(Base):
    """A session or a job, from its request until its retention ends.

    `tenant` is not a foreign key, because a controller without authentication accepts any name. `wants` is the input of
    placement; `spec` describes a job's work; `placement` explains the choice of the devices, or the waiting.
    """

    __tablename__ = "tasks"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    name: Mapped[str] = mapped_column(String(1024))
    client_host: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    priority: Mapped[int] = mapped_column(Integer)
    gpu_mode: Mapped[str] = mapped_column(String(16))
    required_vram: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    noswap: Mapped[bool] = mapped_column(Boolean)
    wants: Mapped[dict[str, Any]] = mapped_column(JSON)
    spec: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True), nullable=True)
    outputs: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True), nullable=True)
    placement: Mapped[dict[str, Any]] = mapped_column(JSON)
    attempt: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float, nullable=True)
    ended_at: Mapped[float | None] = mapped_column(Float, nullable=True)
    deadline_at: Mapped[float | None] = mapped_column(Float, nullable=True)
    retry_at: Mapped[float | None] = mapped_column(Float, nullable=True)
    parts: Mapped[list[PartRow]] = relationship(
        order_by="PartRow.position", cascade="all, delete-orphan", lazy="selectin"
    )

    __table_args__ = (
        Index("ix_tasks_state_created_at", "state", "created_at"),
        Index("ix_tasks_created_at_id", "created_at", "id"),
    )


class PartRow(Base):
    """One device of a task; `position` is its index in the task."""

    __tablename__ = "task_parts"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    executor_id: Mapped[str] = mapped_column(String(128), index=True)
    node: Mapped[str] = mapped_column(String(255))


class LeaseRow(Base):
    """The lease of a session that is open or waits in the queue: its client's token, and the time by which the client must renew
    it.
    """

    __tablename__ = "leases"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    token: Mapped[str] = mapped_column(String(128))
    lease_until: Mapped[float] = mapped_column(Float, index=True)


class TaskEventRow(Base):
    """One step of a task's story. `told`: the step was published as an event."""

    __tablename__ = "task_events"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    told: Mapped[bool] = mapped_column(Boolean)

    __table_args__ = (
        Index("ix_task_events_untold", "at", sqlite_where=text("NOT told"), postgresql_where=text("NOT told")),
    )


class NodeRow(Base):
    """A machine that sent a heartbeat or that an operator configured in advance. `wish`: active, cordoned or draining."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    wish: Mapped[str] = mapped_column(String(16))
    overcommit_vram_percent: Mapped[int | None] = mapped_column(Integer, nullable=True)
    first_seen: Mapped[float] = mapped_column(Float)


class GpuRow(Base):
    """A device of a node, with the facts of its executor's last heartbeat."""

    __tablename__ = "gpus"

    executor_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"), index=True)
    facts: Mapped[dict[str, Any]] = mapped_column(JSON)
    last_seen: Mapped[float] = mapped_column(Float)


class GroupRow(Base):
    """A named set of nodes that take only tasks that request the group."""

    __tablename__ = "groups"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    description: Mapped[str] = mapped_column(String(1024))
    created_at: Mapped[float] = mapped_column(Float)


class MemberRow(Base):
    """Membership of a node in a group. The node may still be unknown."""

    __tablename__ = "group_members"

    group_name: Mapped[str] = mapped_column(ForeignKey("groups.name"), primary_key=True)
    node_id: Mapped[str] = mapped_column(String(255), primary_key=True, index=True)


class TenantRow(Base):
    """An account that may have tasks."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    description: Mapped[str] = mapped_column(String(1024))
    disabled: Mapped[bool] = mapped_column(Boolean)
    opaque_kernels: Mapped[bool] = mapped_column(Boolean)
    class_ceiling: Mapped[int | None] = mapped_column(Integer, nullable=True)
    weight_ceiling: Mapped[int | None] = mapped_column(Integer, nullable=True)
    exclusive: Mapped[bool | None] = mapped_column(Boolean, nullable=True)
    created_at: Mapped[float] = mapped_column(Float)


class TokenRow(Base):
    """An API token; only the SHA-256 of its secret is stored. `scopes` restrict the rights of its role."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"), index=True)
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    secret_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float | None] = mapped_column(Float, nullable=True)
    revoked_at: Mapped[float | None] = mapped_column(Float, nullable=True)

    __table_args__ = (UniqueConstraint("secret_hash"),)


class ConfigRow(Base):
    """A cluster setting that an operator changed."""

    __tablename__ = "config"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[Any] = mapped_column(JSON)
    updated_at: Mapped[float] = mapped_column(Float)
    updated_by: Mapped[str] = mapped_column(String(255))


class AuditRow(Base):
    """An entry of the audit log: who changed what. Rows are added and never changed."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Float, index=True)
    actor: Mapped[str] = mapped_column(String(255))
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(255))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)


class SampleRow(Base):
    """The metrics of one device at one time, for the history."""

    __tablename__ = "samples"

    at: Mapped[float] = mapped_column(Float, primary_key=True)
    executor_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    node_id: Mapped[str] = mapped_column(String(255))
    utilization: Mapped[float] = mapped_column(Float)
    starvation: Mapped[float] = mapped_column(Float)
    memory_used: Mapped[int] = mapped_column(BigInteger)
    memory_total: Mapped[int] = mapped_column(BigInteger)
    sessions: Mapped[int] = mapped_column(Integer)


class BroughtRow(Base):
    """Contents (`shared_name`) that a tenant's last run shared. `name`: the run's model or module."""

    __tablename__ = "brought"

    tenant: Mapped[str] = mapped_column(String(128), primary_key=True)
    name: Mapped[str] = mapped_column(String(256), primary_key=True)
    dedup: Mapped[str] = mapped_column(String(16), primary_key=True)
    contents: Mapped[list[str]] = mapped_column(JSON)
    at: Mapped[float] = mapped_column(Float, index=True)


class TraceRow(Base):
    """A kept trace. Its tenant is the tenant of its first task. Times of spans are in nanoseconds since the epoch."""

    __tablename__ = "traces"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(128), index=True)
    task_id: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(1024))
    begun_at: Mapped[float] = mapped_column(Float, index=True)
    start_ns: Mapped[int] = mapped_column(BigInteger)
    end_ns: Mapped[int] = mapped_column(BigInteger)
    spans: Mapped[int] = mapped_column(Integer)
    error: Mapped[bool] = mapped_column(Boolean)


class TraceTaskRow(Base):
    """The trace of a task. A trace may have several tasks and may outlive them."""

    __tablename__ = "trace_tasks"

    task_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    trace_id: Mapped[str] = mapped_column(ForeignKey("traces.id"), index=True)


class SpanRow(Base):
    """One span of a trace."""

    __tablename__ = "spans"

    trace_id: Mapped[str] = mapped_column(ForeignKey("traces.id"), primary_key=True)
    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    parent_id: Mapped[str | None] = mapped_column(String(16), nullable=True)
    name: Mapped[str] = mapped_column(String(128))
    service: Mapped[str] = mapped_column(String(64))
    start_ns: Mapped[int] = mapped_column(BigInteger)
    end_ns: Mapped[int] = mapped_column(BigInteger)
    error: Mapped[bool] = mapped_column(Boolean)
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)
