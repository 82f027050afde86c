"""The command `wooly smi`: the devices with the columns of nvidia-smi, for people and scripts that are used to it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings
from wooly.cli.commands.cluster import nodes_of
from wooly.cli.smi import query
from wooly.cli.tables import Fitted, plain_table
from wooly.errors import WoolyError


@app.command()
def smi(
    query_gpu: Annotated[
        str, typer.Option("--query-gpu", help="Fields, separated by commas: index,name,memory.used,utilization.gpu …")
    ] = "",
    how: Annotated[
        str, typer.Option("--format", help="Format of a query: csv, with noheader and nounits if wanted.")
    ] = "csv",
    listed: Annotated[bool, typer.Option("--list-gpus", "-L", help="Print one line per device.")] = False,
    as_json: Json = False,
) -> None:
    """Show the devices with the columns and queries of nvidia-smi."""
    try:
        nodes = sorted(
            [n for n in nodes_of(read_settings()) if n["state"] == "alive"], key=lambda n: (n["node"], n["executor_id"])
        )
        if query_gpu:
            print(query(nodes, query_gpu, how), end="")
            return
    except WoolyError as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps({"gpus": [{"index": i, **n} for i, n in enumerate(nodes)]}))
    elif listed:
        for i, n in enumerate(nodes):
            print(f"GPU {i}: {n['device']['name']} (UUID: {n['executor_id']})")
    else:
        table = plain_table()
        for column in ("GPU", "Name", "Node", "Memory-Usage", "GPU-Util", "Sessions"):
            table.add_column(column)
        for i, n in enumerate(nodes):
            used, total = n["memory_used"] >> 20, n["device"]["total_memory"] >> 20
            util = f"{round(100 * n['utilization'])}%"
            table.add_row(str(i), n["device"]["name"], n["node"], f"{used}MiB / {total}MiB", util, str(n["sessions"]))
        out.print(Fitted(table))
