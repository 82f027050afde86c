"""The models of REST that are not message models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from wooly_wis.messages import Blob, Digest, GpuState, JobId, Name, NodeInfo, StoredCheckpoint, TaskInfo, TaskStep
from wooly_wis.traces import SpanInfo, TraceInfo

from wooly_router.gate import SCOPES

#: A name in a path: no slash, no control characters.
PathName = Annotated[str, StringConstraints(pattern=r"^[^/\x00-\x1f\x7f]+$", min_length=1, max_length=128)]
NodeId = Annotated[str, StringConstraints(pattern=r"^[^/\x00-\x1f\x7f]+$", min_length=1, max_length=255)]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=1024)]
Scope = Literal[
    "audit:read", "audit:write", "blobs:read", "blobs:write", "config:read", "config:write",
    "credits:read", "credits:write", "groups:read", "groups:write",
    "metrics:read", "metrics:write", "nodes:read", "nodes:write", "tasks:read", "tasks:write", "tenants:read", "tenants:write",
]  # fmt: skip
assert set(SCOPES) == set(Scope.__args__)  # type: ignore[attr-defined]


class Body(BaseModel):
    """Base of request bodies: unknown fields are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(BaseModel):
    """The format of every error."""

    code: str
    message: str
    retryable: bool


class Health(BaseModel):
    """Whether the router serves, and how many executors are alive."""

    status: str
    executors: int


class LoginBody(Body):
    """The secret of an API token, or the one-time code of a local stack's owner."""

    token: str = Field(default="", max_length=256)


class LoginCode(BaseModel):
    """A code that logs in one browser, once, as the owner of a local stack."""

    code: str
    expires_in_s: float


class Me(BaseModel):
    """The caller.

    `auth`: whether tokens are required. `tenant`: the tenant whose tasks the caller sees; null: all tenants. `own`: the tenant
    that owns what the caller creates.
    """

    auth: Literal["open", "tokens"]
    actor: str
    tenant: str | None
    own: str
    may: list[str]


class NodeConfig(Body):
    """A node's overcommit percentage: memory that may be promised beyond its capacity.

    null inherits the cluster's value, 0 means none.
    """

    overcommit_vram_percent: Annotated[int, Field(ge=0, le=1000)] | None


class NodeState(Body):
    """The wanted state of a node.

    active: takes tasks. cordoned: takes no new tasks. draining: cordoned, and `drained` once no task runs.
    """

    state: Literal["active", "cordoned", "draining"]


class GpuRoom(BaseModel):
    """What one more task may ask for on a device now, by the rules of placement. Memory in bytes.

    `takes`: the device takes tasks: it is alive, its node is active, and no task uses it exclusively. `takes_exclusive`: it also
    takes a task that wants it exclusively. `swappable`, `fixed`: the most memory for a task that can be swapped out, and for one
    that cannot; 0 if there is no room.
    """

    takes: bool
    takes_exclusive: bool
    swappable: int
    fixed: int


class NodeGpu(NodeInfo):
    """A device of a node. `room` is null if placement does not know the device."""

    room: GpuRoom | None = None


class Node(BaseModel):
    """A machine with its devices.

    `overcommit_vram_percent` is its own value, `effective_overcommit_vram_percent` the value in force.
    """

    node_id: str
    state: Literal["active", "cordoned", "draining", "drained", "lost"]
    wish: Literal["active", "cordoned", "draining"]
    groups: list[str]
    overcommit_vram_percent: int | None
    effective_overcommit_vram_percent: int
    tasks: int
    gpus: list[NodeGpu]


class NodeList(BaseModel):
    """All nodes."""

    nodes: list[Node]


class GroupBody(Body):
    """A group's nodes. Nodes that are still unknown are allowed."""

    description: Text = ""
    nodes: list[NodeId] = Field(default=[], max_length=10_000)


class Group(BaseModel):
    """A named set of nodes that take only tasks that request one of their groups."""

    name: str
    description: str
    created_at: float
    nodes: list[str]


class GroupList(BaseModel):
    """All groups."""

    groups: list[Group]


class Task(TaskInfo):
    """A task. `noswap` is 0 or 1."""

    noswap: Literal[0, 1]  # type: ignore[assignment]


class TaskDetail(BaseModel):
    """A task and its story. `checkpoint`: the newest checkpoint of a session that runs. `ranks`: the sessions of its ranks, if
    the task is a program of several processes.
    """

    task: Task
    story: list[TaskStep]
    checkpoint: StoredCheckpoint | None = None
    ranks: list[Task] = []


class TaskList(BaseModel):
    """A page of tasks. If `next` is not empty, pass it as `after` to get the next page."""

    tasks: list[Task]
    next: str


class TaskBody(Body):
    """A job to run, as in `SubmitJob`. Module and inputs are blobs."""

    job_id: JobId | None = None
    tenant: Name | None = None
    name: Text = ""
    module: Digest
    inputs: list[Blob] = Field(default=[], max_length=4096)
    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    required_vram: int | None = Field(default=None, gt=0, lt=1 << 63)
    gpu_mode: Literal["shared", "exclusive"] = "shared"
    node_groups: list[Name] = Field(default=[], max_length=64)
    vendor: str = Field(default="", max_length=64)
    arch: str = Field(default="", max_length=64)
    noswap: Literal[0, 1] = 0
    deadline_s: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    attempts: int | None = Field(default=None, ge=1, le=100)


class CancelBody(Body):
    """The reason of a cancellation."""

    reason: Text = ""


class PriorityBody(Body):
    """The new class of a task."""

    priority: int = Field(ge=0, le=4)


class MoveBody(Body):
    """Where a session is moved: a node, an executor, a group or a vendor; empty: any other device."""

    node: str = Field(default="", max_length=255)


class BlobInfo(BaseModel):
    """A stored blob."""

    digest: str
    nbytes: int


class PartInfo(BaseModel):
    """The executor and node of one device of a session."""

    executor_id: str
    node: str


class SessionInfo(BaseModel):
    """One open session, without its token; `parts` are its devices, in order. Times are seconds since the epoch."""

    session_id: str
    parts: list[PartInfo]
    tenant: str
    priority: int
    program: str
    client_host: str
    opened_at: float
    lease_until: float


class SessionList(BaseModel):
    """All open sessions."""

    sessions: list[SessionInfo]


class TenantBody(Body):
    """A tenant, or a change of a tenant: fields that are null or missing do not change.

    `disabled`: the tenant can do nothing. `opaque_kernels`: it may launch kernels whose loads and stores executors cannot check
    (PTX). `class_ceiling`: the highest class of its sessions and jobs (0 is the highest of all, 4 the lowest).
    `weight_ceiling`: their largest weight inside a class. `exclusive`: whether they may use a device exclusively. The router
    has defaults for these three.
    """

    description: Text | None = None
    disabled: bool | None = None
    opaque_kernels: bool | None = None
    class_ceiling: int | None = Field(default=None, ge=0, le=4)
    weight_ceiling: int | None = Field(default=None, ge=1, le=1 << 20)
    exclusive: bool | None = None


class Tenant(BaseModel):
    """An account that may have tasks, with the ceilings in force: see `TenantBody`."""

    name: str
    description: str
    disabled: bool
    opaque_kernels: bool
    class_ceiling: int
    weight_ceiling: int
    exclusive: bool
    created_at: float


class CredentialsBody(Body):
    """A request for NATS credentials.

    By default: of the caller's own tenant, with the longest lifetime and all rights of the token.

    `role`: `user` for a tenant's client, `admin` for an operator of the cluster; null: the caller's own role. `tenant`: another
    tenant; only for callers that see all tenants. `expires_in_s`: a shorter lifetime.
    """

    role: Literal["admin", "user"] | None = None
    tenant: PathName | None = None
    expires_in_s: float | None = Field(default=None, ge=1, le=1e9, allow_inf_nan=False)


class NatsCredentials(BaseModel):
    """NATS credentials in the format of a `.creds` file, and the address of NATS. Times in seconds since the epoch.

    `inbox`: the inbox prefix of NATS clients with these credentials, under which they receive replies.
    """

    credentials: str
    nats_url: str
    inbox: str
    role: Literal["admin", "user"]
    tenant: str
    expires_at: float


class TenantList(BaseModel):
    """All tenants."""

    tenants: list[Tenant]


class TokenBody(Body):
    """A new token. Without scopes it has all rights of its role; without `expires_in_s` it does not expire."""

    name: Text = ""
    role: Literal["admin", "operator", "user"] = "user"
    scopes: list[Scope] = Field(default=[], max_length=len(SCOPES))
    expires_in_s: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)


class Token(BaseModel):
    """A token, without its secret."""

    id: str
    tenant: str
    name: str
    role: Literal["admin", "operator", "user"]
    scopes: list[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class NewToken(Token):
    """A new token. Its secret is not shown again."""

    secret: str


class TokenList(BaseModel):
    """A tenant's tokens."""

    tokens: list[Token]


class SampleInfo(BaseModel):
    """The metrics of one device at one time. Shares are from 0 to 1, memory is in bytes."""

    at: float
    executor_id: str
    node_id: str
    utilization: float
    starvation: float
    memory_used: int
    memory_total: int
    sessions: int


class History(BaseModel):
    """Samples of devices, oldest first; at most 10,000."""

    samples: list[SampleInfo]


class TaskCount(BaseModel):
    """The numbers of waiting and running tasks at one time."""

    at: float
    waiting: int
    running: int


class TaskHistory(BaseModel):
    """The numbers of waiting and running tasks over time, oldest first."""

    counts: list[TaskCount]


class LiveGpu(BaseModel):
    """One device now. Shares are from 0 to 1, memory is in bytes; `starvation` is null if no scheduler reports it."""

    executor_id: str
    node_id: str
    utilization: float
    starvation: float | None
    memory_used: int
    memory_total: int
    sessions: int


class Overview(BaseModel):
    """The cluster now. Nodes and tasks are counted by state; only tasks that the caller sees count."""

    at: float
    nodes: dict[str, int]
    tasks: dict[str, int]
    gpus: list[LiveGpu]


class GpuFigures(BaseModel):
    """Devices and their sessions, from the scheduler's audit."""

    gpus: list[GpuState]


class BudgetBody(Body):
    """A tenant's budget per period, in micro-credits; null: no limit. Above the hard limit, its sessions are suspended."""

    period: Literal["total", "month", "day"] = "total"
    soft_ucr: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    hard_ucr: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


class AuditEntry(BaseModel):
    """An entry of the audit log: who changed what."""

    id: int
    at: float
    actor: str
    tenant: str
    action: str
    target: str
    detail: dict[str, Any]


class AuditPage(BaseModel):
    """A page of the audit log, newest first. Pass the last id as `before` to get the next page."""

    entries: list[AuditEntry]


class TraceList(BaseModel):
    """Recent traces, newest first."""

    traces: list[TraceInfo]


class Trace(BaseModel):
    """A trace's spans in the order in which they began. A span's parent may be missing: it has not ended, or is lost."""

    trace_id: str
    spans: list[SpanInfo]
