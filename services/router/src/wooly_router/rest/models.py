"""The shapes of REST that are not those of messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from wooly_wis.messages import Blob, Digest, GpuState, JobId, Name, NodeInfo, TaskInfo, TaskStep
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
    """Base of what is sent to us: nothing extra."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(BaseModel):
    """The one shape of an error."""

    code: str
    message: str
    retryable: bool


class Health(BaseModel):
    """Whether the router serves, and how many executors are alive."""

    status: str
    executors: int


class LoginBody(Body):
    """An API token's secret; or the code of a local stack's owner, which is valid once."""

    token: str = Field(default="", max_length=256)


class LoginCode(BaseModel):
    """A code that lets one browser in, once, as the owner of a local stack."""

    code: str
    expires_in_s: float


class Me(BaseModel):
    """Who calls.

    `auth`: whether tokens are asked for; `tenant`: whose tasks they see, null: everybody's; `own`: whose what they make is.
    """

    auth: Literal["open", "tokens"]
    actor: str
    tenant: str | None
    own: str
    may: list[str]


class NodeConfig(Body):
    """How much of a node's memory may be promised beyond it, in percent; null inherits the cluster's, 0 forces none."""

    overcommit_vram_percent: Annotated[int, Field(ge=0, le=1000)] | None


class NodeState(Body):
    """What is wanted of a node: active; cordoned: takes nothing new; draining: so, and `drained` says when nothing runs there."""

    state: Literal["active", "cordoned", "draining"]


class Node(BaseModel):
    """A machine with its devices. `overcommit_vram_percent` is its own, `effective_overcommit_vram_percent` the one in force."""

    node_id: str
    state: Literal["active", "cordoned", "draining", "drained", "lost"]
    wish: Literal["active", "cordoned", "draining"]
    groups: list[str]
    overcommit_vram_percent: int | None
    effective_overcommit_vram_percent: int
    tasks: int
    gpus: list[NodeInfo]


class NodeList(BaseModel):
    """All nodes."""

    nodes: list[Node]


class GroupBody(Body):
    """A group's nodes; a node that nobody has heard of yet may be among them."""

    description: Text = ""
    nodes: list[NodeId] = Field(default=[], max_length=10_000)


class Group(BaseModel):
    """A named set of nodes, which take only tasks that ask for one of their groups."""

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
    """A task and its story."""

    task: Task
    story: list[TaskStep]


class TaskList(BaseModel):
    """A page of tasks. With a `next`, ask again with it as `after`."""

    tasks: list[Task]
    next: str


class TaskBody(Body):
    """A job to run; as `SubmitJob`. Module and inputs are blobs."""

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
    """Why."""

    reason: Text = ""


class PriorityBody(Body):
    """Another class."""

    priority: int = Field(ge=0, le=4)


class BlobInfo(BaseModel):
    """A blob that is kept."""

    digest: str
    nbytes: int


class PartInfo(BaseModel):
    """Who serves one device of a session."""

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
    """A tenant, or what is to change of one: what is null or missing stays as it is.

    `disabled`: it can do nothing. `opaque_kernels`: it may launch kernels whose loads and stores executors cannot check (PTX).
    `class_ceiling`: the highest class that its sessions and jobs may have, 0 the highest of all, 4 the lowest; `weight_ceiling`:
    their largest weight inside a class; `exclusive`: they may have a device to themselves. Without: the router's defaults.
    """

    description: Text | None = None
    disabled: bool | None = None
    opaque_kernels: bool | None = None
    class_ceiling: int | None = Field(default=None, ge=0, le=4)
    weight_ceiling: int | None = Field(default=None, ge=1, le=1 << 20)
    exclusive: bool | None = None


class Tenant(BaseModel):
    """Somebody who may have tasks, with the ceilings in force: see `TenantBody`."""

    name: str
    description: str
    disabled: bool
    opaque_kernels: bool
    class_ceiling: int
    weight_ceiling: int
    exclusive: bool
    created_at: float


class CredentialsBody(Body):
    """NATS credentials. Without more: of the caller's own tenant, for as long as may be, with all that the token may.

    `role`: `user` for a tenant's client, `admin` for who runs the cluster; without, the caller's own. `tenant`: another than the
    caller's, for who may see all. `expires_in_s`: sooner than they would end.
    """

    role: Literal["admin", "user"] | None = None
    tenant: PathName | None = None
    expires_in_s: float | None = Field(default=None, ge=1, le=1e9, allow_inf_nan=False)


class NatsCredentials(BaseModel):
    """Credentials, as they are written into a `.creds` file, and where they are to be shown. Times in seconds since the epoch.

    `inbox`: under which replies are heard with them; what clients of NATS call the prefix of inboxes.
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
    """A new token. Without scopes it may all that its role may; without `expires_in_s` it does not end by itself."""

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
    """A token as it was made: the only time that its secret is shown."""

    secret: str


class TokenList(BaseModel):
    """A tenant's tokens."""

    tokens: list[Token]


class SampleInfo(BaseModel):
    """One device at one time. Shares from 0 to 1, memory in bytes."""

    at: float
    executor_id: str
    node_id: str
    utilization: float
    starvation: float
    memory_used: int
    memory_total: int
    sessions: int


class History(BaseModel):
    """What devices did and held, oldest first; at most 10,000 samples."""

    samples: list[SampleInfo]


class TaskCount(BaseModel):
    """How many tasks waited and ran at one time."""

    at: float
    waiting: int
    running: int


class TaskHistory(BaseModel):
    """How many tasks waited and ran, oldest first."""

    counts: list[TaskCount]


class LiveGpu(BaseModel):
    """One device now. Shares from 0 to 1, memory in bytes; `starvation` is null where no scheduler tells it."""

    executor_id: str
    node_id: str
    utilization: float
    starvation: float | None
    memory_used: int
    memory_total: int
    sessions: int


class Overview(BaseModel):
    """The cluster now. Nodes and tasks are counted by state; tasks are those that the caller sees."""

    at: float
    nodes: dict[str, int]
    tasks: dict[str, int]
    gpus: list[LiveGpu]


class GpuFigures(BaseModel):
    """Devices and their sessions as the scheduler audits them."""

    gpus: list[GpuState]


class BudgetBody(Body):
    """A tenant's budget in micro-credits, per period; null: no such limit. Past the hard one its sessions are suspended."""

    period: Literal["total", "month", "day"] = "total"
    soft_ucr: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    hard_ucr: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


class AuditEntry(BaseModel):
    """Who did what to what."""

    id: int
    at: float
    actor: str
    tenant: str
    action: str
    target: str
    detail: dict[str, Any]


class AuditPage(BaseModel):
    """The newest entries first. Ask again with the last id as `before`."""

    entries: list[AuditEntry]


class TraceList(BaseModel):
    """Recent traces, newest first."""

    traces: list[TraceInfo]


class Trace(BaseModel):
    """A trace's spans in the order in which they began. The parent of one may not be there: it has not ended, or is lost."""

    trace_id: str
    spans: list[SpanInfo]
