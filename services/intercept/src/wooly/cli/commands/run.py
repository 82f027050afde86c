"""The command `wooly run`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from wooly.cli.commands.app import app, err, fail, read_settings, size
from wooly.cli.credits import bill_at_end, bill_line
from wooly.control import begin
from wooly.errors import WoolyError


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="Path of the script, or with -m name of the module.")],
    module: Annotated[bool, typer.Option("-m", help="Run a module, like `python -m`.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the script's own output.")] = False,
) -> None:
    """Run SCRIPT with its "cuda" operations on a Wooly device. All arguments after SCRIPT are passed to the script."""
    if not module and not Path(target).exists():
        raise fail(FileNotFoundError(f"can't open file {target!r}: the file does not exist"))
    settings = read_settings()
    if not settings.model:
        settings = settings.model_copy(update={"model": (target if module else Path(target).name)[:256]})
    started = time.monotonic()
    sys.argv[0] = target  # becomes the name of its sessions
    begin(settings)
    with err.status("finding a device…") if not quiet and err.is_terminal else contextlib.nullcontext():
        from wooly import api
        from wooly.cli import script

        try:
            api.enable(settings)
        except WoolyError as e:
            raise fail(e) from e
    code = script.run(target, list(context.args), module=module)
    if code == 0:
        code = _finish()
    stats, seconds = api.session_stats(), time.monotonic() - started
    opened = None if quiet else api.opened_session()
    bill = bill_at_end(opened) if opened is not None else []
    api.disable()
    if not quiet:
        _summary(stats, seconds, opened)
        err.print(f"       {bill_line(bill)}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit at once: everything is closed and flushed, and interpreter shutdown would free thousands of tensors one by one.
    os._exit(code)


def _finish() -> int:
    """Wait for the device, so that errors of the last operations are reported. Returns the exit code."""
    from wooly import api

    try:
        api.synchronize()
    except (RuntimeError, MemoryError) as e:
        err.print(f"[bold red]{type(e).__name__}:[/] {e}", highlight=False, soft_wrap=True)
        return 1
    return 0


def _route(endpoint: str) -> str:
    where = endpoint.partition("#")[0]
    if where.startswith("unix:"):
        return "a unix socket"
    return f"a tunnel through {where}" if where.startswith("nats:") else where


def _further(opened: Any) -> str:
    """Commands that show more about this run. A stack that was started for this run has stopped."""
    if opened is None or opened.ephemeral:
        return "start a stack that stays with [bold]wooly up[/]; [bold]wooly status[/] and [bold]wooly nodes[/] then show it"
    what = "trace" if opened.traced else "logs"
    return f"[bold]wooly {what} {opened.session_id}[/], [bold]wooly top[/], [bold]wooly nodes[/]"


def _summary(stats: dict[str, Any], seconds: float, opened: Any) -> None:
    devices = stats["devices"]
    where = [f"[bold]{d['executor_id']}[/] ({d['node']}, {d['device']}), over {_route(d['endpoint'])}" for d in devices]
    if len(devices) > 1:
        where = [f"\n       cuda:{i} {w}: {devices[i]['operations']:,} operations" for i, w in enumerate(where)]
    err.print(
        f"\n[bold]wooly[/]  ran {seconds:.1f} s on {''.join(where)}\n"
        f"       {stats['operations']:,} operations in {stats['programs']:,} programs, {stats['syncs']:,} waits, "
        f"{size(stats['bytes_sent'])} up, {size(stats['bytes_received'])} down\n"
        f"       more: {_further(opened)}",
        highlight=False,
        soft_wrap=True,
    )
