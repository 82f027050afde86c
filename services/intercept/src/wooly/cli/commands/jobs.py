"""Commands for jobs and their results: export, submit, logs, trace."""

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
        str,
        typer.Argument(metavar="SCRIPT:FUNCTION", help="FUNCTION returns the function to export, and example inputs."),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; default: FUNCTION.wism.")
    ] = None,
    blobs: Annotated[
        Path | None,
        typer.Option(help="Write a folder with one file per blob instead; prints the digest of the module."),
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
    except Exception as e:  # an error of the script
        print_error(e)
        raise typer.Exit(1) from e
    sys.stdout.flush()
    os._exit(0)  # as in `run`: do not free thousands of tensors one by one


@app.command()
def submit(
    module: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="File that `wooly export` wrote.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=FILE", help="Input from a .npy or .pt file.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name to show in lists; default: the file's name.")] = "",
    priority: Annotated[int | None, typer.Option(min=0, max=4, help="Class, 0 (highest) to 4.")] = None,
    vram: Annotated[
        int | None, typer.Option(min=1, help="Bytes of device memory to reserve; default: what the module needs.")
    ] = None,
    group: Annotated[list[str] | None, typer.Option(help="Group of nodes to run in; may be repeated.")] = None,
    noswap: Annotated[bool, typer.Option("--noswap", help="Do not swap out the job's memory.")] = False,
    deadline: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which the job fails.")] = None,
    attempts: Annotated[
        int | None, typer.Option(min=1, max=100, help="Maximum number of attempts, if executors are lost.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job has ended; the exit code is 0 if it completed.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the results; waits for the job.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit a module as a job, and print the id of the job."""
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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new steps until the task has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Print the story of a task: its states with times and reasons."""
    code = with_router(lambda jobs, c, settings: jobs.logs(c, settings, task, follow, as_json))
    if code:
        raise typer.Exit(code)


@app.command()
def trace(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Id of a task or trace; without it, list recent traces.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of traces in the list.")] = 20,
    as_json: Json = False,
) -> None:
    """Show the trace of a session or job as a waterfall, with the time in each service."""
    from wooly.cli import traces

    if task is None:
        found = with_router(lambda _, c, settings: traces.recent(c, settings, limit))
        traces.print_recent(out, found, as_json)
    else:
        trace_id, spans = with_router(lambda _, c, settings: traces.read(c, settings, task))
        traces.print_trace(out, trace_id, spans, as_json)
