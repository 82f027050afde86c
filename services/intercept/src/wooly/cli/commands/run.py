"""The commands `wooly run` and `wooly shell`.

A Python script runs in this process. Another program runs as a child, and the Python processes below it are captured
(`wooly.capture`), as are those that a script starts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from wooly import capture, ranks
from wooly.cli.commands.app import app, err, fail, read_settings, size
from wooly.cli.credits import bill_at_end, bill_line, bill_of
from wooly.control import Controller, connect
from wooly.errors import WoolyError
from wooly.local_stack import begin, fork_executor
from wooly.python_private import end_children
from wooly.settings import Settings
from wooly.visible import VISIBLE, visible

#: Number of lines that the end of a run names. `wooly.waits.TOP` is the same, but imports more.
TOP = 5
#: Seconds of waiting for the network that the end of a run tells about.
NOTICEABLE_S = 0.1


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM",
            help="Path of a Python script; with -m name of a module; or another program, such as torchrun.",
        ),
    ],
    module: Annotated[bool, typer.Option("-m", help="Run a module, like `python -m`.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the script's own output.")] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=8, help="Number of devices; the ranks of torchrun are spread over them.")
    ] = None,
) -> None:
    """Run PROGRAM with its "cuda" operations on a Wooly device. All arguments after PROGRAM are passed to it.

    Python processes that PROGRAM starts use Wooly devices, too, each with a session of its own.
    """
    settings = read_settings()
    if gpus is not None:
        os.environ["WOOLYAI_GPU_COUNT"] = str(gpus)
        settings = settings.model_copy(update={"gpu_count": gpus})
    if not module:
        program = program_of(target)
        if program is not None:
            raise typer.Exit(_run_program([program, *context.args], settings, quiet=quiet))
        if not Path(target).exists():
            why = f"can't open file {target!r}: the file does not exist, and no program in PATH has this name"
            raise fail(FileNotFoundError(why))
    run_python(target, list(context.args), settings, module=module, quiet=quiet)


def run_python(
    target: str,
    arguments: list[str],
    settings: Settings,
    *,
    module: bool,
    quiet: bool,
    opened: Callable[[], Callable[[], str]] | None = None,
) -> NoReturn:
    """Run a Python script or module with a session in this process, and end the process.

    Args:
        target: path of a script, or with `module` the name of a module.
        arguments: its arguments.
        settings: the client's settings.
        module: run a module, like `python -m`.
        quiet: print nothing but the script's own output.
        opened: called before the script, if a session is open. It returns what is called after the script, and returns a line
            for the summary.
    """
    if not settings.model:
        settings = settings.model_copy(update={"model": (target if module else Path(target).name)[:256]})
    started = time.monotonic()
    sys.argv[0] = target  # becomes the name of its sessions
    begin(settings, lends=True)
    fork_executor()
    with err.status("finding a device…") if not quiet and err.is_terminal else contextlib.nullcontext():
        from wooly import api
        from wooly.cli import script

        try:
            api.enable(settings)
        except WoolyError as e:
            raise fail(e) from e
    if not api.has_session() and not quiet:
        err.print(f"[yellow]wooly:[/] {VISIBLE}={os.environ.get(VISIBLE)!r} hides all devices", highlight=False)
    finish = opened() if opened is not None and api.has_session() else None
    with _report() as report:
        os.environ.update(capture.variables(_reach(api.opened_session() if api.has_session() else None), report))
        gc.freeze()  # the first collection would look at all that was imported
        gc.enable()
        code, ended = 0, False

        def end() -> None:
            """Close the session, after the exit functions of the script, and before those of modules that it needs."""
            nonlocal code, ended
            ended = True
            end_children()
            if code == 0:
                code = _finish()
            os.environ.pop(capture.VARIABLE, None)
            seconds = time.monotonic() - started
            if api.has_session():
                stats, session = api.session_stats(), None if quiet else api.opened_session()
                billed = session is not None and session.controlled
                bill = bill_at_end(session) if billed else []
                api.close_at_end(code)
                if not quiet:
                    _summary(stats, seconds, session)
                if billed:
                    err.print(f"       {bill_line(bill)}", highlight=False, soft_wrap=True)
            if finish is not None and (line := finish()) and not quiet:
                err.print(f"       {line}", highlight=False, soft_wrap=True)
            if not quiet and (more := capture.read_report(report)):
                err.print(
                    f"       its processes had {_count(len(more), 'more session')}: {_names(more)}", highlight=False
                )

        atexit.register(end)
        code = script.run(target, arguments, module=module)
        script.finish()
        if not ended:  # the script has removed all exit functions
            end()
    script.flush_files()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit at once: everything is closed and flushed, and interpreter shutdown would free thousands of tensors one by one.
    os._exit(code)


@app.command()
def shell() -> None:
    """Start a shell. Python programs that are started in it use "cuda" on Wooly devices. `exit` leaves it."""
    program = os.environ.get("SHELL") or shutil.which("bash") or "/bin/sh"
    err.print(f'"cuda" is a Wooly device in this shell ({program}); [bold]exit[/] leaves it', highlight=False)
    raise typer.Exit(_run_program([program], read_settings(), quiet=False))


def program_of(target: str) -> str | None:
    """The path of a program that is no Python script; None for a script, folder or archive that this process runs itself."""
    path = Path(target)
    if not path.exists():
        return shutil.which(target, path=capture.variables()["PATH"])
    if path.is_dir() or path.suffix in (".py", ".pyw", ".pyz", ".zip") or not os.access(path, os.X_OK):
        return None
    with path.open("rb") as file:
        first = file.readline(256)
    return None if first.startswith(b"#!") and b"python" in first else str(path.absolute())


@contextlib.contextmanager
def _report() -> Iterator[str]:
    """A file for the sessions of other processes. The first of them makes it, so a run that is killed leaves nothing else."""
    folder = Path(tempfile.gettempdir(), f"wooly-run-{secrets.token_hex(8)}")
    try:
        yield str(folder / "sessions")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reach(opened: Any) -> dict[str, Any]:
    return dict(opened.reach) if opened is not None else {}


def _run_program(command: Sequence[str], settings: Settings, *, quiet: bool) -> int:
    """Run a program whose Python processes are captured. Returns its exit status, as a shell does."""
    started = time.monotonic()
    if not visible(settings.gpu_count) and not quiet:
        err.print(f"[yellow]wooly:[/] {VISIBLE}={os.environ.get(VISIBLE)!r} hides all devices", highlight=False)
    begin(settings)
    with err.status("finding the controller…") if not quiet and err.is_terminal else contextlib.nullcontext():
        try:
            controller = None if settings.executor_url else connect(settings, start=True)
        except WoolyError as e:
            raise fail(e) from e
    with contextlib.closing(controller) if controller else contextlib.nullcontext(), _report() as report:
        reach = controller.reach if controller else {}
        try:
            code = _wait(command, os.environ | capture.variables(reach, report) | {ranks.VARIABLE: ranks.new_id()})
        except OSError as e:
            raise fail(e) from e
        if not quiet:
            _summary_of_processes(capture.read_report(report), time.monotonic() - started, controller)
    return code


def _wait(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a program and wait for it. The terminal sends Ctrl-C to the program, too, so this process only waits."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)
        if not children:
            early.append(number)

    # Set before the program starts: it may end this process at once, or cause a user to.
    passed = [s for s in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)) if s is not None]
    before = [(s, signal.signal(s, _ignore if s == signal.SIGINT else pass_on)) for s in passed]
    try:
        with subprocess.Popen(command, env=environment) as child:
            children.append(child)
            for number in early:
                child.send_signal(number)
            code = child.wait()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _ignore(number: int, frame: object) -> None:
    """Handle a signal without an effect. Unlike SIG_IGN, a program that is started does not inherit this."""


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n:,} {what}s"


def _names(sessions: Sequence[dict[str, Any]], most: int = 4) -> str:
    names = [str(s["session_id"]) for s in sessions[:most]]
    return ", ".join(names) + (", …" if len(sessions) > most else "")


def _summary_of_processes(sessions: Sequence[dict[str, Any]], seconds: float, controller: Controller | None) -> None:
    """Print how many sessions the processes of a program had, with their sums and their bill."""
    sums = {name: sum([s["stats"][name] for s in sessions]) for name in ("operations", "programs", "syncs")}
    sent, received = [sum([s["stats"][name] for s in sessions]) for name in ("bytes_sent", "bytes_received")]
    if not sessions:
        err.print(f"\n[bold]wooly[/]  ran {seconds:.1f} s; no Python process used “cuda”", highlight=False)
        return
    err.print(
        f"\n[bold]wooly[/]  ran {seconds:.1f} s with {_count(len(sessions), 'session')}: {_names(sessions)}\n"
        f"       {sums['operations']:,} operations in {sums['programs']:,} programs, {sums['syncs']:,} waits, "
        f"{size(sent)} up, {size(received)} down",
        highlight=False,
        soft_wrap=True,
    )
    _print_network([s["stats"] for s in sessions])
    if controller is not None:
        bill = bill_line(bill_of(controller, [s["session_id"] for s in sessions]))
        err.print(f"       {bill}", highlight=False, soft_wrap=True)


def _print_network(sessions: Sequence[dict[str, Any]]) -> None:
    """Print how long sessions waited for the network, and at which lines, if the user can notice it."""
    network_s, waiting_s = [sum([s.get(name, 0.0) for s in sessions]) for name in ("network_s", "waiting_s")]
    if network_s < NOTICEABLE_S:
        return
    trip_ms = max([s.get("trip_s", 0.0) for s in sessions]) * 1e3
    err.print(
        f"       waited {waiting_s:.1f} s, {network_s:.1f} s of it for the network (round trip {trip_ms:.3g} ms):",
        highlight=False,
        soft_wrap=True,
    )
    lines: dict[str, tuple[int, float]] = {}
    for each in [line for s in sessions for line in s.get("lines", ())]:
        count, seconds = lines.get(each["line"], (0, 0.0))
        lines[each["line"]] = count + each["waits"], seconds + each["network_s"]
    longest = sorted(lines.items(), key=lambda item: -item[1][1])[:TOP]
    for name, (count, seconds) in longest:
        if seconds >= NOTICEABLE_S / TOP:
            name = name.removeprefix(f"{Path.cwd()}{os.sep}")
            err.print(
                f"         {seconds:.1f} s in {_count(count, 'wait')}: {escape(name)}", highlight=False, soft_wrap=True
            )


def _finish() -> int:
    """Wait for the device, so that errors of the last operations are reported. Returns the exit code."""
    from wooly import api

    try:
        api.synchronize()
    except (RuntimeError, MemoryError) as e:
        module = type(e).__module__
        name = type(e).__qualname__ if module == "builtins" else f"{module}.{type(e).__qualname__}"  # as in a traceback
        err.print(f"[bold red]{name}:[/] {escape(str(e))}", highlight=False, soft_wrap=True)
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
        f"{size(stats['bytes_sent'])} up, {size(stats['bytes_received'])} down",
        highlight=False,
        soft_wrap=True,
    )
    _print_network([stats])
    if opened is None or opened.controlled:
        err.print(f"       more: {_further(opened)}", highlight=False, soft_wrap=True)
