"""The command `wooly disasm`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from wooly.cli.commands.app import Json, app, fail, read_settings
from wooly.control import ControlError, connect
from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly_wis.messages import JitMode


@app.command()
def disasm(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="File with a program in WIS's binary form.")
    ],
    passes: Annotated[
        bool,
        typer.Option(
            "--passes", help="Also print the program after each pass of the compiler (needs a running compiler)."
        ),
    ] = False,
    jit: Annotated[
        str,
        typer.Option(help="With --passes: exact (only kernels whose results equal the library's bit for bit) or full."),
    ] = "full",
    target: Annotated[str, typer.Option(help="With --passes: target of the compiler; default: any CPU.")] = "",
    as_json: Json = False,
) -> None:
    """Print a WIS program as assembly."""
    from wooly_wis.assembly import disassemble
    from wooly_wis.codec import decode_program
    from wooly_wis.errors import WisError

    if jit not in ("exact", "full"):
        raise fail(ControlError(f"--jit {jit} is not valid; use exact or full"))
    raw = file.read_bytes()
    try:
        stages = [("program", disassemble(decode_program(raw)))]
        if passes:
            with closing(connect(read_settings())) as controller:
                stages += controller.passes(raw, target, cast("JitMode", jit))
    except (WisError, WoolyError) as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps({"stages": [{"pass": name, "text": text} for name, text in stages]}))
    elif not passes:
        print(stages[0][1], end="")
    else:
        print("\n".join([f"; {'after ' if k else ''}{name}\n{text}" for k, (name, text) in enumerate(stages)]), end="")
