"""The commands of `wooly`. `wooly --help` lists them in the order of these imports."""

from __future__ import annotations

from typing import Annotated

import typer

from wooly.cli.commands import (  # noqa: F401
    cluster,
    credits,
    doctor,
    environment,
    jobs,
    nodes,
    programs,
    recording,
    run,
    serve,
    smi,
    tasks,
    tenants,
    weights,
)
from wooly.cli.commands.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the `wooly` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print Wooly's version.")
    ] = False,
) -> None:
    """Run PyTorch programs that use “cuda” on remote devices."""


@app.command()
def version() -> None:
    """Print Wooly's version."""
    from wooly import __version__

    print(__version__)
