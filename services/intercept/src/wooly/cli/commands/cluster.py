"""Commands for the local stack, nodes and devices."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from wooly_wis.messages import MemoryState

from wooly.cli.commands.app import Json, app, err, fail, out, read_settings, size, stack_module
from wooly.cli.monitor import memory_line, print_top, watch_top
from wooly.cli.tables import Fitted, plain_table
from wooly.control import ControlError, connect
from wooly.errors import WoolyError
from wooly.local_stack import local_stack
from wooly.settings import Settings

if TYPE_CHECKING:
    from wooly_wis.messages import GpuState, WorkDone


@app.command()
def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground, and stop the stack at Ctrl-C.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of executors to start, one per device; default: WOOLYAI_GPU_COUNT."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a local stack: nats-server, all services and executors. It runs until `wooly down`."""
    settings, module = read_settings(), stack_module()
    try:
        with err.status("starting nats-server, router, scheduler, executors and metering…"):
            stack = module.start_stack(settings.state_dir, gpus=gpus or settings.gpu_count)
    except RuntimeError as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps({"state": "up", **_report_of(stack)}), flush=True)
    else:
        places = {
            "web UI": stack.ui_url(),
            "REST": stack.rest_url,
            "NATS": stack.nats_url,
            "files": stack.state_dir,
        }
        out.print("stack is up")
        _print_places(places)
    if foreground:
        try:
            while module.read_stack(settings.state_dir) is not None:
                time.sleep(0.5)
        except KeyboardInterrupt:
            stack.stop()
            if not as_json:
                out.print("stack is down")


@app.command()
def down(as_json: Json = False) -> None:
    """Stop the local stack."""
    settings, module = read_settings(), stack_module()
    with err.status("stopping the stack…"):
        stopped = module.stop_stack(settings.state_dir)
    if as_json:
        print(json.dumps({"state": "down", "stopped": stopped}))
    else:
        out.print("stack is down" if stopped else "no stack was running")


def _report_of(stack: Any) -> dict[str, Any]:
    return {
        "controller_url": stack.nats_url,
        "rest_url": stack.rest_url,
        "services": stack.services,
        "state_dir": str(stack.state_dir),
    }


def _own_stack() -> Any:
    settings, module = read_settings(), stack_module()
    stack = module.read_stack(settings.state_dir)
    if stack is None:
        raise fail(ControlError("no local stack is running; start one with `wooly up`"))
    return stack


@app.command()
def ui() -> None:
    """Print the address of the local stack's web UI. It contains a code that logs in one browser, once, within five minutes."""
    print(_own_stack().ui_url())


@app.command()
def token() -> None:
    """Print the API token of the local stack's owner, for REST: curl -H "Authorization: Bearer $(wooly token)" …."""
    print(_own_stack().token)


@app.command()
def status(as_json: Json = False) -> None:
    """Show the local stack, and the executors and memory that the controller knows."""
    settings, module = read_settings(), local_stack()
    stack = module.read_stack(settings.state_dir) if module is not None and not settings.controller_url else None
    report: dict[str, Any] = {
        "state": "up" if stack else "starting" if _is_starting(settings, module) else "down",
        "controller_url": settings.controller_url or (stack.nats_url if stack else ""),
        "rest_url": stack.rest_url if stack else "",
        "services": stack.services if stack else {},
        "state_dir": str(settings.state_dir),
        "nodes": [],
    }
    problem = ""
    if report["controller_url"]:
        try:
            report["nodes"] = nodes_of(settings)
            report["state"] = "up"
        except WoolyError as e:
            problem = str(e)
            report["state"] = "unreachable"
    if as_json:
        print(json.dumps(report | ({"error": problem} if problem else {})))
    elif report["state"] == "starting":
        out.print("a local stack is starting")
    elif stack is None and not settings.controller_url:
        out.print("no local stack is running; start one with [bold]wooly up[/]")
    else:
        out.print(f"controller {report['controller_url']}  {report['state']}", highlight=False)
        if stack is not None:
            _print_places({"web UI": stack.ui_url(), "REST": stack.rest_url, "files": stack.state_dir})
        _print_places({name: f"pid {pid}" for name, pid in report["services"].items()})
        if problem:
            out.print(f"  {problem}", highlight=False, markup=False)
        print_nodes(report["nodes"])
        _print_memory(report["nodes"])
    if report["state"] != "up":
        raise typer.Exit(1)


def _is_starting(settings: Settings, module: Any) -> bool:
    return module is not None and not settings.controller_url and bool(module.is_starting(settings.state_dir))


def _print_places(places: Mapping[str, object]) -> None:
    for name, place in places.items():
        out.print(f"  {name:12} {place}", highlight=False, soft_wrap=True, markup=False)


def nodes_of(settings: Settings) -> list[dict[str, Any]]:
    """The executors that the controller knows."""
    with closing(connect(settings)) as controller:
        return [n.model_dump(mode="json") for n in controller.nodes().nodes]


def print_nodes(nodes: list[dict[str, Any]]) -> None:
    """Print a table of executors."""
    table = plain_table()
    for column in ("executor", "node", "state", "device", "memory", "sessions", "busy"):
        table.add_column(column)
    for n in nodes:
        memory = f"{size(n['memory_used'])} of {size(n['device']['total_memory'])}"
        busy = f"{100 * n['utilization']:.0f} %"
        table.add_row(n["executor_id"], n["node"], n["state"], n["device"]["name"], memory, str(n["sessions"]), busy)
    out.print(Fitted(table))


def _print_memory(nodes: list[dict[str, Any]]) -> None:
    """Print the memory of each device by tenant and kind."""
    for n in nodes:
        if not n.get("memory"):
            continue
        memory = MemoryState(**n["memory"])
        out.print(f"memory of {n['executor_id']}: {memory_line(memory)}", highlight=False)
        table = plain_table()
        for column in ("  tenant", "sessions", "own", "shared", "swapped"):
            table.add_column(column, justify="left" if column == "  tenant" else "right")
        for tenant in sorted({s.tenant for s in memory.sessions}):
            its = [s for s in memory.sessions if s.tenant == tenant]
            held = (sum(s.own for s in its), sum(s.shared for s in its), sum(s.host + s.disk for s in its))
            table.add_row(f"  {tenant}", str(len(its)), *[size(b) for b in held])
        if memory.sessions:
            out.print(Fitted(table))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print once instead of every second.")] = False,
    as_json: Json = False,
) -> None:
    """Show the use of every GPU by tenant and session, and the shares of generated kernels. Live until Ctrl-C."""

    def read() -> tuple[list[GpuState], dict[str, WorkDone]]:
        gpus = controller.gpus()
        try:
            return gpus, {n.executor_id: n.work for n in controller.nodes().nodes}
        except ControlError:  # the router does not answer; show the scheduler's figures alone
            return gpus, {}

    try:
        with closing(connect(read_settings())) as controller:
            if as_json:
                gpus, work = read()
                rows = [
                    g.model_dump(mode="json") | {"work": work[g.executor_id].model_dump(mode="json")}
                    if g.executor_id in work
                    else g.model_dump(mode="json")
                    for g in gpus
                ]
                print(json.dumps({"gpus": rows}))
            elif once or not out.is_terminal:
                print_top(out, *read())
            else:
                watch_top(out, read)
    except WoolyError as e:
        raise fail(e) from e
