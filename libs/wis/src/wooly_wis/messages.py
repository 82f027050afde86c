"""Control messages: what services and clients say to each other over NATS. Frozen, versioned, nothing extra."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

#: A name that becomes one token of a subject.
Id = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=128)]
SessionId = Annotated[str, StringConstraints(pattern=r"^[^.*>\s]+$", max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Host = Annotated[str, StringConstraints(max_length=255)]
Endpoints = Annotated[tuple[Annotated[str, StringConstraints(max_length=1024)], ...], Field(max_length=32)]
Token = Annotated[str, StringConstraints(max_length=128)]
#: What a client shows at its data channel, signed by the router.
ChannelToken = Annotated[str, StringConstraints(max_length=4096)]
#: BLAKE2b of 32 bytes, in hex.
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: Bytes; what a signed 64-bit column holds.
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]


class Message(BaseModel):
    """Base of every control message."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1


class DeviceFacts(Message):
    """One device, as its runtime describes it. Memory in bytes; `arch`: what compilers call it (sm_90, gfx942, x86_64)."""

    name: str
    vendor: str
    runtime: str
    total_memory: Bytes
    cores: int = Field(ge=1)
    arch: str = Field(default="", max_length=64)
    torch_version: str = ""


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class SessionMemory(Message):
    """Where the memory of one session is, in bytes.

    `own` is on the device and nobody else's, `shared` its part of contents that it shares, `host` and `disk` what is swapped out;
    `promised` what it declared to need, `swaps` how often it was swapped out. `residence`: here, leaving, away, coming. What is
    pinned is listed as a session called `pin …`.
    """

    session_id: Annotated[str, StringConstraints(max_length=320)]
    tenant: Annotated[str, StringConstraints(max_length=128)] = ""
    own: Bytes = 0
    shared: Bytes = 0
    host: Bytes = 0
    disk: Bytes = 0
    promised: Bytes = 0
    swappable: bool = True
    residence: Literal["here", "leaving", "away", "coming"] = "here"
    swaps: int = Field(default=0, ge=0)


class MemoryState(Message):
    """Where every byte of a device is: `own + contents + slots + reserve + free = capacity`.

    `contents` is what sessions bear in parts, `slots` lost to rounding, `reserve` the free bytes that large allocations leave.
    `fixed`, `movable`, `largest` are promises, as in `wooly_dispatch.overcommit.Promises`. `sessions` are at most 1,000.
    """

    capacity: Bytes
    own: Bytes = 0
    contents: Bytes = 0
    slots: Bytes = 0
    reserve: Bytes = 0
    free: Bytes = 0
    host: Bytes = 0
    host_budget: Bytes = 0
    disk: Bytes = 0
    disk_budget: Bytes = 0
    overcommit_percent: int = Field(default=0, ge=0, le=1000)
    fixed: Bytes = 0
    movable: Bytes = 0
    largest: Bytes = 0
    swapped_out: int = Field(default=0, ge=0)
    swapped_in: int = Field(default=0, ge=0)
    sessions: tuple[SessionMemory, ...] = Field(default=(), max_length=1000)

    def of_tenant(self, tenant: str) -> MemoryState:
        """What a tenant may know of it: the sums, and its own sessions."""
        return self.model_copy(update={"sessions": tuple([s for s in self.sessions if s.tenant == tenant])})


class MemoryBorne(Message):
    """What one session bore of a device's memory from one moment to another (event, for metering).

    `run` names the executor's process, `sequence` counts 1, 2, 3, … for each session of a run, without gaps: (executor_id, run,
    session_id, sequence) is unique however often it is delivered. Times are the executor's monotonic ns: only differences mean
    something. `own_byte_us` and `shared_byte_us` are bytes times microseconds, exact integrals over the stretch, rounded so that
    their sums over a session are; `own`, `shared`, `host`, `disk` are bytes at its end. Swapped out, a session bears nothing.
    """

    executor_id: Id
    run: Id
    session_id: Annotated[str, StringConstraints(max_length=320)]
    tenant: Annotated[str, StringConstraints(max_length=128)]
    sequence: int = Field(ge=1)
    from_ns: int = Field(ge=0)
    to_ns: int = Field(ge=0)
    own: Bytes = 0
    shared: Bytes = 0
    own_byte_us: int = Field(default=0, ge=0)
    shared_byte_us: int = Field(default=0, ge=0)
    host: Bytes = 0
    disk: Bytes = 0
    last: bool = False


class WorkDone(Message):
    """Who did how much since the executor began: computing instructions, and device time in nanoseconds.

    `kernel`: generated kernels; `library`: the library's calls in compiled programs; `tier0`: programs that run as they are.
    `rejected`: compiled programs that were bad.
    """

    kernel_instructions: Count = 0
    library_instructions: Count = 0
    tier0_instructions: Count = 0
    kernel_ns: Count = 0
    library_ns: Count = 0
    tier0_ns: Count = 0
    rejected: Count = 0


class ExecutorHeartbeat(Message):
    """An executor is alive (event, every second).

    `utilization` is the share of the last second, 0 to 1, in which the device executed; `weights` name contents that lie in its
    memory and that a further session could share, the largest first, each by its content and circle
    (`wooly_bus.contents.name_in_circle`).
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
    memory: MemoryState | None = None
    work: WorkDone = WorkDone()


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
    """One device of a session: who serves it, where to connect, and what to show there; without `token`, the session's."""

    executor_id: Id
    node: Host
    endpoints: Endpoints
    device: DeviceFacts
    token: ChannelToken = ""


class OpenSessionReply(Message):
    """The client's session: its devices, each on an executor of its own; renew it with `token` within `lease_s` seconds.

    `credentials`: of NATS, for tunnels to these executors; empty where NATS asks for none. `trace_id`: the trace that is kept of
    it; empty: none is.
    """

    session_id: SessionId
    token: Token
    lease_s: float = Field(gt=0)
    parts: tuple[SessionPart, ...] = Field(min_length=1, max_length=64)
    credentials: str = Field(default="", max_length=65536)
    trace_id: str = Field(default="", max_length=32)


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
    the executor may promise beyond what it has, from now on (None: as before); `model`: what bills call what it runs.
    `token` renews the lease. `channel_key`: who signs what clients show at the data channel, at the router's time `at` (seconds
    since the epoch); without, they show `token`. `opaque_kernels`: whether it may launch kernels that executors cannot check.
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
    opaque_kernels: bool = False
    lease_s: float = Field(gt=0)
    channel_key: str = Field(default="", max_length=128)
    at: float = Field(default=0.0, ge=0)


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
    `interval_ns` the time between two; 0 where not declared. `required_vram` in bytes; `swappable`: it may be swapped out;
    `overcommit_vram_percent`: in force for this executor from now on (None: as it says itself).
    """

    session_id: SessionId
    executor_id: Id
    tenant: Name
    priority: int = Field(ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    service_ns: int = Field(default=0, ge=0, lt=1 << 62)
    objective_ns: int = Field(default=0, ge=0, lt=1 << 62)
    interval_ns: int = Field(default=0, ge=0, lt=1 << 62)
    required_vram: Bytes = 0
    swappable: bool = True
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)


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
    memory: SessionMemory | None = None


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
    memory: MemoryState | None = None

    def of_tenant(self, tenant: str) -> GpuState:
        """What a tenant may know of it: how busy it is, and its own sessions."""
        own = tuple([s for s in self.sessions if s.tenant == tenant])
        hidden = {"sessions": own, "last_violation": "", "memory": self.memory and self.memory.of_tenant(tenant)}
        return self.model_copy(update=hidden)


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
    """A session ended on its executor (event). An empty reason: its client closed it, in order.

    `contents` are the largest that it shared while it lived, named as `ExecutorHeartbeat.weights`.
    """

    session_id: SessionId
    executor_id: Id
    reason: str = Field(default="", max_length=4096)
    contents: tuple[Digest, ...] = Field(default=(), max_length=1024)


class CheckTokenRequest(Message):
    """Who shows this token? (service to router). `secret_hash`: its SHA-256 in hex; empty: none was shown."""

    secret_hash: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class CheckTokenReply(Message):
    """Who it is, and what they may; the router refuses tokens that are nobody's, or have ended.

    `actor`: for logs; `tenant`: whose things they see (None: everybody's); `may`: scopes, as `credits:read`; `until`: when it
    ends by itself, in seconds since the epoch; `auth`: "open" where nobody is asked for a token.
    """

    actor: str
    tenant: str | None
    may: tuple[str, ...]
    until: float | None = None
    auth: Literal["open", "tokens"]


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
    memory: MemoryState | None = None
    work: WorkDone = WorkDone()


class NodesReply(Message):
    """All executors that the router knows."""

    nodes: tuple[NodeInfo, ...]


#: A program's canonical bytes, or others, in base64; at most what NATS carries.
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=960_000)]
#: Params on which a computation hangs: index, and the word's 8 bytes in hex.
Decided = Annotated[
    tuple[tuple[int, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]], ...], Field(max_length=65536)
]
JitMode = Literal["exact", "full"]


class CompileProgramRequest(Message):
    """Have a program compiled for a target (executor to compilers; see `wooly_wis.artifact`).

    `rejected`: version of a compiler whose artifact turned out to be bad, so that it is made anew.
    """

    program: Base64
    target: str = Field(max_length=256)
    mode: JitMode
    decided: Decided = ()
    rejected: str = Field(default="", max_length=128)


class CompileProgramReply(Message):
    """It is there, under `name` in the bucket of artifacts, made by a compiler of this version; or it is in work: ask again."""

    state: Literal["ready", "building"]
    compiler: str = Field(max_length=128)
    name: str = Field(default="", max_length=128)


class CompileKernelRequest(Message):
    """Have a kernel in another language compiled for a target (executor to compilers; see `wooly_wis.foreign`).

    The answer is a `CompileProgramReply`; what it names is a kernel's code.

    Attributes:
        source: bytes of the source (`encode_source`).
        entry: the function.
        args: per argument: ``*f32`` for a buffer of such elements, else a scalar's dtype.
        block: threads of a group.
        options: hints and needs.
        target: what the code is for.
        rejected: version of a compiler whose code turned out to be bad, so that it is made anew.
    """

    source: Base64
    entry: Name
    args: Annotated[tuple[Annotated[str, StringConstraints(max_length=16)], ...], Field(max_length=256)]
    block: tuple[int, int, int]
    options: Annotated[
        tuple[tuple[Name, bool | int | Annotated[str, StringConstraints(max_length=4096)]], ...], Field(max_length=64)
    ] = ()
    target: str = Field(max_length=256)
    rejected: str = Field(default="", max_length=128)


class ExplainProgramRequest(Message):
    """What do the passes make of a program? An empty target is any CPU."""

    program: Base64
    target: str = Field(default="", max_length=256)
    mode: JitMode = "full"
    decided: Decided = ()


class ExplainProgramReply(Message):
    """The text after every pass: base64 of zlib of JSON, a list of [pass, text]."""

    compiler: str = Field(max_length=128)
    stages: Base64


class ArtifactRejected(Message):
    """An executor will not use what a compiler made (event); it goes on without."""

    executor_id: Id
    program: str = Field(max_length=128)
    target: str = Field(max_length=256)
    mode: JitMode
    compiler: str = Field(max_length=128)
    reason: str = Field(max_length=4096)


TaskState = Literal["pending", "started", "completed", "failed", "cancelled"]
#: The id of a job, chosen by who submits it: random, for nobody else may have it.
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,48}$")]


class Blob(Message):
    """Bytes in the tenant's object store, as the content of one tensor of a signature."""

    name: Name
    digest: Digest


class SubmitJob(Message):
    """Run a module (command to the router, over JetStream: once it is acknowledged, it will be run or the reason told).

    Module, constants and inputs are blobs of the tenant's. Sent again with the same `job_id`, it changes nothing.

    Attributes:
        module: digest of the module's bytes.
        inputs: a blob for each input of its signature.
        required_vram: bytes; what the module's buffers need if not given.
        noswap: it must not be swapped out.
        deadline_s: seconds from its submission after which it fails.
        attempts: how often it is tried if executors are lost; None: as the cluster says.
    """

    job_id: JobId
    tenant: Name = "default"
    credential: str = Field(default="", max_length=65536)
    name: str = Field(default="", max_length=1024)
    module: Digest
    inputs: tuple[Blob, ...] = Field(default=(), max_length=4096)
    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    required_vram: int | None = Field(default=None, gt=0, lt=1 << 63)
    gpu_mode: Literal["shared", "exclusive"] = "shared"
    node_groups: tuple[Name, ...] = Field(default=(), max_length=64)
    vendor: str = Field(default="", max_length=64)
    arch: str = Field(default="", max_length=64)
    noswap: bool = False
    deadline_s: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    attempts: int | None = Field(default=None, ge=1, le=100)


class SubmitJobReply(Message):
    """A job that is kept; once this is said, it will be run or the reason told."""

    job_id: JobId


#: Bytes of a blob that go into one message; in base64 and with what is around them, NATS carries it.
PIECE_BYTES = 512 << 10
Piece = Annotated[str, StringConstraints(max_length=PIECE_BYTES * 4 // 3 + 4)]


class PutBlobRequest(Message):
    """One piece of a blob, for who has no JetStream. Said again, it changes nothing.

    A first message without `data` asks whether the blob is there already. Pieces come in order; the one that reaches `nbytes` has
    the router compare all of them with the digest, and keep the blob.

    Attributes:
        digest: what the blob will be called.
        nbytes: its size.
        upload: names this attempt; random, chosen by who sends it.
        offset: where in the blob `data` begins.
        after: what the reply to the piece before said.
        data: base64 of at most `PIECE_BYTES`.
    """

    digest: Digest
    nbytes: Bytes
    upload: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{16,64}$")]
    offset: Bytes = 0
    after: Count = 0
    data: Piece = ""
    tenant: Name | None = None


class PutBlobReply(Message):
    """`kept`: the whole blob is there. Otherwise the next piece is awaited, with this `after`."""

    kept: bool
    after: Count = 0


class GetBlobRequest(Message):
    """The next piece of a blob, for who has no JetStream. `after`: what the reply before said."""

    digest: Digest
    after: Count = 0
    tenant: Name | None = None


class GetBlobReply(Message):
    """A piece of a blob of `nbytes` in all, in base64. Who has put them together compares them with the digest."""

    nbytes: Bytes
    data: str
    after: Count


class JobOutput(Message):
    """A result of a job: a dense tensor, in a blob of the tenant's. `dtype` by its label in WIS."""

    name: str = Field(max_length=255)
    dtype: str
    sizes: tuple[int, ...] = Field(max_length=64)
    digest: Digest
    nbytes: Bytes


class RunJobRequest(Message):
    """The router gives an executor a job. It is a session of its own there, called `session_id`, and ends with a `JobEnded`."""

    task_id: SessionId
    attempt: int = Field(ge=1)
    session_id: SessionId
    tenant: Name
    module: Digest
    inputs: tuple[Blob, ...] = Field(default=(), max_length=4096)
    policy: SessionPolicy
    quota: int | None = Field(default=None, gt=0, lt=1 << 63)
    swap: bool = True
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)
    opaque_kernels: bool = False


class RunJobReply(Message):
    """The executor took it."""


class JobEnded(Message):
    """How an attempt at a job ended (event, in JetStream). `lost`: through no fault of its own; another attempt may do better."""

    task_id: SessionId
    attempt: int = Field(ge=1)
    executor_id: Id
    state: Literal["completed", "failed", "lost"]
    reason: str = Field(default="", max_length=4096)
    outputs: tuple[JobOutput, ...] = Field(default=(), max_length=4096)


class TaskChanged(Message):
    """One step of a task's story (event, in JetStream). `number` counts its steps from 1; `at`: seconds since the epoch."""

    task_id: SessionId
    tenant: Name
    kind: Literal["session", "job"]
    name: str = Field(default="", max_length=1024)
    number: int = Field(ge=1)
    at: float
    state: TaskState
    reason: str = Field(default="", max_length=4096)
    outputs: tuple[JobOutput, ...] = ()


class TaskInfo(Message):
    """A session or a job. Times in seconds since the epoch.

    `placement` says why it is where it is, or why it waits; see `wooly_router.core.placement`.
    """

    task_id: SessionId
    kind: Literal["session", "job"]
    tenant: Name
    name: str
    client_host: str
    state: TaskState
    reason: str
    priority: int
    gpu_mode: Literal["shared", "exclusive"]
    gpu_count: int
    required_vram: int | None
    noswap: bool
    node_groups: tuple[str, ...]
    executors: tuple[str, ...]
    nodes: tuple[str, ...]
    attempt: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    deadline_at: float | None
    placement: dict[str, Any] = {}
    outputs: tuple[JobOutput, ...] = ()


class TaskStep(Message):
    """One step of a task's story."""

    number: int
    at: float
    state: TaskState
    reason: str


class TasksRequest(Message):
    """Ask the router for tasks, newest first. `after`: the cursor of the page before."""

    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    states: tuple[TaskState, ...] = ()
    kind: Literal["session", "job"] | None = None
    priority: int | None = Field(default=None, ge=0, le=4)
    executor_id: Id | None = None
    text: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=100, ge=1, le=200)
    after: str = Field(default="", max_length=128)


class TasksReply(Message):
    """A page of tasks. With a `next`, there is more."""

    tasks: tuple[TaskInfo, ...]
    next: str = ""


class TaskRequest(Message):
    """One task: tell of it, or cancel it."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    reason: str = Field(default="", max_length=1024)


class TaskReply(Message):
    """A task and its story."""

    task: TaskInfo
    story: tuple[TaskStep, ...] = ()


class PrioritizeTaskRequest(Message):
    """Give a task another class, in the queue and on its devices."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    priority: int = Field(ge=0, le=4)


class ErrorReply(Message):
    """The one shape in which an error travels."""

    code: str
    message: str
    retryable: bool = False
