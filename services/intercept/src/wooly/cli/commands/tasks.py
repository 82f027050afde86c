"""The command `wooly tasks`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any

import typer
from wooly_wis.messages import TaskReply

from wooly.cli.commands.app import Json, app, fail, out, read_settings, with_router
from wooly.control import ControlError, Controller, connect
from wooly.errors import WoolyError
from wooly.settings import Settings

tasks = typer.Typer(name="tasks", help="List tasks (sessions and jobs), or change them.", invoke_without_command=True)
app.add_typer(tasks)
Filter = Annotated[
    list[str] | None,
    typer.Option("--state", help="pending, started, hibernated, completed, failed or cancelled; may be repeated."),
]


@tasks.callback()
def list_tasks(
    context: typer.Context,
    state: Filter = None,
    kind: Annotated[str | None, typer.Option(help="session or job.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Show only this tenant.")] = None,
    text: Annotated[str | None, typer.Option(help="Show only tasks whose id or name contains this text.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of tasks.")] = 30,
    as_json: Json = False,
) -> None:
    """List tasks, newest first, or change a task with one of the commands below."""
    if context.invoked_subcommand is None:
        chosen = {"states": tuple(state or ()), "kind": kind, "tenant": tenant, "text": text, "limit": limit}
        with_router(lambda jobs, c, settings: jobs.list_tasks(c, settings, out, as_json, **chosen))


@tasks.command()
def show(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    as_json: Json = False,
) -> None:
    """Show a task, and the ranks of a program of several processes."""
    with_router(lambda jobs, c, settings: jobs.show(c, settings, out, task, as_json))


@tasks.command()
def cancel(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    reason: Annotated[str, typer.Option(help="Reason, for the task's story.")] = "",
    as_json: Json = False,
) -> None:
    """End a session, a job, or all ranks of a program."""
    reply = with_router(lambda jobs, c, settings: jobs.cancel(c, settings, task, reason))
    if as_json:
        print(json.dumps(reply.task.model_dump(mode="json")))
    else:
        out.print(f"task {task}: {reply.task.state}", highlight=False)


NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait until the session's client has done it.")]
#: Seconds for which commands wait until a session's client has done what it was asked for.
WAIT_S = 60.0


def _asked(ask: Callable[..., TaskReply], until: str, no_wait: bool, as_json: bool) -> None:
    """Ask for a change of a session, wait until its client has made it, and print the last step of its story."""

    def work(jobs: Any, controller: Controller, settings: Settings) -> TaskReply:
        reply = ask(jobs, controller, settings)
        return reply if no_wait else jobs.followed(controller, settings, reply, WAIT_S, until=(until,))

    reply = with_router(work)
    if as_json:
        print(reply.model_dump_json())
    else:
        last = reply.story[-1]
        out.print(f"task {reply.task.task_id}: {last.state}: {last.reason}", highlight=False)


@tasks.command()
def move(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The session's id.")],
    to: Annotated[str, typer.Option("--to", help="Node, executor, group or vendor to use from now on.")] = "",
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Move a running session to another device. Its script waits for a moment, and goes on there."""
    _asked(lambda jobs, c, settings: jobs.move(c, settings, task, to), "started", no_wait, as_json)


@tasks.command()
def hibernate(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The session's id.")],
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Store the memory of a session and free its device, until its script uses it again."""
    _asked(lambda jobs, c, settings: jobs.hibernate(c, settings, task), "hibernated", no_wait, as_json)


@tasks.command()
def wake(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The session's id.")],
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Give a hibernated session a device now, before its script uses it."""
    _asked(lambda jobs, c, settings: jobs.wake(c, settings, task), "started", no_wait, as_json)


SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]


def _steer(as_json: bool, session: str, **changes: Any) -> None:
    from pydantic import ValidationError
    from wooly_wis.messages import SteerSessionRequest

    try:
        request = SteerSessionRequest(session_id=session, **changes)
    except ValidationError as e:
        raise fail(ControlError(f"{session!r} is not valid; it must be the id of a session")) from e
    try:
        with closing(connect(read_settings())) as controller:
            reply = controller.steer(request)
    except WoolyError as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps(reply.model_dump(mode="json")))
    else:
        state = ", suspended" if reply.suspended else ""
        out.print(f"session {session}: P{reply.policy.priority}, weight {reply.policy.weight}{state}", highlight=False)


@tasks.command()
def priority(
    session: SessionArgument,
    number: Annotated[int, typer.Argument(metavar="CLASS", min=0, max=4, help="0 (highest) to 4.")],
    weight: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="Weight of the session in its class.")] = None,
    as_json: Json = False,
) -> None:
    """Change the class of a running or waiting task. --weight needs a running session and the scheduler."""
    if weight is not None:
        _steer(as_json, session, priority=number, weight=weight)
        return
    reply = with_router(lambda jobs, c, settings: jobs.prioritize(c, settings, session, number))
    if as_json:
        print(json.dumps(reply.task.model_dump(mode="json")))
    else:
        out.print(f"task {session}: P{reply.task.priority}, {reply.task.state}", highlight=False)


@tasks.command()
def suspend(session: SessionArgument, as_json: Json = False) -> None:
    """Stop launching the work of a session until it is resumed. Work that it submits waits."""
    _steer(as_json, session, suspended=True)


@tasks.command()
def resume(session: SessionArgument, as_json: Json = False) -> None:
    """Resume a suspended session."""
    _steer(as_json, session, suspended=False)
