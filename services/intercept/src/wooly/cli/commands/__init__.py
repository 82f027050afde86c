"""The commands of `wooly`. `wooly --help` lists them in the order of these imports."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
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
    called(sys.argv[1:])()


def called(arguments: Sequence[str]) -> typer.Typer:
    """The application with only the command that the arguments call; with all commands if they call none, as for help.

    Typer reads the parameters of all commands before it runs one, which takes 25 ms for forty commands.
    """
    name = next(iter(arguments), "")
    commands = [c for c in app.registered_commands if (c.name or getattr(c.callback, "__name__", "")) == name]
    groups = [g for g in app.registered_groups if g.typer_instance is not None and g.typer_instance.info.name == name]
    if not commands and not groups:
        return app
    found = copy.copy(app)
    found.registered_commands, found.registered_groups = commands, groups
    return found


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
