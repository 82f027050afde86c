"""Control messages: what services and clients say to each other over NATS. Frozen, versioned, nothing extra."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

#: A name that becomes one token of a subject.
Id = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=128)]
SessionId = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Host = Annotated[str, StringConstraints(max_length=255)]
Endpoints = Annotated[tuple[Annotated[str, StringConstraints(max_length=1024)], ...], Field(max_length=32)]
Token = Annotated[str, StringConstraints(max_length=128)]
#: BLAKE2b of 32 bytes, in hex.
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: Bytes; what a signed 64-bit column holds.
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]


class Message(BaseModel):
    """Base of every control message."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1


class DeviceFacts(Message):
    """One device, as its runtime describes it. Memory in bytes; `arch`: what compilers call it (sm_90, gfx942), if anything."""

    name: str
    vendor: str
    runtime: str
    total_memory: Bytes
    cores: int = Field(ge=1)
    arch: str = Field(default="", max_length=64)
    torch_version: str = ""


class ExecutorHeartbeat(Message):
    """An executor is alive (event, every second).

    `utilization` is the share of the last second, 0 to 1, in which the device executed; `weights` are digests (hex) of constants
    that lie in its memory and that a further session could share.
    """

    executor_id: Id
    node: Host
    pid: int
    device: DeviceFacts
    endpoints: Endpoints
    sessions: tuple[SessionId, ...] = ()
    memory_used: Bytes = 0
    utilization: float = Field(default=0.0, ge=0.0, le=1.0)
    weights: tuple[Digest, ...] = Field(default=(), max_length=1024)


class ClientFacts(Message):
    """Who asks for a session."""

    host: Host
    pid: int
    program: str = Field(default="", max_length=4096)


class OpenSessionRequest(Message):
    """A client wants devices (to the router). `required_vram` is bytes on each of them.

    `model`: what bills call what it runs.
    `weight` is its share inside its class; `service_ns`, `objective_ns` and `interval_ns` as in `AdmitSessionRequest`.
    """

    tenant: Name = "default"
    credential: str = Field(default="", max_length=65536)
    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    interval_ns: int = Field(default=0, ge=0, lt=1 << 62)
    required_vram: int | None = Field(default=None, gt=0, lt=1 << 63)
    gpu_count: int = Field(default=1, ge=1, le=64)
    gpu_mode: Literal["shared", "exclusive"] = "shared"
    node_groups: tuple[Name, ...] = Field(default=(), max_length=64)
    vendor: str = Field(default="", max_length=64)
    arch: str = Field(default="", max_length=64)
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    model: str = Field(default="", max_length=256)
    client: ClientFacts


class SessionPart(Message):
    """One device of a session: who serves it, and where to connect."""

    executor_id: Id
    node: Host
    endpoints: Endpoints
    device: DeviceFacts


class OpenSessionReply(Message):
    """The client's session: its devices, each on an executor of its own, one token for all; renew within `lease_s` seconds."""

    session_id: SessionId
    token: Token
    lease_s: float = Field(gt=0)
    parts: tuple[SessionPart, ...] = Field(min_length=1, max_length=64)


class RenewSessionRequest(Message):
    """The client is still there."""

    session_id: SessionId
    token: Token


class RenewSessionReply(Message):
    """The lease runs for another `lease_s` seconds."""

    lease_s: float = Field(gt=0)


class CloseSessionRequest(Message):
    """The client is done, or the router takes a session back."""

    session_id: SessionId
    token: Token = ""
    reason: str = Field(default="", max_length=4096)


class CloseSessionReply(Message):
    """Whether there was such a session."""

    closed: bool


class SessionPolicy(Message):
    """How the dispatch core treats a session; see `wooly_dispatch.events.Policy`. Times in nanoseconds.

    `rate_permille` and `burst_ns` police P0 and P1; 0 is not policed.
    """

    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    rate_permille: int = Field(default=0, ge=0, le=1000)
    burst_ns: int = Field(default=0, ge=0, lt=1 << 62)


class HostSessionRequest(Message):
    """The router asks an executor to take a session. Without `policy`, it is of its class and otherwise like all.

    `swap`: it may be swapped out; `dedup`: with whom it shares equal content; `overcommit_vram_percent`: how much of its memory
    the executor may promise beyond what it has, from now on (None: as before).
    """

    session_id: SessionId
    token: Token
    tenant: Name
    priority: int = Field(ge=0, le=4)
    policy: SessionPolicy | None = None
    quota: int | None = Field(default=None, gt=0, lt=1 << 63)
    swap: bool = True
    dedup: Literal["off", "tenant", "shared"] = "off"
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)
    model: str = Field(default="", max_length=256)
    lease_s: float = Field(gt=0)


class SteerSessionRequest(Message):
    """Treat a running session otherwise from now on (to an executor, or to the scheduler, which tells all its executors).

    What is None stays as it is. `exclusive` shuts all other sessions of the device out, or lets them in again. `hold` suspends
    the session for a reason of its own, which its client is told; empty: that reason is gone.
    """

    session_id: SessionId
    policy: SessionPolicy | None = None
    priority: int | None = Field(default=None, ge=0, le=4)
    weight: int | None = Field(default=None, ge=1, le=1 << 20)
    suspended: bool | None = None
    exclusive: bool | None = None
    hold: str | None = Field(default=None, max_length=4096)


class SteerSessionReply(Message):
    """How the session is treated now."""

    policy: SessionPolicy
    suspended: bool
    exclusive: bool


class EndEpochRequest(Message):
    """What an epoch measured (from the scheduler to an executor); see `wooly_dispatch.events.EpochEndedEvent`."""

    slowdown_permille: int = Field(default=0, ge=0, lt=1 << 31)
    idle_permille: int = Field(default=0, ge=0, le=1000)


class EndEpochReply(Message):
    """The windows in force now, in nanoseconds, by class."""

    windows_ns: tuple[int, ...]


class AdmitSessionRequest(Message):
    """May this session run on that executor? (router to scheduler)

    `objective_ns` is the response time that it declares for one request, `service_ns` the GPU time that one takes,
    `interval_ns` the time between two; 0 where not declared.
    """

    session_id: SessionId
    executor_id: Id
    tenant: Name
    priority: int = Field(ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    interval_ns: int = Field(default=0, ge=0, lt=1 << 62)


class AdmitSessionReply(Message):
    """Its policy, or why not: who would miss which objective, and by how much."""

    admitted: bool
    policy: SessionPolicy | None = None
    reason: str = Field(default="", max_length=4096)
    missed_by_ns: int = Field(default=0, ge=0)


class GpusRequest(Message):
    """Ask the scheduler what every GPU and session does; `after`: only GPUs whose id comes after this one."""

    after: str = Field(default="", max_length=128)


class GpuSession(Message):
    """One session on one GPU, as audited from its journal. Times in nanoseconds, shares in permille.

    `share_permille`: of what all sessions ran on the GPU in the last ten seconds; `queued`: programs.
    """

    session_id: SessionId
    tenant: Name
    policy: SessionPolicy
    suspended: bool = False
    queued: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    share_permille: int = Field(default=0, ge=0)
    run_ns: int = Field(default=0, ge=0)
    unjust_ns: int = Field(default=0, ge=0)
    programs: int = Field(default=0, ge=0)
    p50_ns: int = Field(default=0, ge=0)
    p99_ns: int = Field(default=0, ge=0)
    attainment_permille: int = Field(default=1000, ge=0, le=1000)


class GpuState(Message):
    """One GPU: utilization and starvation over the last ten seconds, worst share error, windows by class, state of its audit.

    `lost` says why its journal cannot be followed (empty: it is); `gaps` counts journals of which entries were missing; `age_s`:
    since its last entries. `sessions` are at most 1,000, those with the largest shares; `open_sessions` counts all.
    """

    executor_id: Id
    journal: str
    entries: int = Field(ge=0)
    utilization_permille: int = Field(default=0, ge=0, le=1000)
    starvation_permille: int = Field(default=0, ge=0, le=1000)
    share_error_permille: int = Field(default=0, ge=0)
    windows_ns: tuple[int, ...] = ()
    violations: int = Field(default=0, ge=0)
    last_violation: str = Field(default="", max_length=4096)
    lost: str = Field(default="", max_length=4096)
    gaps: int = Field(default=0, ge=0)
    age_s: float = Field(default=0.0, ge=0)
    open_sessions: int = Field(default=0, ge=0)
    sessions: tuple[GpuSession, ...] = ()


class GpusReply(Message):
    """The GPUs that the scheduler follows, by id. With `more`, ask again after the last one."""

    gpus: tuple[GpuState, ...]
    more: bool = False


class AuditViolated(Message):
    """A journal is not what the rule would have written, or breaks a law (event)."""

    executor_id: Id
    journal: str
    entry: int = Field(ge=0)
    law: str = Field(max_length=128)
    message: str = Field(max_length=4096)


class HostSessionReply(Message):
    """The executor took it."""

    endpoints: Endpoints


class SessionClosed(Message):
    """A session ended on its executor (event)."""

    session_id: SessionId
    executor_id: Id
    reason: str = Field(default="", max_length=4096)


class NodesRequest(Message):
    """Ask the router for all nodes."""


class NodeInfo(Message):
    """One executor as the router sees it. `age_s`: since its last heartbeat; `wish`: what its operator wants of its node."""

    executor_id: Id
    node: Host
    state: Literal["alive", "lost"]
    age_s: float
    device: DeviceFacts
    sessions: int
    memory_used: Bytes
    utilization: float
    wish: Literal["active", "cordoned", "draining"] = "active"
    groups: tuple[Name, ...] = ()
    overcommit_vram_percent: int = 0


class NodesReply(Message):
    """All executors that the router knows."""

    nodes: tuple[NodeInfo, ...]


class ErrorReply(Message):
    """The one shape in which an error travels."""

    code: str
    message: str
    retryable: bool = False
