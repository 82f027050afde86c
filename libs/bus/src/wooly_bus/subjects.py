"""The only place with subject strings: ``wooly.v1.{rpc|cmd|evt}.<service>.<noun>.<verb>[.<id>]``."""

from __future__ import annotations

import re
from urllib.parse import quote

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
#: Where anybody submits jobs (`SubmitJob`), and the stream that keeps them until a router has taken them in.
ROUTER_JOB_SUBMIT = f"{PREFIX}.cmd.router.job.submit"
ROUTER_COMMAND_STREAM = "WOOLY_CMD_ROUTER"
ROUTER_TASK_LIST = f"{PREFIX}.rpc.router.task.list"
ROUTER_TASK_GET = f"{PREFIX}.rpc.router.task.get"
ROUTER_TASK_CANCEL = f"{PREFIX}.rpc.router.task.cancel"
ROUTER_TASK_PRIORITIZE = f"{PREFIX}.rpc.router.task.prioritize"
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


def executor_job_run(executor_id: str) -> str:
    """Where an executor takes jobs."""
    return f"{PREFIX}.rpc.executor.job.run.{_id(executor_id)}"


def executor_job_ended(executor_id: str) -> str:
    """Where an executor says how an attempt at a job ended."""
    return f"{PREFIX}.evt.executor.job.ended.{_id(executor_id)}"


def router_task_changed(tenant: str) -> str:
    """Where a tenant hears what becomes of its tasks. What cannot be part of a subject is percent-encoded."""
    return f"{PREFIX}.evt.router.task.changed.{quote(tenant, safe='').replace('.', '%2E')}"


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
