"""The command-line application, and functions that its commands share: to print, to fail, to connect to the controller."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from wooly.control import ControlError, connect
from wooly.errors import WoolyError
from wooly.local_stack import local_stack
from wooly.settings import Settings, SettingsError, load

app = typer.Typer(
    name="wooly",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: Width of the output, in characters, if it does not go to a terminal.
WIDE = 200
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
err = Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def fail(error: Exception) -> typer.Exit:
    """Print an error. Returns an exception that the caller raises to end the command."""
    err.print(f"[bold red]wooly:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def stack_module() -> Any:
    """The module of the local stack.

    Raises:
        typer.Exit: the local stack is not installed.
    """
    module = local_stack()
    if module is None:
        raise fail(ControlError("the local stack is not installed; install the distribution wooly-local"))
    return module


def read_settings() -> Settings:
    """Load the settings of this process.

    Raises:
        typer.Exit: a setting is invalid, or the configuration file cannot be read.
    """
    try:
        return load()
    except SettingsError as e:
        raise fail(e) from e


_IS_WHAT = {"states": "a state (pending, started, completed, failed, cancelled)", "kind": "session or job"}


def with_router(work: Callable[[Any, Any, Settings], Any]) -> Any:
    """Call `work` with `wooly.cli.jobs`, a connection to the controller and the settings, and return the result.

    Raises:
        typer.Exit: an argument is invalid, or the controller does not answer or refuses.
    """
    from pydantic import ValidationError

    from wooly.cli import jobs

    try:
        settings = read_settings()
        with closing(connect(settings)) as controller:
            return work(jobs, controller, settings)
    except ValidationError as e:
        wrong = e.errors()[0]
        is_what = _IS_WHAT.get(str(wrong["loc"][0]), "the id of a task")
        raise fail(ControlError(f"{wrong['input']!r} is not valid; it must be {is_what}")) from e
    except WoolyError as e:
        raise fail(e) from e


def size(n: float) -> str:
    """A number of bytes with a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return ""
