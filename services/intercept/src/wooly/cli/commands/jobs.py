"""The commands about jobs and what became of them: export, submit, logs, trace."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings, with_router
from wooly.control import connect
from wooly.errors import WoolyError


@app.command()
def export(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT:FUNCTION", help="FUNCTION returns what to export, and example inputs.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; FUNCTION.wism by default.")
    ] = None,
    blobs: Annotated[
        Path | None, typer.Option(help="A folder instead, with a file per blob; prints the module's digest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Record a computation as a module that `wooly submit` runs as a job."""
    from wooly.cli import jobs
    from wooly.cli.script import print_error

    try:
        jobs.export(target, output, blobs, out, as_json)
    except (WoolyError, NotImplementedError, OSError) as e:
        raise fail(e) from e
    except Exception as e:  # the script's own
        print_error(e)
        raise typer.Exit(1) from e
    sys.stdout.flush()
    os._exit(0)  # as in `run`: thousands of tensors need not die one by one


@app.command()
def submit(
    module: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `wooly export` wrote.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=FILE", help="An input: .npy or .pt.")
    ] = None,
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    priority: Annotated[int | None, typer.Option(min=0, max=4, help="0 (highest) to 4.")] = None,
    vram: Annotated[int | None, typer.Option(min=1, help="Bytes to reserve; what the module needs by default.")] = None,
    group: Annotated[list[str] | None, typer.Option(help="Node groups to run in.")] = None,
    noswap: Annotated[bool, typer.Option("--noswap", help="It must not be swapped out.")] = False,
    deadline: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which it fails.")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, max=100, help="Tries, if executors are lost.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended; the exit code says how.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the results; waits for them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a module as a job. Prints its id."""
    from wooly.cli import jobs

    settings = read_settings()
    try:
        with closing(connect(settings)) as controller:
            access = controller.access
        code = jobs.submit(
            settings,
            access,
            module,
            inputs or [],
            wait,
            output,
            as_json,
            name=name or module.stem,
            priority=settings.priority if priority is None else priority,
            weight=settings.weight,
            required_vram=vram or settings.required_vram,
            gpu_mode=settings.gpu_mode,
            node_groups=tuple(group or settings.node_groups),
            noswap=noswap or not settings.swap_from_vram,
            deadline_s=deadline,
            attempts=attempts,
        )
    except WoolyError as e:
        raise fail(e) from e
    if code:
        raise typer.Exit(code)


@app.command()
def logs(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Print what happened to a task: its states with times and reasons."""
    code = with_router(lambda jobs, c, settings: jobs.logs(c, settings, task, follow, as_json))
    if code:
        raise typer.Exit(code)


@app.command()
def trace(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="A task's id, or a trace's; without, recent traces.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many traces, the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """Show where a session's or job's time went, in all services: its trace as a waterfall."""
    from wooly.cli import traces

    if task is None:
        found = with_router(lambda _, c, settings: traces.recent(c, settings, limit))
        traces.print_recent(out, found, as_json)
    else:
        trace_id, spans = with_router(lambda _, c, settings: traces.read(c, settings, task))
        traces.print_trace(out, trace_id, spans, as_json)
