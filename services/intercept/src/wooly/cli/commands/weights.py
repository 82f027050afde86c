"""The command `wooly weights`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings, size
from wooly.cli.commands.cluster import nodes_of
from wooly.cli.tables import Fitted, plain_table
from wooly.errors import WoolyError

weights = typer.Typer(name="weights", help="Keep models on the devices ahead of time.", no_args_is_help=True)
app.add_typer(weights)


def _with_all_devices(work: Callable[[list[Any]], Any]) -> Any:
    """Open a session on all executors that shares contents, call `work` with its links, and return the result."""
    from wooly import api
    from wooly.storage import MAX_DEVICES

    settings = read_settings()
    try:
        alive = [n for n in nodes_of(settings) if n["state"] == "alive"]
        changes: dict[str, Any] = {"gpu_count": max(1, min(len(alive), MAX_DEVICES))}
        if settings.dedup == "off":
            changes["dedup"] = "tenant"
        api.enable(settings.model_copy(update=changes))
        try:
            return work(api.attached_links())
        finally:
            api.disable()
    except WoolyError as e:
        raise fail(e) from e


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
        found = _with_all_devices(lambda links: load_and_pin(path, name, links))
    except (OSError, ValueError) as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps(found))
    else:
        where = f"{found['executors']} executor" + "s" * (found["executors"] > 1)
        out.print(f"{name}: {found['tensors']} tensors, {size(found['bytes'])} kept on {where}", highlight=False)


@weights.command("list")
def weights_list(as_json: Json = False) -> None:
    """List the weights that each executor keeps."""
    found = _with_all_devices(
        lambda links: [{"executor": link.where} | pin for link in links for pin in link.pin("list")["pins"]]
    )
    if as_json:
        print(json.dumps({"weights": found}))
        return
    table = plain_table()
    for column in ("name", "size", "tensors", "shared with", "executor"):
        table.add_column(column)
    for pin in found:
        table.add_row(pin["name"], size(pin["bytes"]), str(pin["tensors"]), pin["scope"], pin["executor"])
    out.print(Fitted(table) if found else "no weights are kept; `wooly weights add PATH` keeps those of a model")


@weights.command("rm")
def weights_rm(
    name: Annotated[str, typer.Argument(help="Name of the weights in `wooly weights list`.")], as_json: Json = False
) -> None:
    """Stop keeping weights on the executors. Sessions that use them keep them."""
    removed = _with_all_devices(lambda links: sum(link.pin("remove", name)["removed"] for link in links))
    if as_json:
        print(json.dumps({"removed": removed}))
    elif removed:
        out.print(f"{name}: no longer kept on {removed} executor" + "s" * (removed > 1), highlight=False)
    if not removed:
        raise fail(WoolyError(f"weights with the name {name!r} are not kept; `wooly weights list` shows the names"))
