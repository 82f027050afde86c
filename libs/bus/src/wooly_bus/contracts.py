"""The table of contracts: all requests and events between processes over NATS, with their message models.

An entry has the subject, the messages, the scope that a tenant's client needs, and the stream. Everything else is derived from
it: the requests that services serve and send (`ServiceApp`, `ControlClient`), the permissions of credentials, the streams, and
docs/reference/asyncapi.yaml. The name of a contract consists of the service, noun and verb of its subject.

The table is one module, so that readers find the whole protocol in one place. It is separate from `subjects` (syntax of subjects)
and `contract_types` (the parts of a contract), because importing all message models takes time that many commands do not need.
"""

from __future__ import annotations

from typing import Any

from wooly_wis.credits import (
    AddPlanRequest,
    BudgetReached,
    BudgetState,
    CheckBudgetReply,
    CheckBudgetRequest,
    CorrectEntryRequest,
    CreditsReply,
    CreditsRequest,
    EntriesReply,
    EntriesRequest,
    LedgerEntry,
    MakeStatementRequest,
    PlansReply,
    PlansRequest,
    PricePlan,
    QuarantineReply,
    QuarantineRequest,
    SetBudgetRequest,
    Statement,
    StatementMade,
    StatementsReply,
    StatementsRequest,
    UsageQuarantined,
    UsageRecorded,
)
from wooly_wis.messages import (
    PIECE_BYTES,
    AdmitSessionReply,
    AdmitSessionRequest,
    ArtifactRejected,
    AuditViolated,
    CheckCeilingReply,
    CheckCeilingRequest,
    CheckTokenReply,
    CheckTokenRequest,
    CloseSessionReply,
    CloseSessionRequest,
    CompileKernelRequest,
    CompileProgramReply,
    CompileProgramRequest,
    EndEpochReply,
    EndEpochRequest,
    ExecutorHeartbeat,
    ExplainProgramReply,
    ExplainProgramRequest,
    GetBlobReply,
    GetBlobRequest,
    GpusReply,
    GpusRequest,
    HibernateSessionReply,
    HibernateSessionRequest,
    HostSessionReply,
    HostSessionRequest,
    JobEnded,
    KeepCheckpointsReply,
    KeepCheckpointsRequest,
    MemoryBorne,
    MoveTaskRequest,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    PeerSessionReply,
    PeerSessionRequest,
    PrioritizeTaskRequest,
    PutBlobReply,
    PutBlobRequest,
    RenewSessionReply,
    RenewSessionRequest,
    RunJobReply,
    RunJobRequest,
    SessionClosed,
    SetNodeStateReply,
    SetNodeStateRequest,
    SetTenantRequest,
    SteerSessionReply,
    SteerSessionRequest,
    SubmitJob,
    SubmitJobReply,
    TaskChanged,
    TaskReply,
    TaskRequest,
    TasksReply,
    TasksRequest,
    TenantInfo,
    TenantsReply,
    TenantsRequest,
)
from wooly_wis.traces import (
    AddSpansReply,
    AddSpansRequest,
    SpansRecorded,
    TraceReply,
    TraceRequest,
    TracesReply,
    TracesRequest,
)

from wooly_bus.contract_types import (
    AddressedEvent,
    AddressedRpc,
    Event,
    EventContract,
    Log,
    Rpc,
    RpcContract,
    WorkQueue,
)
from wooly_bus.subjects import PREFIX
from wooly_bus.tunnel_messages import OpenTunnelReply, OpenTunnelRequest

_RPC, _EVT = f"{PREFIX}.rpc", f"{PREFIX}.evt"
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
#: Seconds after which the stream drops usage that metering has not booked.
USAGE_AGE_S = 30 * _DAY_S

# -- router ------------------------------------------------------------------------------------------------------------

ROUTER_SESSION_OPEN = Rpc(
    f"{_RPC}.router.session.open",
    OpenSessionRequest,
    OpenSessionReply,
    "Open a session: place it on devices, and ask their executors to host it.",
    queue="router",
    scope="tasks:write",
)
ROUTER_SESSION_RENEW = Rpc(
    f"{_RPC}.router.session.renew",
    RenewSessionRequest,
    RenewSessionReply,
    "Prolong the lease of a session on all of its executors.",
    queue="router",
    scope="tasks:write",
)
ROUTER_SESSION_HIBERNATE = Rpc(
    f"{_RPC}.router.session.hibernate",
    HibernateSessionRequest,
    HibernateSessionReply,
    "Free the executor of a session whose client has a checkpoint of it.",
    queue="router",
    scope="tasks:write",
)
ROUTER_SESSION_PEER = Rpc(
    f"{_RPC}.router.session.peer",
    PeerSessionRequest,
    PeerSessionReply,
    "Let the executor of a session work with the executor of another session of the same tenant.",
    queue="router",
    scope="tasks:write",
)
ROUTER_SESSION_CLOSE = Rpc(
    f"{_RPC}.router.session.close",
    CloseSessionRequest,
    CloseSessionReply,
    "End a session.",
    queue="router",
    scope="tasks:write",
)
#: Tenants' clients submit jobs with this request. Services and administrators publish `ROUTER_JOB_COMMAND`.
ROUTER_JOB_SUBMIT = Rpc(
    f"{PREFIX}.cmd.router.job.submit",
    SubmitJob,
    SubmitJobReply,
    "Submit a job. The reply means that the job is in the router's database.",
    queue="router",
    scope="tasks:write",
    max_bytes=640 << 10,  # 4,096 inputs, each by its digest
    tenants_only=True,
)
ROUTER_BLOB_PUT = Rpc(
    f"{_RPC}.router.blob.put",
    PutBlobRequest,
    PutBlobReply,
    "Put a piece of a blob. Services and administrators use JetStream instead.",
    queue="router",
    scope="blobs:write",
    max_bytes=2 * PIECE_BYTES,  # base64 takes 4/3 of the piece
    tenants_only=True,
)
ROUTER_BLOB_GET = Rpc(
    f"{_RPC}.router.blob.get",
    GetBlobRequest,
    GetBlobReply,
    "Get a piece of a blob. Services and administrators use JetStream instead.",
    queue="router",
    scope="blobs:read",
    tenants_only=True,
)
ROUTER_TASK_LIST = Rpc(
    f"{_RPC}.router.task.list",
    TasksRequest,
    TasksReply,
    "List tasks, newest first, page by page.",
    queue="router",
    scope="tasks:read",
)
ROUTER_TASK_GET = Rpc(
    f"{_RPC}.router.task.get",
    TaskRequest,
    TaskReply,
    "Get one task and its history.",
    queue="router",
    scope="tasks:read",
)
ROUTER_TASK_CANCEL = Rpc(
    f"{_RPC}.router.task.cancel",
    TaskRequest,
    TaskReply,
    "Cancel a task.",
    queue="router",
    scope="tasks:write",
)
ROUTER_TASK_MOVE = Rpc(
    f"{_RPC}.router.task.move",
    MoveTaskRequest,
    TaskReply,
    "Move a running session to another device.",
    queue="router",
    scope="tasks:write",
)
ROUTER_TASK_HIBERNATE = Rpc(
    f"{_RPC}.router.task.hibernate",
    TaskRequest,
    TaskReply,
    "Free the device of a running session until its next operation.",
    queue="router",
    scope="tasks:write",
)
ROUTER_TASK_WAKE = Rpc(
    f"{_RPC}.router.task.wake",
    TaskRequest,
    TaskReply,
    "Give a hibernated session a device again.",
    queue="router",
    scope="tasks:write",
)
ROUTER_TASK_PRIORITIZE = Rpc(
    f"{_RPC}.router.task.prioritize",
    PrioritizeTaskRequest,
    TaskReply,
    "Give a task another class.",
    queue="router",
    scope="tasks:write",
)
ROUTER_TRACE_ADD = Rpc(
    f"{_RPC}.router.trace.add",
    AddSpansRequest,
    AddSpansReply,
    "Add a client's spans to the trace of a task of its tenant.",
    queue="router",
    scope="tasks:write",
    max_bytes=1 << 20,
)
ROUTER_TRACE_GET = Rpc(
    f"{_RPC}.router.trace.get",
    TraceRequest,
    TraceReply,
    "Get the spans of a trace, page by page.",
    queue="router",
    scope="tasks:read",
)
ROUTER_TRACE_LIST = Rpc(
    f"{_RPC}.router.trace.list",
    TracesRequest,
    TracesReply,
    "List recent traces.",
    queue="router",
    scope="tasks:read",
)
ROUTER_NODE_LIST = Rpc(
    f"{_RPC}.router.node.list",
    NodesRequest,
    NodesReply,
    "List the executors whose heartbeats the router receives.",
    queue="router",
    scope="nodes:read",
)
ROUTER_TOKEN_CHECK = Rpc(
    f"{_RPC}.router.token.check",
    CheckTokenRequest,
    CheckTokenReply,
    "Look up the owner and the permissions of an API token that a service received over HTTP.",
    queue="router",
)
ROUTER_NODE_SET = Rpc(
    f"{_RPC}.router.node.set",
    SetNodeStateRequest,
    SetNodeStateReply,
    "Cordon or drain a node, or let it take tasks again, for operators. Without a change, it tells what the node still has.",
    queue="router",
)
ROUTER_TENANT_LIST = Rpc(
    f"{_RPC}.router.tenant.list",
    TenantsRequest,
    TenantsReply,
    "List all tenants, for administrators.",
    queue="router",
)
ROUTER_TENANT_SET = Rpc(
    f"{_RPC}.router.tenant.set",
    SetTenantRequest,
    TenantInfo,
    "Make or change a tenant, for administrators.",
    queue="router",
)
ROUTER_CEILING_CHECK = Rpc(
    f"{_RPC}.router.ceiling.check",
    CheckCeilingRequest,
    CheckCeilingReply,
    "Check whether a tenant may use a class and a weight.",
    queue="router",
)
#: The name does not follow the subject, because `ROUTER_JOB_SUBMIT` already has it; that request's subject ends with the tenant.
ROUTER_JOB_COMMAND = Event(
    f"{PREFIX}.cmd.router.job.submit",
    SubmitJob,
    "Submit a job. Once the queue acknowledges the message, the job will be a task.",
    stream=WorkQueue("WOOLY_CMD_ROUTER", max_bytes=64 << 20),
)
ROUTER_TASK_CHANGED = AddressedEvent(
    f"{_EVT}.router.task.changed.{{tenant}}",
    TaskChanged,
    "A task has a new state.",
    stream=Log("WOOLY_EVT_ROUTER", max_age_s=7 * _DAY_S, max_bytes=64 << 20),
    scope="tasks:read",
)

# -- scheduler ---------------------------------------------------------------------------------------------------------

SCHEDULER_GPU_LIST = Rpc(
    f"{_RPC}.scheduler.gpu.list",
    GpusRequest,
    GpusReply,
    "List the state of all GPUs and sessions, page by page.",
    queue="scheduler",
    scope="nodes:read",
)
SCHEDULER_SESSION_STEER = Rpc(
    f"{_RPC}.scheduler.session.steer",
    SteerSessionRequest,
    SteerSessionReply,
    "Change the class, weight or policy of a session on all of its executors; suspend or resume the session.",
    queue="scheduler",
    scope="tasks:write",
)
SCHEDULER_SESSION_ADMIT = Rpc(
    f"{_RPC}.scheduler.session.admit",
    AdmitSessionRequest,
    AdmitSessionReply,
    "Check whether all admitted sessions would still meet their latency objectives with a new session.",
    queue="scheduler",
)
SCHEDULER_AUDIT_VIOLATED = Event(
    f"{_EVT}.scheduler.audit.violated", AuditViolated, "A decision of an executor violates a rule of dispatch."
)

# -- metering ----------------------------------------------------------------------------------------------------------

METERING_CREDITS_SHOW = Rpc(
    f"{_RPC}.metering.credits.show",
    CreditsRequest,
    CreditsReply,
    "Sum up the charges of a tenant, by run, model or hour.",
    queue="metering",
    scope="tasks:read",
)
METERING_BUDGET_SET = Rpc(
    f"{_RPC}.metering.budget.set",
    SetBudgetRequest,
    BudgetState,
    "Set a tenant's budget.",
    queue="metering",
)
METERING_BUDGET_CHECK = Rpc(
    f"{_RPC}.metering.budget.check",
    CheckBudgetRequest,
    CheckBudgetReply,
    "Check whether a tenant's budget permits it to start a session or job.",
    queue="metering",
)
METERING_PLAN_ADD = Rpc(
    f"{_RPC}.metering.plan.add",
    AddPlanRequest,
    PricePlan,
    "Add a price plan.",
    queue="metering",
)
METERING_PLAN_LIST = Rpc(
    f"{_RPC}.metering.plan.list",
    PlansRequest,
    PlansReply,
    "List all price plans.",
    queue="metering",
)
METERING_ENTRY_LIST = Rpc(
    f"{_RPC}.metering.entry.list",
    EntriesRequest,
    EntriesReply,
    "List entries of the ledger.",
    queue="metering",
)
METERING_ENTRY_CORRECT = Rpc(
    f"{_RPC}.metering.entry.correct",
    CorrectEntryRequest,
    LedgerEntry,
    "Correct an entry of the ledger by another entry.",
    queue="metering",
)
METERING_STATEMENT_MAKE = Rpc(
    f"{_RPC}.metering.statement.make",
    MakeStatementRequest,
    Statement,
    "Make a tenant's next statement.",
    queue="metering",
)
METERING_STATEMENT_LIST = Rpc(
    f"{_RPC}.metering.statement.list",
    StatementsRequest,
    StatementsReply,
    "List a tenant's statements.",
    queue="metering",
)
METERING_QUARANTINE_LIST = Rpc(
    f"{_RPC}.metering.quarantine.list",
    QuarantineRequest,
    QuarantineReply,
    "List usage that could not be booked.",
    queue="metering",
)
METERING_BUDGET_REACHED = Event(
    f"{_EVT}.metering.budget.reached", BudgetReached, "A tenant's spending has reached a limit of its budget."
)
METERING_STATEMENT_MADE = Event(f"{_EVT}.metering.statement.made", StatementMade, "A tenant has a new statement.")
METERING_USAGE_QUARANTINED = Event(
    f"{_EVT}.metering.usage.quarantined", UsageQuarantined, "Metering could not book a usage message."
)

# -- compiler ----------------------------------------------------------------------------------------------------------

COMPILER_PROGRAM_EXPLAIN = Rpc(
    f"{_RPC}.compiler.program.explain",
    ExplainProgramRequest,
    ExplainProgramReply,
    "Show a program after every pass of the compiler.",
    queue="compiler",
    scope="tasks:write",
    max_bytes=1 << 20,
)
COMPILER_PROGRAM_COMPILE = AddressedRpc(
    f"{_RPC}.compiler.program.compile.{{family}}",
    CompileProgramRequest,
    CompileProgramReply,
    "Compile a program to an artifact, for a family of targets.",
    queue="compiler",
)
COMPILER_KERNEL_COMPILE = AddressedRpc(
    f"{_RPC}.compiler.kernel.compile.{{family}}",
    CompileKernelRequest,
    CompileProgramReply,
    "Compile a kernel of another language, for a family of targets.",
    queue="compiler",
)

# -- executor ----------------------------------------------------------------------------------------------------------

EXECUTOR_SESSION_OPEN = AddressedRpc(
    f"{_RPC}.executor.session.open.{{executor_id}}",
    HostSessionRequest,
    HostSessionReply,
    "Host a session.",
)
EXECUTOR_SESSION_RENEW = AddressedRpc(
    f"{_RPC}.executor.session.renew.{{executor_id}}",
    RenewSessionRequest,
    RenewSessionReply,
    "Prolong the lease of a session.",
)
EXECUTOR_SESSION_CLOSE = AddressedRpc(
    f"{_RPC}.executor.session.close.{{executor_id}}",
    CloseSessionRequest,
    CloseSessionReply,
    "End a session.",
)
EXECUTOR_SESSION_STEER = AddressedRpc(
    f"{_RPC}.executor.session.steer.{{executor_id}}",
    SteerSessionRequest,
    SteerSessionReply,
    "Change the class, weight or policy of a session; suspend, resume or hold the session.",
)
EXECUTOR_CHECKPOINT_KEEP = AddressedRpc(
    f"{_RPC}.executor.checkpoint.keep.{{executor_id}}",
    KeepCheckpointsRequest,
    KeepCheckpointsReply,
    "Keep or remove checkpoints whose sessions no executor has.",
)
EXECUTOR_EPOCH_END = AddressedRpc(
    f"{_RPC}.executor.epoch.end.{{executor_id}}",
    EndEpochRequest,
    EndEpochReply,
    "End an epoch and return its measurements; the executor adapts its pacing windows.",
)
EXECUTOR_JOB_RUN = AddressedRpc(
    f"{_RPC}.executor.job.run.{{executor_id}}",
    RunJobRequest,
    RunJobReply,
    "Run an attempt at a job.",
)
EXECUTOR_TUNNEL_OPEN = AddressedRpc(
    f"{_RPC}.executor.tunnel.open.{{executor_id}}",
    OpenTunnelRequest,
    OpenTunnelReply,
    "Open a byte stream to the executor's data channel.",
    scope="session",
)
EXECUTOR_NODE_HEARTBEAT = Event(
    f"{_EVT}.executor.node.heartbeat",
    ExecutorHeartbeat,
    "An executor is alive; the event describes its devices, sessions and state.",
)
EXECUTOR_SESSION_CLOSED = Event(f"{_EVT}.executor.session.closed", SessionClosed, "A session ended on an executor.")
EXECUTOR_ARTIFACT_REJECTED = Event(
    f"{_EVT}.executor.artifact.rejected", ArtifactRejected, "An artifact of a compiler failed an executor's checks."
)
EXECUTOR_JOB_ENDED = AddressedEvent(
    f"{_EVT}.executor.job.ended.{{executor_id}}",
    JobEnded,
    "An attempt at a job ended.",
    stream=WorkQueue("WOOLY_EVT_EXECUTORJOB", max_bytes=32 << 20),
)
EXECUTOR_DISPATCH_JOURNALED = AddressedEvent(
    f"{_EVT}.executor.dispatch.journaled.{{executor_id}}",
    bytes,
    "Entries of an executor's dispatch journal, as the bytes of a `wooly_dispatch.journal.Batch`.",
    stream=Log("WOOLY_EVT_EXECUTOR", max_age_s=_HOUR_S, max_bytes=1 << 30),
)
EXECUTOR_MEMORY_BORNE = AddressedEvent(
    f"{_EVT}.executor.memory.borne.{{executor_id}}",
    MemoryBorne,
    "Memory of an executor that a session was charged for over a time span.",
    stream=Log("WOOLY_EVT_MEMORY", max_age_s=7 * _DAY_S, max_bytes=1 << 30),
)
#: Metering removes booked usage from the stream. The limits matter only while metering is down.
EXECUTOR_USAGE_RECORDED = AddressedEvent(
    f"{_EVT}.executor.usage.recorded.{{executor_id}}",
    UsageRecorded,
    "Usage of an executor's device by sessions.",
    stream=Log("WOOLY_EVT_USAGE", max_age_s=USAGE_AGE_S, max_bytes=1 << 30),
)

# -- every service -----------------------------------------------------------------------------------------------------

SERVICE_SPAN_RECORDED = AddressedEvent(
    f"{_EVT}.{{service}}.span.recorded",
    SpansRecorded,
    "Spans that a service recorded. A router keeps the spans of traces that have a task.",
    queue="router",
)

#: All contracts by name, in the order above.
RPCS: dict[str, RpcContract[Any, Any]] = {n: c for n, c in globals().items() if isinstance(c, RpcContract)}
EVENTS: dict[str, EventContract[Any]] = {n: c for n, c in globals().items() if isinstance(c, EventContract)}
