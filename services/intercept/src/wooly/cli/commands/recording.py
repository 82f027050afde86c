"""The commands `wooly record` and `wooly replay`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from wooly.cli.commands.app import Json, app, err, fail, out, read_settings, size
from wooly.cli.commands.run import program_of, run_python
from wooly.cli.tables import Fitted, plain_table
from wooly.errors import WoolyError
from wooly.local_stack import begin
from wooly.visible import VISIBLE, visible

if TYPE_CHECKING:
    from wooly.recording.bundle import Bundle
    from wooly.recording.compare import Compared, Pair
    from wooly.recording.replay import Difference, Replayed, Stop
    from wooly.recording.tensors import LiveTensor
    from wooly.settings import Settings

#: Number of differences and errors that are printed.
_SHOWN = 5


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def record(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="Path of a Python script; with -m name of a module.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write, a bundle.")],
    module: Annotated[bool, typer.Option("-m", help="Run a module, like `python -m`.")] = False,
    no_data: Annotated[
        bool,
        typer.Option("--no-data", help="Keep no contents: only programs, sizes, names of operators and Python lines."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but the script's own output.")] = False,
) -> None:
    """Run PROGRAM as `wooly run` does, and keep what its session sends in a file, for `wooly replay`.

    Only sessions with one device can be recorded, and only the session of this process.
    """
    settings = read_settings()
    if settings.gpu_count > 1:
        raise fail(WoolyError("only sessions with one device can be recorded: set WOOLYAI_GPU_COUNT=1"))
    if not visible(1):
        raise fail(
            WoolyError(f"{VISIBLE}={os.environ.get(VISIBLE)!r} hides all devices, so there is nothing to record")
        )
    if not module and program_of(target) is not None:
        raise fail(WoolyError(f"{target} is no Python script; `wooly record` runs a script, or a module with -m"))
    if not module and not Path(target).exists():
        raise fail(WoolyError(f"can't open file {target!r}: the file does not exist"))
    if not output.absolute().parent.is_dir():
        raise fail(WoolyError(f"the folder {output.absolute().parent} does not exist"))
    name = target if module else Path(target).name

    def opened() -> Callable[[], str]:
        from wooly import api
        from wooly.recording import record

        (link,) = api.attached_links()
        try:
            recording = record.begin(output, link, name, settings.jit, data=not no_data, say=_say)
        except WoolyError as e:
            api.disable()
            raise fail(e) from e

        def finish() -> str:
            nbytes = recording.end()
            where = f"{escape(str(output))} ({size(nbytes)})"
            return f"recorded {recording.frames:,} frames in {where}: [bold]wooly replay[/] plays it"

        return finish

    run_python(target, list(context.args), settings, module=module, quiet=quiet, opened=opened)


def _say(line: str) -> None:
    err.print(line, highlight=False, soft_wrap=True, markup=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle that `wooly record` wrote.")],
    info: Annotated[bool, typer.Option("--info", help="Print what the bundle holds, and replay nothing.")] = False,
    until: Annotated[
        str,
        typer.Option(
            metavar="FRAME|FILE:LINE",
            help="Stop after the frame with this number, or after the last instruction that this Python line made, and print "
            "the live tensors.",
        ),
    ] = "",
    against: Annotated[
        Literal["torch_cpu", "opencl", "cuda", "hip", ""],
        typer.Option(help="Play on an executor with this runtime, too, and name the first instruction that differs."),
    ] = "",
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="With --against: difference to accept, relative to the largest number of a result."),
    ] = 0.0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.pt", help="With --until: save the live tensors as a dict, by name.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="With --until: start Python with the dict `tensors`.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs of a bundle without contents.")] = 0,
    as_json: Json = False,
) -> None:
    """Play a bundle again, without its script, and compare what it reads. The exit status is 1 if anything differs.

    It runs on the executor that `wooly run` would use.
    """
    if (save is not None or interactive) and not until:
        raise fail(WoolyError("--save and --interactive need --until, which says where to stop"))
    if against and (save is not None or interactive):
        raise fail(WoolyError("--against shows no tensors; use --until without it"))
    if interactive and as_json:
        raise fail(WoolyError("--interactive and --json cannot be used together"))
    if save is not None and not save.absolute().parent.is_dir():
        raise fail(WoolyError(f"the folder {save.absolute().parent} does not exist"))
    try:
        from wooly.recording.bundle import Bundle

        with Bundle(file) as bundle:
            if info:
                _print_info(bundle, as_json=as_json)
                return
            if bundle.dropped or not bundle.complete:
                _say(f"wooly: {_incomplete(bundle)}")
            if not bundle.frames:
                raise WoolyError(f"{file} has no frames: the script used no device")
            settings = read_settings()
            begin(settings)
            if against:
                _against(bundle, settings, against, until, tolerance, seed, as_json=as_json)
            else:
                _replay(bundle, settings, until, seed, save, interactive=interactive, as_json=as_json)
    except WoolyError as e:
        raise fail(Exception(escape(str(e)))) from e
    except MemoryError as e:
        raise fail(
            WoolyError("this process has no memory for a buffer of the recording; replay on a larger machine")
        ) from e


def _incomplete(bundle: Bundle) -> str:
    dropped = (
        f", and its last {bundle.dropped} bytes are an incomplete record, which is left out" if bundle.dropped else ""
    )
    return f"the recording did not end normally; it has {bundle.frames:,} frames{dropped}"


# -- playing ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows the number of the frame that is played."""
    if quiet or not err.is_terminal:
        yield lambda frame: None
        return
    with err.status("opening a session…") as status:
        yield lambda frame: status.update(f"frame {frame:,} of {total:,}") if not frame % 16 else None


def _replay(
    bundle: Bundle,
    settings: Settings,
    until: str,
    seed: int,
    save: Path | None,
    *,
    interactive: bool,
    as_json: bool,
) -> None:
    from wooly.recording.programs import Programs
    from wooly.recording.replay import Inputs, Player, Stop, find_stop, jit_of, replay
    from wooly.recording.sessions import session
    from wooly.recording.tensors import live_tensors

    programs = Programs(bundle)
    stop = find_stop(bundle, until) if until else Stop(bundle.frames)
    inputs = Inputs(bundle, programs, seed)
    with session(settings, jit_of(bundle)) as link:
        player = Player(bundle, programs, inputs, link)
        with _progress(stop.frame, quiet=as_json) as progress:
            found, live = replay(bundle, programs, player, stop, progress)
        tensors: list[LiveTensor] = []
        if until:
            live.find_views(stop.frame)
            tensors = [
                t if save is not None or interactive else t.without_content() for t in live_tensors(live.by_id, link)
            ]
        device = dict(link.device)
    named = {t.buffer.name: t.tensor for t in tensors if t.tensor is not None}
    if save is not None:
        import torch

        try:
            torch.save(named, save)
        except (OSError, RuntimeError) as e:
            raise WoolyError(f"cannot save the tensors: {e}") from e
    if as_json:
        _print_json(_report(bundle, found, stop, device) | {"tensors": [t.row for t in tensors]})
    else:
        _print_replayed(bundle, found, stop, device)
        if until:
            _print_tensors(tensors)
        if save is not None:
            out.print(f"saved {len(named)} tensors in {escape(str(save))}", highlight=False)
    if interactive:
        import code

        import torch

        banner = f"{len(named)} tensors are in the dict `tensors`, by name"
        code.interact(banner=banner, local={"tensors": named, "torch": torch}, exitmsg="")
    if found.differences or (found.errors and bundle.has_data):
        raise typer.Exit(1)


def _against(
    bundle: Bundle, settings: Settings, against: Any, until: str, tolerance: float, seed: int, *, as_json: bool
) -> None:
    from wooly.recording.compare import Pair, compare
    from wooly.recording.programs import Programs
    from wooly.recording.replay import Inputs, Player, find_stop, jit_of
    from wooly.recording.sessions import executor_with, session

    programs = Programs(bundle)
    inputs, jit = Inputs(bundle, programs, seed), jit_of(bundle)
    last = find_stop(bundle, until).frame if until else bundle.frames
    with executor_with(against, settings) as there:

        @contextlib.contextmanager
        def open_pair() -> Iterator[Pair]:
            with session(settings, jit) as one, session(there, jit) as two:
                players = [Player(bundle, programs, inputs, link) for link in (one, two)]
                names = str(one.device.get("runtime", "?")), str(two.device.get("runtime", "?"))
                yield Pair(players[0], players[1], names)

        with _progress(last, quiet=as_json) as progress:
            found = compare(bundle, programs, open_pair, tolerance, last, progress)
    if as_json:
        culprit = None if found.culprit is None else found.culprit.row()
        counts = {name: getattr(found, name) for name in ("frames", "runs", "rounded", "accumulated")}
        _print_json({"file": str(bundle.path), "tolerance": tolerance, **counts, "first_difference": culprit})
    else:
        _print_compared(found, tolerance, last)
    if found.culprit is not None:
        raise typer.Exit(1)


# -- printing --------------------------------------------------------------------------------------------------------------


def _print_json(value: dict[str, Any]) -> None:
    """Print JSON, which has no numbers for NaN and infinity: they become strings."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: plain(v) for k, v in part.items()}
        if isinstance(part, (list, tuple)):
            return [plain(v) for v in part]
        return str(part) if isinstance(part, float) and not math.isfinite(part) else part

    print(json.dumps(plain(value)))


def _report(bundle: Bundle, found: Replayed, stop: Stop, device: dict[str, Any]) -> dict[str, Any]:
    return {
        "file": str(bundle.path),
        "complete": bundle.complete,
        "data": bundle.has_data,
        "device": device.get("name", ""),
        "runtime": device.get("runtime", ""),
        "frames": found.frames,
        "of": bundle.frames,
        "stopped_at": {"frame": stop.frame, "instruction": stop.instruction},
        "compared": found.compared,
        "different": len(found.differences),
        "first_difference": found.differences[0].row() if found.differences else None,
        "errors": [d.row() for d in found.errors],
        "repeated_errors": [d.row() for d in found.repeated],
    }


def _print_replayed(bundle: Bundle, found: Replayed, stop: Stop, device: dict[str, Any]) -> None:
    inside = "" if stop.instruction is None else f", up to instruction {stop.instruction} of the last"
    where = f"{device.get('name', '?')} ({device.get('runtime', '?')})"
    out.print(f"played {found.frames:,} of {bundle.frames:,} frames{inside} on {escape(where)}", highlight=False)
    _print_notes("fails as in the recording", found.repeated)
    _print_notes("fails, unlike in the recording" if bundle.has_data else "fails", found.errors)
    if not bundle.has_data:
        out.print("the bundle has no contents: inputs were random, and nothing was compared", highlight=False)
        return
    if not found.differences:
        out.print(f"all {found.compared:,} answers are those of the recording", highlight=False)
        return
    first = found.differences[0]
    out.print(
        f"[bold red]{len(found.differences):,} of {found.compared:,} answers differ[/]; the first: frame {first.frame}, read at "
        f"{escape(str(first.line))}: {escape(first.what)}",
        highlight=False,
        soft_wrap=True,
    )
    recorded = bundle.device.get("runtime", "?")
    if recorded != device.get("runtime"):
        out.print(
            f"the recording was made on {escape(str(recorded))}, and other kinds of devices round otherwise: --against with "
            "--tolerance compares numbers",
            highlight=False,
            soft_wrap=True,
        )


def _print_notes(what: str, notes: list[Difference]) -> None:
    for note in notes[:_SHOWN]:
        at = "" if note.line is None else f" ({note.line})"
        out.print(escape(f"frame {note.frame}{at} {what}: {note.what}"), highlight=False, soft_wrap=True)
    if len(notes) > _SHOWN:
        out.print(f"… and {len(notes) - _SHOWN} more", highlight=False)


def _print_tensors(tensors: list[LiveTensor]) -> None:
    table = plain_table()
    for column in ("made at", "operator", "written at", "frame", "dtype", "shape", "min", "max", "mean", "nan", "name"):
        table.add_column(column, no_wrap=column == "name")
    for row in [t.row for t in tensors]:
        numbers = [_number(row.get(k)) for k in ("min", "max", "mean", "nan")]
        if row["error"]:
            numbers = ["cannot be read", "", "", ""]
        made, written = row["made"] or "", row["written"] or ""
        cells = [
            _short(made),
            row["operator"],
            "" if written == made else _short(written),
            str(row["frame"]),
            row["dtype"],
        ]
        table.add_row(*cells, str(row["shape"]), *numbers, row["name"])
    out.print(Fitted(table))
    for t in tensors:
        if t.error:
            out.print(escape(f"{t.buffer.name} cannot be read: {t.error}"), highlight=False, soft_wrap=True)


def _short(line: str) -> str:
    """The last part of the path, and the line."""
    return line.replace("\\", "/").rpartition("/")[2]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_compared(found: Compared, tolerance: float, last: int) -> None:
    culprit = found.culprit
    if culprit is None:
        rounded = f"; {found.rounded:,} of them by at most the tolerance" if found.rounded else ""
        out.print(
            f"compared {found.runs:,} runs in {last:,} frames: none differs by more than {tolerance:g}{rounded}",
            highlight=False,
        )
        if found.accumulated:
            out.print(
                f"{found.accumulated:,} runs differ by more, but no single instruction of them does: rounding adds up"
            )
        return
    one, two = culprit.names
    where = "the program as a whole" if culprit.instruction is None else f"instruction {culprit.instruction}"
    out.print(f"[bold red]the first difference between {escape(one)} and {escape(two)}[/]", highlight=False)
    gap = culprit.gap
    rows = {
        "Python line": f"{culprit.line} in {culprit.line.function}",
        "operator": culprit.operator,
        "place": f"frame {culprit.frame}, {where}",
        "operands": ", ".join(culprit.operands),
        "differs": f"{gap.count:,} of {gap.of:,} elements of operand {culprit.result}",
        "values": f"{one}: {gap.values[0]}, {two}: {gap.values[1]}, at index {gap.at}",
    }
    if gap.largest is not None:
        relative = f" ({gap.largest / gap.scale:.3g} of the largest number)" if gap.scale else ""
        rows["largest difference"] = f"{gap.largest:.6g}{relative}"
    if culprit.instruction is None:
        rows["note"] = (
            "each instruction alone has equal results, so the program as one is different (generated kernels)"
        )
    for name, text in rows.items():
        out.print(f"  {name:18}  {escape(text)}", highlight=False, soft_wrap=True)


def _print_info(bundle: Bundle, *, as_json: bool) -> None:
    from wooly.recording.bundle import Part

    report: dict[str, Any] = {
        "file": str(bundle.path),
        "complete": bundle.complete,
        "dropped_bytes": bundle.dropped,
        "data": bundle.has_data,
        "recorded_by": {k: str(bundle.facts.get(k, "?")) for k in ("wooly", "torch", "python", "platform")},
        "program": str(bundle.facts.get("program", "?")),
        "device": {k: str(v) for k, v in bundle.device.items()},
        "jit": str(bundle.facts.get("jit", "?")),
        "frames": bundle.frames,
        "runs": bundle.counts[Part.RUN],
        "reads": bundle.counts[Part.READ],
        "writes": bundle.counts[Part.WRITE],
        "written_bytes": bundle.written,
        "content_bytes": bundle.kept,
        "programs": bundle.programs,
        "kernel_sources": bundle.counts[Part.SOURCE],
        "answers": len(bundle.answers),
        "files": {
            file: len({n.number for n in bundle.lines if n.file == file})
            for file in sorted({n.file for n in bundle.lines})
        },
    }
    if as_json:
        _print_json(report)
        return
    by, device = report["recorded_by"], report["device"]
    state = "complete" if bundle.complete else _incomplete(bundle)
    kept = size(report["content_bytes"])
    rows = {
        "bundle": f"{bundle.path}, {state}",
        "program": report["program"],
        "recorded by": f"Wooly {by['wooly']}, PyTorch {by['torch']}, Python {by['python']}, {by['platform']}",
        "device": f"{device.get('name', '?')} ({device.get('runtime', '?')}), PyTorch {device.get('torch_version', '?')}",
        "kernels": f"WOOLYAI_JIT={report['jit']}",
        "frames": f"{report['frames']:,}: {report['runs']:,} runs, {report['writes']:,} uploads, {report['reads']:,} reads",
        "programs": f"{report['programs']:,}, and {report['kernel_sources']:,} sources of kernels",
        "contents": f"{size(report['written_bytes'])} uploaded, {kept} kept" if bundle.has_data else "none: sizes only",
        "answers": f"{report['answers']:,} digests" if bundle.has_data else "none, only which reads failed",
    }
    for name, text in rows.items():
        out.print(f"{name:12}  {escape(text)}", highlight=False, soft_wrap=True)
    out.print("Python files that it names, with the number of their lines:", highlight=False)
    for file, count in report["files"].items():
        out.print(f"  {escape(file)}  {count}", highlight=False, soft_wrap=True)
