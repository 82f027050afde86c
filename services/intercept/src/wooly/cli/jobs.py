"""`wooly export`, `submit`, `logs`, and the lists of `wooly tasks`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_wis.messages import (
    MoveTaskRequest,
    PrioritizeTaskRequest,
    TaskChanged,
    TaskReply,
    TaskRequest,
    TasksRequest,
)

from wooly.cli.tables import Fitted, plain_table
from wooly.control import ControlError, Controller
from wooly.settings import Settings

#: Interval, in seconds, at which `wooly logs --follow` reads the task.
POLL_INTERVAL_S = 0.5
#: Interval, in seconds, at which a command looks whether a session has left its executor.
FOLLOW_S = 0.2
#: States of tasks that have ended.
ENDED = ("completed", "failed", "cancelled")
#: How the step of a story begins that says why a session did not leave its executor.
STAYS = "it stays"
#: Default of the setting `tenant`.
DEFAULT_TENANT = "default"


def export(target: str, output: Path | None, blobs: Path | None, console: Console, as_json: bool) -> None:
    """Record SCRIPT:FUNCTION into a file."""
    script, colon, function = target.rpartition(":")
    if not colon or not Path(script).exists():
        raise ControlError(
            f"cannot export {target!r}: it is not of the form SCRIPT:FUNCTION, or the script does not exist"
        )
    from wooly.export import export_script

    sys.path.insert(0, str(Path(script).resolve().parent))
    exported = export_script(Path(script), function)
    module = exported.module
    tensors = {"inputs": module.inputs, "outputs": [o.tensor for o in module.outputs]}
    if blobs is not None:
        digest = exported.save_blobs(blobs)
        made: dict[str, Any] = {"digest": digest, "folder": str(blobs)}
    else:
        path = output or Path(f"{function}.wism")
        made = {"file": str(path), "bytes": exported.save(path)}
    made |= {"programs": len(module.programs), "constants": len(module.constants)}
    if as_json:
        signature = {
            k: [{"name": t.name, "dtype": t.dtype.label, "sizes": list(t.sizes)} for t in v] for k, v in tensors.items()
        }
        print(json.dumps(made | signature))
        return
    if blobs is not None:
        print(digest)
        return
    console.print(
        f"{path}: {made['bytes']:,} bytes, {made['programs']} programs, {made['constants']} constants", highlight=False
    )
    for what, found in tensors.items():
        for t in found:
            line = f"  {what.removesuffix('s')} {t.name}: {t.dtype.label} {list(t.sizes)}"
            console.print(line, highlight=False, markup=False)


def submit(
    settings: Settings,
    access: Access,
    path: Path,
    inputs: list[str],
    wait: bool,
    output: Path | None,
    as_json: bool,
    **wanted: Any,
) -> int:
    """Submit a module as a job. Returns the exit code."""
    from wooly import jobs
    from wooly.traces import ClientTrace

    tenant = access.own if access.own and settings.tenant == DEFAULT_TENANT else settings.tenant
    file = jobs.read_module(path)
    given = _inputs(file.module, inputs)
    waits = wait or output is not None
    trace = ClientTrace("submit")
    with trace.current():
        job = jobs.submit(access, tenant, file, given, credential=settings.credential, **wanted)
    trace.root.set_attribute("task_id", job.job_id)
    trace.end()
    trace.flush()
    if not waits:
        print(json.dumps({"task_id": job.job_id}) if as_json else job.job_id)
        return 0
    steps: list[TaskChanged] = []

    def each(event: TaskChanged) -> None:
        steps.append(event)
        if not as_json:
            print(_line(event.at, event.state, event.reason), file=sys.stderr)

    last = jobs.follow(access, tenant, job.job_id, each, credential=settings.credential)
    with closing(Controller(access)) as controller:
        trace.send(controller, job.job_id, settings.credential)
    files = jobs.fetch(access, tenant, last.outputs, output) if output is not None and last.outputs else []
    if as_json:
        report = {"task_id": job.job_id, "state": last.state, "reason": last.reason, "files": [str(f) for f in files]}
        print(json.dumps(report | {"outputs": [o.model_dump(mode="json") for o in last.outputs]}))
    else:
        print("\n".join([job.job_id, *[str(f) for f in files]]))
    return 0 if last.state == "completed" else 1


def _inputs(module: Any, given: list[str]) -> dict[str, bytes]:
    from wooly import jobs

    wanted = {t.name: t for t in module.inputs}
    found: dict[str, bytes] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in wanted:
            raise ControlError(
                f"--input {text!r} is not of the form NAME=FILE; the inputs of this module are: "
                f"{', '.join(wanted) or '(no inputs)'}"
            )
        found[name] = jobs.read_input(Path(path), wanted[name].dtype, wanted[name].sizes, name)
    if missing := [n for n in wanted if n not in found]:
        raise ControlError(f"inputs of the module are missing: {', '.join(missing)}; give each with --input NAME=FILE")
    return found


def _line(at: float, state: str, reason: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03}"
    return f"{clock}  {state:9}  {reason}".rstrip()


def logs(controller: Controller, settings: Settings, task_id: str, follow: bool, as_json: bool) -> int:
    """Print the story of a task. Returns 1 if the task failed, else 0."""
    shown = 0
    while True:
        reply = controller.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=task_id, credential=settings.credential))
        for step in reply.story[shown:]:
            print(
                json.dumps(step.model_dump(mode="json")) if as_json else _line(step.at, step.state, step.reason),
                flush=True,
            )
        shown = len(reply.story)
        if reply.task.state == "pending" and not follow and not as_json:
            print(f"  {reply.task.reason}")
        if not follow or reply.task.ended_at is not None:
            return int(reply.task.state == "failed")
        time.sleep(POLL_INTERVAL_S)


def list_tasks(controller: Controller, settings: Settings, console: Console, as_json: bool, **chosen: Any) -> None:
    """Print a page of tasks."""
    reply = controller.ask(contracts.ROUTER_TASK_LIST, TasksRequest(credential=settings.credential, **chosen))
    if as_json:
        print(json.dumps(reply.model_dump(mode="json")))
        return
    table = plain_table()
    for column in ("task", "kind", "tenant", "state", "class", "on", "age"):
        table.add_column(column)
    # One line per task. `wooly logs` prints the whole reason, and --json the whole name.
    table.add_column("name, reason", no_wrap=True, overflow="ellipsis")
    for t in reply.tasks:
        name = t.name.rpartition("/")[2] or t.name
        what = ": ".join([part for part in (name, t.reason) if part])
        table.add_row(
            t.task_id,
            f"{t.ranks} ranks" if t.ranks else t.kind,
            t.tenant,
            t.state,
            f"P{t.priority}",
            ", ".join(t.executors),
            _age(time.time() - t.created_at),
            what,
        )
    console.print(Fitted(table))


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}\N{NO-BREAK SPACE}{unit}"
    return f"{max(seconds, 0):.0f}\N{NO-BREAK SPACE}s"


def show(controller: Controller, settings: Settings, console: Console, task_id: str, as_json: bool) -> None:
    """Print a task; if it is a program of several processes, also its ranks."""
    reply = controller.ask(contracts.ROUTER_TASK_GET, TaskRequest(task_id=task_id, credential=settings.credential))
    if as_json:
        print(reply.model_dump_json())
        return
    task = reply.task
    what = f"{task.ranks} ranks" if task.ranks else task.kind
    where = ", ".join(task.executors) or "no device"
    console.print(
        f"task {task.task_id}: {what} of {task.tenant}, {task.state}, P{task.priority}, on {where}", highlight=False
    )
    if not reply.ranks:
        console.print(f"  {task.reason}", highlight=False, markup=False)
        return
    table = plain_table()
    for column in ("rank", "session", "state", "on", "host"):
        table.add_column(column)
    table.add_column("reason", no_wrap=True, overflow="ellipsis")
    for r in reply.ranks:
        table.add_row(str(r.rank), r.task_id, r.state, ", ".join(r.executors), r.client_host, r.reason)
    console.print(Fitted(table))


def cancel(controller: Controller, settings: Settings, task_id: str, reason: str) -> TaskReply:
    """End a task."""
    return controller.ask(
        contracts.ROUTER_TASK_CANCEL,
        TaskRequest(task_id=task_id, reason=reason, credential=settings.credential),
        timeout=6.0,
    )


def move(controller: Controller, settings: Settings, task_id: str, node: str) -> TaskReply:
    """Move a running session to another device."""
    request = MoveTaskRequest(task_id=task_id, node=node, credential=settings.credential)
    return controller.ask(contracts.ROUTER_TASK_MOVE, request, timeout=6.0)


def hibernate(controller: Controller, settings: Settings, task_id: str) -> TaskReply:
    """Let a running session hibernate."""
    request = TaskRequest(task_id=task_id, credential=settings.credential)
    return controller.ask(contracts.ROUTER_TASK_HIBERNATE, request, timeout=6.0)


def wake(controller: Controller, settings: Settings, task_id: str) -> TaskReply:
    """Wake a hibernated session."""
    request = TaskRequest(task_id=task_id, credential=settings.credential)
    return controller.ask(contracts.ROUTER_TASK_WAKE, request, timeout=6.0)


def followed(
    controller: Controller, settings: Settings, reply: TaskReply, timeout_s: float, *, until: tuple[str, ...]
) -> TaskReply:
    """Wait until a session that was asked to leave its executor is in one of some states, has gone on, stays, or has ended.

    Args:
        controller: the connection to the controller.
        settings: the client's settings.
        reply: the task after the request.
        timeout_s: seconds to wait at most.
        until: states of a session that has done what it was asked for.
    """
    told, deadline = len(reply.story), time.monotonic() + timeout_s
    request = TaskRequest(task_id=reply.task.task_id, credential=settings.credential)
    while time.monotonic() < deadline:
        if any(s.state in (*until, *ENDED) or s.reason.startswith(STAYS) for s in reply.story[told:]):
            break
        time.sleep(FOLLOW_S)
        reply = controller.ask(contracts.ROUTER_TASK_GET, request)
    return reply


def prioritize(controller: Controller, settings: Settings, task_id: str, priority: int) -> TaskReply:
    """Change the class of a task."""
    request = PrioritizeTaskRequest(task_id=task_id, priority=priority, credential=settings.credential)
    return controller.ask(contracts.ROUTER_TASK_PRIORITIZE, request)
