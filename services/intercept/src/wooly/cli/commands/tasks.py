"""The command `wooly tasks`."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated, Any

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings, with_router
from wooly.control import ControlError, connect
from wooly.errors import WoolyError

tasks = typer.Typer(name="tasks", help="List tasks (sessions and jobs), or change them.", invoke_without_command=True)
app.add_typer(tasks)
Filter = Annotated[
    list[str] | None, typer.Option("--state", help="pending, started, completed, failed or cancelled; may be repeated.")
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
def cancel(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    reason: Annotated[str, typer.Option(help="Reason, for the task's story.")] = "",
    as_json: Json = False,
) -> None:
    """End a session or a job."""
    reply = with_router(lambda jobs, c, settings: jobs.cancel(c, settings, task, reason))
    if as_json:
        print(json.dumps(reply.task.model_dump(mode="json")))
    else:
        out.print(f"task {task}: {reply.task.state}", highlight=False)


@tasks.command()
def move(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The session's id.")],
    to: Annotated[str, typer.Option("--to", help="Node or executor to use from now on.")] = "",
    as_json: Json = False,
) -> None:
    """Move a running session to another device. Its script waits meanwhile, and goes on there."""
    reply = with_router(lambda jobs, c, settings: jobs.move(c, settings, task, to))
    if as_json:
        print(json.dumps(reply.task.model_dump(mode="json")))
    else:
        out.print(f"task {task}: {reply.task.reason}", highlight=False)


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
