"""The commands of `wooly`; `wooly --help` lists them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from wooly_bus.errors import shown
from wooly_wis.messages import MemoryState

from wooly import __version__
from wooly.cli.credits import as_csv, bill_at_end, bill_line, credits_of, print_credits, read_credits
from wooly.cli.monitor import memory_line, print_top, watch_top
from wooly.control import ControlError, begin, connect, local_stack
from wooly.errors import WoolyError
from wooly.settings import Settings

if TYPE_CHECKING:
    from wooly_wis.messages import GpuState, JitMode, WorkDone

app = typer.Typer(
    name="wooly",
    help="Run PyTorch programs that say “cuda” on devices elsewhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def main() -> None:
    """Entry point of the `wooly` command."""
    app()


def _fail(error: Exception) -> typer.Exit:
    err.print(f"[bold red]wooly:[/] {error}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _stack_module() -> Any:
    module = local_stack()
    if module is None:
        raise _fail(ControlError("the local stack is not installed here; install wooly-local"))
    return module


def _settings() -> Settings:
    try:
        return Settings()
    except ValueError as e:
        raise _fail(e) from e


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")],
    module: Annotated[bool, typer.Option("-m", help="Run a module, like `python -m`.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the script's own output.")] = False,
) -> None:
    """Run SCRIPT with its "cuda" work on a Wooly device; everything after SCRIPT belongs to it."""
    if not module and not Path(target).exists():
        raise _fail(FileNotFoundError(f"can't open file {target!r}: no such file"))
    settings = _settings()
    if not settings.model:
        settings = settings.model_copy(update={"model": (target if module else Path(target).name)[:256]})
    started = time.monotonic()
    sys.argv[0] = target  # its sessions are called so
    begin(settings)
    with err.status("finding a device…") if not quiet and err.is_terminal else contextlib.nullcontext():
        from wooly import api
        from wooly.cli import script

        try:
            api.enable(settings)
        except WoolyError as e:
            raise _fail(e) from e
    code = script.run(target, list(context.args), module=module)
    if code == 0:
        code = _finish()
    stats, seconds = api.session_stats(), time.monotonic() - started
    opened = None if quiet else api.opened_session()
    bill = bill_at_end(opened) if opened is not None else []
    api.disable()
    if not quiet:
        _summary(stats, seconds)
        err.print(f"       {bill_line(bill)}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would let thousands of tensors die one by one; everything is closed and flushed already.
    os._exit(code)


def _finish() -> int:
    """Wait for the device, so that an error of the last operations is not lost."""
    from wooly import api

    try:
        api.synchronize()
    except (RuntimeError, MemoryError) as e:
        err.print(f"[bold red]{type(e).__name__}:[/] {e}", highlight=False, soft_wrap=True)
        return 1
    return 0


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return ""


def _route(endpoint: str) -> str:
    where = endpoint.partition("#")[0]
    if where.startswith("unix:"):
        return "a unix socket"
    return f"a tunnel through {where}" if where.startswith("nats:") else where


def _summary(stats: dict[str, Any], seconds: float) -> None:
    devices = stats["devices"]
    where = [f"[bold]{d['executor_id']}[/] ({d['node']}, {d['device']}), over {_route(d['endpoint'])}" for d in devices]
    if len(devices) > 1:
        where = [f"\n       cuda:{i} {w}: {devices[i]['operations']:,} operations" for i, w in enumerate(where)]
    err.print(
        f"\n[bold]wooly[/]  ran {seconds:.1f} s on {''.join(where)}\n"
        f"       {stats['operations']:,} operations in {stats['programs']:,} programs, {stats['syncs']:,} waits, "
        f"{_size(stats['bytes_sent'])} up, {_size(stats['bytes_received'])} down\n"
        "       look further: [bold]wooly up[/] keeps a stack running, then [bold]wooly status[/] and "
        "[bold]wooly nodes[/] show it",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def up(
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, and stop the stack at Ctrl-C.")] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Executors to start, one per device; WOOLYAI_GPU_COUNT of them by default."),
    ] = None,
) -> None:
    """Start a local stack: nats-server, all services and executors, kept running until `wooly down`."""
    settings, module = _settings(), _stack_module()
    try:
        with err.status("starting nats-server, router, scheduler, executors and metering…"):
            stack = module.start_stack(settings.state_dir, gpus=gpus or settings.gpu_count)
    except RuntimeError as e:
        raise _fail(e) from e
    places = {
        "web UI": f"{stack.rest_url}/ui/",
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
            out.print("stack is down")


@app.command()
def down() -> None:
    """Stop the local stack."""
    settings, module = _settings(), _stack_module()
    stopped = module.stop_stack(settings.state_dir)
    out.print("stack is down" if stopped else "no stack was running")


@app.command()
def status(as_json: Json = False) -> None:
    """Show the local stack and what the controller knows."""
    settings, module = _settings(), local_stack()
    stack = module.read_stack(settings.state_dir) if module is not None and not settings.controller_url else None
    report: dict[str, Any] = {
        "state": "up" if stack else "down",
        "controller_url": settings.controller_url or (stack.nats_url if stack else ""),
        "rest_url": stack.rest_url if stack else "",
        "services": stack.services if stack else {},
        "state_dir": str(settings.state_dir),
        "nodes": [],
    }
    problem = ""
    if report["controller_url"]:
        try:
            report["nodes"] = _nodes(settings)
            report["state"] = "up"
        except WoolyError as e:
            problem = str(e)
            report["state"] = "unreachable"
    if as_json:
        print(json.dumps(report | ({"error": problem} if problem else {})))
    elif stack is None and not settings.controller_url:
        out.print("no stack is running here; start one with [bold]wooly up[/]")
    else:
        out.print(f"controller {report['controller_url']}  {report['state']}", highlight=False)
        if stack is not None:
            _print_places({"web UI": f"{stack.rest_url}/ui/", "REST": stack.rest_url, "files": stack.state_dir})
        _print_places({name: f"pid {pid}" for name, pid in report["services"].items()})
        if problem:
            out.print(f"  {problem}", highlight=False)
        _print_nodes(report["nodes"])
        _print_memory(report["nodes"])
    if report["state"] != "up":
        raise typer.Exit(1)


def _print_places(places: Mapping[str, object]) -> None:
    for name, place in places.items():
        out.print(f"  {name:12} {place}", highlight=False, soft_wrap=True)


def _nodes(settings: Settings) -> list[dict[str, Any]]:
    controller = connect(settings)
    try:
        return [n.model_dump(mode="json") for n in controller.nodes().nodes]
    finally:
        controller.close()


def _print_nodes(nodes: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("executor", "node", "state", "device", "memory", "sessions", "busy"):
        table.add_column(column)
    for n in nodes:
        memory = f"{_size(n['memory_used'])} of {_size(n['device']['total_memory'])}"
        busy = f"{100 * n['utilization']:.0f} %"
        table.add_row(n["executor_id"], n["node"], n["state"], n["device"]["name"], memory, str(n["sessions"]), busy)
    out.print(table)


def _print_memory(nodes: list[dict[str, Any]]) -> None:
    """Whose memory it is, and of what kind, per device."""
    for n in nodes:
        if not n.get("memory"):
            continue
        memory = MemoryState(**n["memory"])
        out.print(f"memory of {n['executor_id']}: {memory_line(memory)}", highlight=False)
        table = Table(box=None, pad_edge=False)
        for column in ("  tenant", "sessions", "own", "shared", "swapped"):
            table.add_column(column, justify="left" if column == "  tenant" else "right")
        for tenant in sorted({s.tenant for s in memory.sessions}):
            its = [s for s in memory.sessions if s.tenant == tenant]
            held = (sum(s.own for s in its), sum(s.shared for s in its), sum(s.host + s.disk for s in its))
            table.add_row(f"  {tenant}", str(len(its)), *[_size(b) for b in held])
        if memory.sessions:
            out.print(table)


@app.command()
def nodes(as_json: Json = False) -> None:
    """List the executors that the controller knows."""
    try:
        found = _nodes(_settings())
    except WoolyError as e:
        raise _fail(e) from e
    if as_json:
        print(json.dumps({"nodes": found}))
    else:
        _print_nodes(found)


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once instead of every second.")] = False,
    as_json: Json = False,
) -> None:
    """Show live what every GPU, tenant and session does, as the scheduler follows it, and who computes. Ctrl-C ends it."""
    try:
        controller = connect(_settings())

        def read() -> tuple[list[GpuState], dict[str, WorkDone]]:
            gpus = controller.gpus()
            try:
                return gpus, {n.executor_id: n.work for n in controller.nodes().nodes}
            except ControlError:  # the scheduler's part needs no router
                return gpus, {}

        try:
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
        finally:
            controller.close()
    except WoolyError as e:
        raise _fail(e) from e


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
) -> None:
    """Record a computation as a module that `wooly submit` runs as a job."""
    from wooly.cli import jobs

    try:
        jobs.export(target, output, blobs, out)
    except (WoolyError, NotImplementedError) as e:
        raise _fail(e) from e
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

    settings = _settings()
    try:
        access = jobs.with_controller(lambda: connect(settings), lambda c: c.access)
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
        raise _fail(e) from e
    if code:
        raise typer.Exit(code)


@app.command()
def logs(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Print what happened to a task: its states with times and reasons."""
    code = _with_router(lambda jobs, c, settings: jobs.logs(c, settings, task, follow, as_json))
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
        found = _with_router(lambda _, c, settings: traces.recent(c, settings, limit))
        traces.print_recent(out, found, as_json)
    else:
        trace_id, spans = _with_router(lambda _, c, settings: traces.read(c, settings, task))
        traces.print_trace(out, trace_id, spans, as_json)


def _with_router(work: Callable[[Any, Any, Settings], Any]) -> Any:
    from pydantic import ValidationError

    from wooly.cli import jobs

    try:
        settings = _settings()
        return jobs.with_controller(lambda: connect(settings), lambda controller: work(jobs, controller, settings))
    except ValidationError as e:
        raise _fail(ControlError(f"that is not the id of a task, or not a state: {e.errors()[0]['input']!r}")) from e
    except WoolyError as e:
        raise _fail(e) from e


tasks = typer.Typer(name="tasks", help="List tasks (sessions and jobs), or change them.", invoke_without_command=True)
app.add_typer(tasks)
Filter = Annotated[
    list[str] | None, typer.Option("--state", help="pending, started, completed, failed or cancelled; repeat it.")
]


@tasks.callback()
def list_tasks(
    context: typer.Context,
    state: Filter = None,
    kind: Annotated[str | None, typer.Option(help="session or job.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of one tenant only.")] = None,
    text: Annotated[str | None, typer.Option(help="In their ids and names.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many, the newest.")] = 30,
    as_json: Json = False,
) -> None:
    """List tasks, newest first; or change one with a command below."""
    if context.invoked_subcommand is None:
        chosen = {"states": tuple(state or ()), "kind": kind, "tenant": tenant, "text": text, "limit": limit}
        _with_router(lambda jobs, c, settings: jobs.list_tasks(c, settings, out, as_json, **chosen))


@tasks.command()
def cancel(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    reason: Annotated[str, typer.Option(help="Why, for its story.")] = "",
    as_json: Json = False,
) -> None:
    """End a session or a job."""
    reply = _with_router(lambda jobs, c, settings: jobs.cancel(c, settings, task, reason))
    if as_json:
        print(json.dumps(reply.task.model_dump(mode="json")))
    else:
        out.print(f"task {task}: {reply.task.state}", highlight=False)


SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")]


def _steer(as_json: bool, session: str, **changes: Any) -> None:
    from pydantic import ValidationError
    from wooly_wis.messages import SteerSessionRequest

    try:
        request = SteerSessionRequest(session_id=session, **changes)
    except ValidationError as e:
        raise _fail(ControlError(f"{session!r} is not the id of a session")) from e
    try:
        controller = connect(_settings())
        try:
            reply = controller.steer(request)
        finally:
            controller.close()
    except WoolyError as e:
        raise _fail(e) from e
    if as_json:
        print(json.dumps(reply.model_dump(mode="json")))
    else:
        state = ", suspended" if reply.suspended else ""
        out.print(f"session {session}: P{reply.policy.priority}, weight {reply.policy.weight}{state}", highlight=False)


@tasks.command()
def priority(
    session: SessionArgument,
    number: Annotated[int, typer.Argument(metavar="CLASS", min=0, max=4, help="0 (highest) to 4.")],
    weight: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="Its share inside the class.")] = None,
    as_json: Json = False,
) -> None:
    """Give a task another class, also while it waits; a weight needs a running session and the scheduler."""
    if weight is not None:
        _steer(as_json, session, priority=number, weight=weight)
        return
    reply = _with_router(lambda jobs, c, settings: jobs.prioritize(c, settings, session, number))
    if as_json:
        print(json.dumps(reply.task.model_dump(mode="json")))
    else:
        out.print(f"task {session}: P{reply.task.priority}, {reply.task.state}", highlight=False)


@tasks.command()
def suspend(session: SessionArgument, as_json: Json = False) -> None:
    """Launch nothing more of a session until it is resumed; what it submits waits."""
    _steer(as_json, session, suspended=True)


@tasks.command()
def resume(session: SessionArgument, as_json: Json = False) -> None:
    """Let a suspended session take part again."""
    _steer(as_json, session, suspended=False)


weights = typer.Typer(name="weights", help="Keep models on the devices ahead of time.", no_args_is_help=True)
app.add_typer(weights)


def _with_all_devices(work: Callable[[list[Any]], Any]) -> Any:
    """What `work` makes of the links to all executors, of a session that shares contents."""
    from wooly import api
    from wooly.storage import MAX_DEVICES

    settings = _settings()
    try:
        alive = [n for n in _nodes(settings) if n["state"] == "alive"]
        changes: dict[str, Any] = {"gpu_count": max(1, min(len(alive), MAX_DEVICES))}
        if settings.dedup == "off":
            changes["dedup"] = "tenant"
        api.enable(settings.model_copy(update=changes))
        try:
            return work(api.attached_links())
        finally:
            api.disable()
    except WoolyError as e:
        raise _fail(e) from e


@weights.command("add")
def weights_add(
    path: Annotated[Path, typer.Argument(help="A file of weights (.safetensors, .pt, .bin), or a folder of them.")],
    name: Annotated[str, typer.Option("--name", help="What to call them; default: the path's last part.")] = "",
    as_json: Json = False,
) -> None:
    """Load a model's weights onto every executor and keep them there: sessions that load them then send nothing."""
    from wooly.cli.weights import load_and_pin

    name = name or path.resolve().name
    try:
        found = _with_all_devices(lambda links: load_and_pin(path, name, links))
    except (OSError, ValueError) as e:
        raise _fail(e) from e
    if as_json:
        print(json.dumps(found))
    else:
        where = f"{found['executors']} executor" + "s" * (found["executors"] > 1)
        out.print(f"{name}: {found['tensors']} tensors, {_size(found['bytes'])} kept on {where}", highlight=False)


@weights.command("list")
def weights_list(as_json: Json = False) -> None:
    """List what is kept, on each executor."""
    found = _with_all_devices(
        lambda links: [{"executor": link.where} | pin for link in links for pin in link.pin("list")["pins"]]
    )
    if as_json:
        print(json.dumps({"weights": found}))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "tensors", "shared with", "executor"):
        table.add_column(column)
    for pin in found:
        table.add_row(pin["name"], _size(pin["bytes"]), str(pin["tensors"]), pin["scope"], pin["executor"])
    out.print(table if found else "nothing is kept; `wooly weights add PATH` keeps a model")


@weights.command("rm")
def weights_rm(
    name: Annotated[str, typer.Argument(help="As `wooly weights list` says.")], as_json: Json = False
) -> None:
    """Let go of weights; who uses them keeps them."""
    removed = _with_all_devices(lambda links: sum(link.pin("remove", name)["removed"] for link in links))
    if as_json:
        print(json.dumps({"removed": removed}))
    elif removed:
        out.print(f"{name}: let go on {removed} executor" + "s" * (removed > 1), highlight=False)
    if not removed:
        raise _fail(WoolyError(f"there are no weights called {name!r}; `wooly weights list` shows those that are kept"))


credits = typer.Typer(name="credits", help="Show what was spent, and set what may be.", invoke_without_command=True)
app.add_typer(credits)


@credits.callback()
def show_credits(
    context: typer.Context,
    by: Annotated[str, typer.Option(help="Sum by run, model or hour.")] = "run",
    tenant: Annotated[str, typer.Option(help="Of this tenant only.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows to show.")] = 20,
    as_json: Json = False,
    as_table: Annotated[bool, typer.Option("--csv", help="Print rows as CSV, in whole numbers.")] = False,
) -> None:
    """Show the balance, and what was spent by run, model or hour. Amounts in files are micro-credits."""
    if context.invoked_subcommand is not None:
        return
    from wooly_wis.credits import CreditsRequest

    if by not in ("run", "model", "hour"):
        raise _fail(ControlError(f"--by {by}: there are run, model and hour"))
    try:
        controller = connect(_settings())
        try:
            reply = read_credits(controller, CreditsRequest(by=by, tenant=tenant), limit)  # type: ignore[arg-type]
        finally:
            controller.close()
    except WoolyError as e:
        raise _fail(e) from e
    if as_json:
        print(json.dumps(reply.model_dump(mode="json")))
    elif as_table:
        print(as_csv(reply.rows), end="")
    else:
        print_credits(out, reply, by)


@credits.command()
def budget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    soft: Annotated[float | None, typer.Option(min=0, help="Credits at which an event is sent.")] = None,
    hard: Annotated[float | None, typer.Option(min=0, help="Credits at which its sessions are suspended.")] = None,
    period: Annotated[str, typer.Option(help="Of what is spent in total, or each UTC month or day.")] = "total",
    as_json: Json = False,
) -> None:
    """Set a tenant's budget: these limits and no others. Suspended sessions go on if it is enough."""
    from pydantic import ValidationError
    from wooly_bus import subjects
    from wooly_wis.credits import BudgetState, SetBudgetRequest

    amounts = {name: None if n is None else round(n * 1e6) for name, n in (("soft_ucr", soft), ("hard_ucr", hard))}
    try:
        request = SetBudgetRequest.model_validate({"tenant": tenant, "period": period} | amounts)
    except ValidationError as e:
        raise _fail(ControlError(f"that is no budget: {e.errors()[0]['msg']}")) from e
    try:
        controller = connect(_settings())
        try:
            state: BudgetState = controller.ask_metering(subjects.METERING_BUDGET_SET, request, BudgetState, 10.0)
        finally:
            controller.close()
    except WoolyError as e:
        raise _fail(e) from e
    if as_json:
        print(json.dumps(state.model_dump(mode="json")))
    else:
        suspended = "; its sessions are suspended" if state.held else ""
        out.print(f"tenant {tenant}: {credits_of(state.spent_ucr)} credits spent{suspended}", highlight=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def doctor(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="[SCRIPT]", help="With --fallbacks: what to run meanwhile.")] = "",
    as_json: Json = False,
    fallbacks: Annotated[
        bool, typer.Option("--fallbacks", help="Count what the CPU here computes in the device's stead.")
    ] = False,
) -> None:
    """Check everything that a run needs, and say how to mend what is missing."""
    if fallbacks:
        raise typer.Exit(_count_fallbacks(script, list(context.args), as_json))
    checks: list[dict[str, Any]] = []

    def check(name: str, probe: Callable[[], str]) -> bool:
        try:
            checks.append({"check": name, "ok": True, "detail": probe()})
        except Exception as e:
            checks.append({"check": name, "ok": False, "detail": str(e)})
        return bool(checks[-1]["ok"])

    check("python", _check_python)
    check("torch", _check_torch)
    settings: list[Settings] = []
    if check("configuration", lambda: settings.append(Settings()) or "valid"):  # type: ignore[func-returns-value]
        if _starts_its_own(settings[0]):
            detail = "none is running: each run starts a stack of its own; `wooly up` keeps one, and runs begin sooner"
            checks.append({"check": "controller", "ok": True, "detail": detail})
            begin(settings[0])
        else:
            check("controller", lambda: shown(connect(settings[0]).url))
            check("executor", lambda: _check_executor(settings[0]))
        check("round trip", _check_round_trip)
    if as_json:
        print(json.dumps({"ok": all(c["ok"] for c in checks), "checks": checks}))
    else:
        for c in checks:
            out.print(
                f"{'[green]ok  [/]' if c['ok'] else '[red]FAIL[/]'} {c['check']:14} {c['detail']}",
                highlight=False,
                soft_wrap=True,
            )
    sys.stdout.flush()
    if not all(c["ok"] for c in checks):
        raise typer.Exit(1)


def _starts_its_own(settings: Settings) -> bool:
    module = None if settings.controller_url else local_stack()
    return module is not None and module.read_stack(settings.state_dir) is None


def _count_fallbacks(script: str, arguments: list[str], as_json: bool) -> int:
    """Run a script, or a small training, and count the fallbacks meanwhile. Returns the exit code."""
    if script and not Path(script).exists():
        raise _fail(FileNotFoundError(f"can't open file {script!r}: no such file"))
    from wooly import api
    from wooly.cli import script as runner
    from wooly.fallbacks import Fallbacks

    try:
        api.enable(_settings())
    except WoolyError as e:
        raise _fail(e) from e
    device = api.attached_device()
    with Fallbacks(device) as counted:
        code = runner.run(script, arguments, module=False) if script else _exercise()
    inferences = device.generic.inferences
    api.disable()
    found = counted.found
    report = {
        "ok": not found,
        "operations": counted.calls,
        "fallbacks": dict(sorted(found.items())),
        "inferences": {
            "on_meta": inferences.on_meta,
            "on_host_zeros": inferences.on_host,
            "trials_on_host_zeros": inferences.trials,
        },
    }
    if as_json:
        print(json.dumps(report))
    else:
        out.print(
            f"{counted.calls:,} operations on device tensors, of which the CPU here computed {found.total():,}\n"
            f"signatures inferred: {inferences.on_meta:,} without memory, {inferences.on_host:,} on zeros; "
            f"{inferences.trials:,} tried on zeros for their errors (no device data in any of them)",
            highlight=False,
            soft_wrap=True,
        )
        for name, n in found.most_common():
            out.print(f"  [red]{name}[/] {n:,}", highlight=False)
    sys.stdout.flush()
    return code or (1 if found else 0)


def _exercise() -> int:
    """A few training steps that use a bit of everything."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("cuda")
    body = torch.nn.Sequential(torch.nn.Conv1d(16, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.Flatten()).to("cuda")
    recurrent, head = torch.nn.LSTM(48, 16).to("cuda"), torch.nn.Linear(16, 10).to("cuda")
    parameters = [p for m in (encoder, body, recurrent, head) for p in m.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    x, y = torch.randn(4, 8, 16, device="cuda"), torch.randint(10, (4,), device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        hidden, _state = recurrent(body(encoder(x).transpose(1, 2))[None])
        loss = functional.cross_entropy(head(hidden[0]), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    kept = x[x > 0].sort().values.unique()
    print(f"loss {loss.item():.4f}, {len(kept)} of {x.numel()} kept", file=sys.stderr)
    return 0


def _check_python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise RuntimeError(f"Python {platform.python_version()}; Wooly is tested with 3.11 and 3.12")
    return platform.python_version()


def _check_torch() -> str:
    import torch

    release = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= release <= (2, 13):
        raise RuntimeError(
            f"torch {torch.__version__}; Wooly is checked against 2.11 to 2.13: pip install torch==2.13.0"
        )
    return str(torch.__version__)


def _check_executor(settings: Settings) -> str:
    alive = [n for n in _nodes(settings) if n["state"] == "alive"]
    if not alive:
        raise RuntimeError("no executor is registered; start one with `wooly up` or `python -m wooly_executor`")
    return ", ".join(n["executor_id"] for n in alive)


def _check_round_trip() -> str:
    import torch

    from wooly import api

    api.enable()
    try:
        x = torch.ones(2, device="cuda")
        value, took = 0.0, float("inf")
        for _ in range(5):  # what is done first takes longer
            started = time.perf_counter()
            value = float((x + 1).sum())
            took = min(took, time.perf_counter() - started)
    finally:
        api.disable()
    if value != 4.0:
        raise RuntimeError(f"1+1 twice gave {value}")
    return f"{took * 1e6:.0f} µs"


@app.command()
def disasm(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A program in WIS's binary form.")],
    passes: Annotated[
        bool, typer.Option("--passes", help="Print what each pass of the compiler makes of it, too (asks a compiler).")
    ] = False,
    jit: Annotated[
        str, typer.Option(help="With --passes: exact, only kernels with the library's own bits; or full.")
    ] = "full",
    target: Annotated[str, typer.Option(help="With --passes: what to compile for; any CPU by default.")] = "",
    as_json: Json = False,
) -> None:
    """Print a WIS program as assembly."""
    from wooly_wis.assembly import disassemble
    from wooly_wis.codec import decode_program
    from wooly_wis.errors import WisError

    if jit not in ("exact", "full"):
        raise _fail(ControlError(f"--jit {jit}: there are exact and full"))
    raw = file.read_bytes()
    try:
        stages = [("program", disassemble(decode_program(raw)))]
        if passes:
            controller = connect(_settings())
            try:
                stages += controller.passes(raw, target, cast("JitMode", jit))
            finally:
                controller.close()
    except (WisError, WoolyError) as e:
        raise _fail(e) from e
    if as_json:
        print(json.dumps({"stages": [{"pass": name, "text": text} for name, text in stages]}))
    elif not passes:
        print(stages[0][1], end="")
    else:
        print("\n".join([f"; {'after ' if k else ''}{name}\n{text}" for k, (name, text) in enumerate(stages)]), end="")


@app.command()
def version() -> None:
    """Print Wooly's version."""
    print(__version__)
