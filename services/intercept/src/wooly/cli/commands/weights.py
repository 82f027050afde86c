"""The command `wooly weights`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wooly.cli.commands.app import Json, app, err, fail, out, read_settings, size
from wooly.cli.commands.cluster import nodes_of
from wooly.cli.tables import Fitted, plain_table
from wooly.errors import WoolyError

weights = typer.Typer(name="weights", help="Keep models on the devices ahead of time.", no_args_is_help=True)
app.add_typer(weights)


def _on_every_executor(work: Callable[[Any], Any]) -> Any:
    """Call `work` with the link of a session on each executor. Names the executors that are left out.

    Raises:
        typer.Exit: no controller answers, or all executors are left out.
    """
    from wooly.cli.weights import on_every_executor

    settings = read_settings()
    try:
        found = on_every_executor(settings, nodes_of(settings), work)
    except WoolyError as e:
        raise fail(e) from e
    for name, why in found.left_out.items():
        err.print(f"[yellow]wooly:[/] {escape(name)} is left out: {escape(why)}", highlight=False, soft_wrap=True)
    if not found.done:
        raise fail(WoolyError("no executor took part; `wooly nodes` shows the executors"))
    return found


@weights.command("add")
def weights_add(
    path: Annotated[
        Path, typer.Argument(help="File with weights (.safetensors, .pt, .bin), or folder with such files.")
    ],
    name: Annotated[str, typer.Option("--name", help="Name for the weights; default: the last part of the path.")] = "",
    as_json: Json = False,
) -> None:
    """Load a model's weights onto every executor and keep them there. Sessions that load these weights then send nothing."""
    from wooly.cli.weights import load_and_pin

    name = name or path.resolve().name
    try:
        found = _on_every_executor(lambda link: load_and_pin(path, name, link))
    except (OSError, ValueError) as e:
        raise fail(e) from e
    tensors, nbytes = (max(column) for column in zip(*found.done.values(), strict=True))
    if as_json:
        report = {"name": name, "tensors": tensors, "bytes": nbytes, "executors": len(found.done)}
        print(json.dumps(report | {"on": list(found.done), "left_out": found.left_out}))
    else:
        where = f"{len(found.done)} executor" + "s" * (len(found.done) > 1)
        out.print(f"{name}: {tensors} tensors, {size(nbytes)} kept on {where}", highlight=False, markup=False)


@weights.command("list")
def weights_list(as_json: Json = False) -> None:
    """List the weights that each executor keeps."""
    done = _on_every_executor(lambda link: link.pin("list")["pins"])
    found = [{"executor": executor} | pin for executor, pins in done.done.items() for pin in pins]
    if as_json:
        print(json.dumps({"weights": found, "left_out": done.left_out}))
        return
    table = plain_table()
    for column in ("name", "size", "tensors", "shared with", "executor", "after its restart"):
        table.add_column(column)
    for pin in found:
        table.add_row(pin["name"], size(pin["bytes"]), str(pin["tensors"]), pin["scope"], pin["executor"], _fate(pin))
    out.print(Fitted(table) if found else "no weights are kept; `wooly weights add PATH` keeps those of a model")


def _fate(pin: dict[str, Any]) -> str:
    """What a restart of the executor does to pinned weights. Executors of older versions do not say it."""
    unsaved = pin.get("unsaved")
    return "unknown" if unsaved is None else f"lost: {unsaved}" if unsaved else "kept"


@weights.command("rm")
def weights_rm(
    name: Annotated[str, typer.Argument(help="Name of the weights in `wooly weights list`.")], as_json: Json = False
) -> None:
    """Stop keeping weights on the executors. Sessions that use them keep them."""
    removed = sum(_on_every_executor(lambda link: int(link.pin("remove", name)["removed"])).done.values())
    if as_json:
        print(json.dumps({"removed": removed}))
    elif removed:
        out.print(f"{name}: no longer kept on {removed} executor" + "s" * (removed > 1), highlight=False, markup=False)
    if not removed:
        raise fail(WoolyError(f"weights with the name {name!r} are not kept; `wooly weights list` shows the names"))
