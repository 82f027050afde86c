"""The commands of `wooly`. `wooly --help` lists them in the order of these imports."""

from __future__ import annotations

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


@app.command()
def version() -> None:
    """Print Wooly's version."""
    from wooly import __version__

    print(__version__)
