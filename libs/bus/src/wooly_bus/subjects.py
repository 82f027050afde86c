"""The only place with subject strings: ``wooly.v1.{rpc|cmd|evt}.<service>.<noun>.<verb>[.<id>]``."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote, unquote

PREFIX = "wooly.v1"

ROUTER_SESSION_OPEN = f"{PREFIX}.rpc.router.session.open"
ROUTER_SESSION_RENEW = f"{PREFIX}.rpc.router.session.renew"
ROUTER_SESSION_CLOSE = f"{PREFIX}.rpc.router.session.close"
ROUTER_NODE_LIST = f"{PREFIX}.rpc.router.node.list"
EXECUTOR_HEARTBEAT = f"{PREFIX}.evt.executor.node.heartbeat"
EXECUTOR_SESSION_CLOSED = f"{PREFIX}.evt.executor.session.closed"
EXECUTOR_JOURNALS = f"{PREFIX}.evt.executor.dispatch.journaled.*"
#: The stream that keeps them.
EXECUTOR_JOURNAL_STREAM = "WOOLY_EVT_EXECUTOR"
EXECUTOR_MEMORY_EVENTS = f"{PREFIX}.evt.executor.memory.borne.*"
#: The stream that keeps them.
EXECUTOR_MEMORY_STREAM = "WOOLY_EVT_MEMORY"
EXECUTOR_ARTIFACT_REJECTED = f"{PREFIX}.evt.executor.artifact.rejected"
COMPILER_PROGRAM_EXPLAIN = f"{PREFIX}.rpc.compiler.program.explain"
#: Where jobs are submitted (`SubmitJob`), and the stream that keeps them until a router has taken them in. What tenants' clients
#: submit, at `for_tenant` of it, goes into no stream: a router answers once it has taken the job in.
ROUTER_JOB_SUBMIT = f"{PREFIX}.cmd.router.job.submit"
ROUTER_COMMAND_STREAM = "WOOLY_CMD_ROUTER"
#: Where tenants' clients put blobs and read them, as `for_tenant` makes it; all others have JetStream for it.
ROUTER_BLOB_PUT = f"{PREFIX}.rpc.router.blob.put"
ROUTER_BLOB_GET = f"{PREFIX}.rpc.router.blob.get"
ROUTER_TASK_LIST = f"{PREFIX}.rpc.router.task.list"
ROUTER_TASK_GET = f"{PREFIX}.rpc.router.task.get"
ROUTER_TASK_CANCEL = f"{PREFIX}.rpc.router.task.cancel"
ROUTER_TASK_PRIORITIZE = f"{PREFIX}.rpc.router.task.prioritize"
#: Services that are asked over HTTP ask a router who shows a token (`CheckTokenRequest`).
ROUTER_TOKEN_CHECK = f"{PREFIX}.rpc.router.token.check"
#: Administrators ask for tenants and change them; services ask whether a tenant may have what it wants of them.
ROUTER_TENANT_LIST = f"{PREFIX}.rpc.router.tenant.list"
ROUTER_TENANT_SET = f"{PREFIX}.rpc.router.tenant.set"
ROUTER_CEILING_CHECK = f"{PREFIX}.rpc.router.ceiling.check"
#: What becomes of tasks (`TaskChanged`), by tenant, and the stream that keeps it.
ROUTER_TASKS_CHANGED = f"{PREFIX}.evt.router.task.changed.*"
ROUTER_EVENT_STREAM = "WOOLY_EVT_ROUTER"
#: How attempts at jobs ended (`JobEnded`), by executor, and the stream that keeps it until a router has taken it in.
EXECUTOR_JOBS_ENDED = f"{PREFIX}.evt.executor.job.ended.*"
EXECUTOR_JOB_STREAM = "WOOLY_EVT_EXECUTORJOB"
#: Traces: what clients add to their own, what is asked; and spans of services (`SpansRecorded`), which nobody keeps but a router.
ROUTER_TRACE_ADD = f"{PREFIX}.rpc.router.trace.add"
ROUTER_TRACE_GET = f"{PREFIX}.rpc.router.trace.get"
ROUTER_TRACE_LIST = f"{PREFIX}.rpc.router.trace.list"
SPANS = f"{PREFIX}.evt.*.span.recorded"
SCHEDULER_SESSION_ADMIT = f"{PREFIX}.rpc.scheduler.session.admit"
SCHEDULER_SESSION_STEER = f"{PREFIX}.rpc.scheduler.session.steer"
SCHEDULER_GPU_LIST = f"{PREFIX}.rpc.scheduler.gpu.list"
SCHEDULER_AUDIT_VIOLATED = f"{PREFIX}.evt.scheduler.audit.violated"
EXECUTOR_USAGES = f"{PREFIX}.evt.executor.usage.recorded.*"
#: The stream that keeps them until they are booked.
EXECUTOR_USAGE_STREAM = "WOOLY_EVT_USAGE"
METERING_CREDITS_SHOW = f"{PREFIX}.rpc.metering.credits.show"
METERING_BUDGET_SET = f"{PREFIX}.rpc.metering.budget.set"
METERING_BUDGET_CHECK = f"{PREFIX}.rpc.metering.budget.check"
METERING_PLAN_ADD = f"{PREFIX}.rpc.metering.plan.add"
METERING_PLAN_LIST = f"{PREFIX}.rpc.metering.plan.list"
METERING_ENTRY_LIST = f"{PREFIX}.rpc.metering.entry.list"
METERING_ENTRY_CORRECT = f"{PREFIX}.rpc.metering.entry.correct"
METERING_STATEMENT_MAKE = f"{PREFIX}.rpc.metering.statement.make"
METERING_STATEMENT_LIST = f"{PREFIX}.rpc.metering.statement.list"
METERING_QUARANTINE_LIST = f"{PREFIX}.rpc.metering.quarantine.list"
METERING_BUDGET_REACHED = f"{PREFIX}.evt.metering.budget.reached"
METERING_STATEMENT_MADE = f"{PREFIX}.evt.metering.statement.made"
METERING_USAGE_QUARANTINED = f"{PREFIX}.evt.metering.usage.quarantined"
#: Where replies are heard.
INBOX = "_INBOX"
#: What a tenant's client may ask, each by the scope that it needs; as `for_tenant` makes it.
CLIENT_SUBJECTS = (
    ("tasks:write", ROUTER_SESSION_OPEN),
    ("tasks:write", ROUTER_SESSION_RENEW),
    ("tasks:write", ROUTER_SESSION_CLOSE),
    ("tasks:write", ROUTER_JOB_SUBMIT),
    ("blobs:write", ROUTER_BLOB_PUT),
    ("blobs:read", ROUTER_BLOB_GET),
    ("tasks:read", ROUTER_TASK_LIST),
    ("tasks:read", ROUTER_TASK_GET),
    ("tasks:write", ROUTER_TASK_CANCEL),
    ("tasks:write", ROUTER_TASK_PRIORITIZE),
    ("tasks:write", ROUTER_TRACE_ADD),
    ("tasks:read", ROUTER_TRACE_GET),
    ("tasks:read", ROUTER_TRACE_LIST),
    ("nodes:read", ROUTER_NODE_LIST),
    ("nodes:read", SCHEDULER_GPU_LIST),
    ("tasks:write", SCHEDULER_SESSION_STEER),
    ("tasks:read", METERING_CREDITS_SHOW),
    ("tasks:write", COMPILER_PROGRAM_EXPLAIN),
)
#: What the cluster's administrator may publish: requests and jobs, and what JetStream and tunnels need.
ADMINISTRATOR_SUBJECTS = (
    f"{PREFIX}.rpc.>",
    ROUTER_JOB_SUBMIT,
    "$JS.API.>",
    "$JS.ACK.>",
    "$JS.FC.>",
    "$O.>",
    f"{INBOX}.>",
)


def _id(value: str) -> str:
    if not value or any(c in ".*>" or c.isspace() for c in value):
        raise ValueError(f"{value!r} cannot be part of a subject")
    return value


def executor_session_open(executor_id: str) -> str:
    """Where an executor takes sessions."""
    return f"{PREFIX}.rpc.executor.session.open.{_id(executor_id)}"


def executor_session_renew(executor_id: str) -> str:
    """Where an executor prolongs leases."""
    return f"{PREFIX}.rpc.executor.session.renew.{_id(executor_id)}"


def executor_session_close(executor_id: str) -> str:
    """Where an executor is told to end a session."""
    return f"{PREFIX}.rpc.executor.session.close.{_id(executor_id)}"


def executor_session_steer(executor_id: str) -> str:
    """Where an executor is told how to treat a session from now on."""
    return f"{PREFIX}.rpc.executor.session.steer.{_id(executor_id)}"


def executor_epoch_end(executor_id: str) -> str:
    """Where an executor is told what the last epoch measured."""
    return f"{PREFIX}.rpc.executor.epoch.end.{_id(executor_id)}"


def executor_journaled(executor_id: str) -> str:
    """Where an executor publishes batches of its dispatch journal (bytes of `wooly_dispatch.journal.Batch`)."""
    return f"{PREFIX}.evt.executor.dispatch.journaled.{_id(executor_id)}"


def executor_memory_borne(executor_id: str) -> str:
    """Where an executor publishes what its sessions bore of its memory (`MemoryBorne`)."""
    return f"{PREFIX}.evt.executor.memory.borne.{_id(executor_id)}"


def compiler_program_compile(family: str) -> str:
    """Where artifacts are asked for, for a family of targets: whoever can build for it listens there."""
    return f"{PREFIX}.rpc.compiler.program.compile.{_id(family)}"


def compiler_kernel_compile(family: str) -> str:
    """Where the code of kernels in other languages is asked for, for a family of targets."""
    return f"{PREFIX}.rpc.compiler.kernel.compile.{_id(family)}"


def executor_job_run(executor_id: str) -> str:
    """Where an executor takes jobs."""
    return f"{PREFIX}.rpc.executor.job.run.{_id(executor_id)}"


def executor_job_ended(executor_id: str) -> str:
    """Where an executor says how an attempt at a job ended."""
    return f"{PREFIX}.evt.executor.job.ended.{_id(executor_id)}"


def router_task_changed(tenant: str) -> str:
    """Where a tenant hears what becomes of its tasks. What cannot be part of a subject is percent-encoded."""
    return f"{PREFIX}.evt.router.task.changed.{tenant_token(tenant)}"


def tenant_token(tenant: str) -> str:
    """A tenant's name as one token of a subject: what cannot be part of one is percent-encoded."""
    return quote(tenant, safe="").replace(".", "%2E")


def tenant_of(token: str) -> str:
    """The tenant whose `tenant_token` this is."""
    return unquote(token)


def for_tenant(subject: str, tenant: str) -> str:
    """Where a tenant's clients ask what others ask at `subject`: NATS lets nobody else publish there."""
    return f"{subject}.{tenant_token(tenant)}"


def _tenant_inbox(tenant: str) -> str:
    """Inboxes have no room for every name, and need not be read."""
    return f"{INBOX}.{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def client_inbox(tenant: str, user_id: str) -> str:
    """Under which one user of a tenant's hears replies, and nobody else."""
    return f"{_tenant_inbox(tenant)}.{_id(user_id)}"


def tunnel_inbox(inbox: str) -> str:
    """Under which an executor hears the tunnels of the user who has `inbox`; nobody else may publish there.

    Raises:
        ValueError: that is no user's inbox.
    """
    found = re.match(rf"{INBOX}\.([0-9a-f]{{32}}\.[A-Za-z0-9_-]{{1,64}})(\.|$)", inbox)
    if found is None:
        raise ValueError(f"{inbox[:100]!r} is no user's inbox")
    return f"{INBOX}.tunnel.{found[1]}"


def is_inbox_of(subject: str, tenant: str) -> bool:
    """Whether `subject` is an inbox of a user of that tenant's."""
    return subject.startswith(f"{_tenant_inbox(tenant)}.")


def is_service(subject: str) -> bool:
    """Whether services, or NATS itself, listen there: a reply must not go to such a subject, for it would speak in our name."""
    return subject.startswith((f"{PREFIX}.", "$"))


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject is one of those that a pattern with `*` and `>` stands for."""
    wanted, given = pattern.split("."), subject.split(".")
    for i, part in enumerate(wanted):
        if part == ">":
            return len(given) > i
        if i >= len(given) or part not in ("*", given[i]):
            return False
    return len(wanted) == len(given)


def executor_usage(executor_id: str) -> str:
    """Where an executor publishes what its sessions used (`wooly_wis.credits.UsageRecorded`)."""
    return f"{PREFIX}.evt.executor.usage.recorded.{_id(executor_id)}"


def spans_recorded(service: str) -> str:
    """Where a service hands over the spans that it recorded."""
    return f"{PREFIX}.evt.{_id(service)}.span.recorded"


def executor_tunnel(executor_id: str) -> str:
    """Where a client asks for a byte stream to an executor's data channel."""
    return f"{PREFIX}.rpc.executor.tunnel.open.{_id(executor_id)}"


def inbox(subject: str) -> str:
    """`subject`, if it is an inbox of NATS's usual form: one that a peer named, to which we are going to publish.

    Raises:
        ValueError: it is not; publishing there could speak to a service in our name.
    """
    if not re.fullmatch(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){1,4}", subject):
        raise ValueError(f"{subject[:100]!r} is not an inbox")
    return subject


def template(subject: str) -> str:
    """The subject without its id, for names that must stay few (spans, metrics)."""
    parts = subject.split(".")
    return ".".join(parts[:6]) if len(parts) > 6 else subject
