"""The command `wooly`. Only the commands that need torch import it."""

from __future__ import annotations

import gc
import io
import os
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Entry point of the `wooly` command. If it runs a script without a stack, the stack starts while the rest is imported."""
    _open_streams()
    _print_everywhere()
    runs = len(sys.argv) > 2 and sys.argv[1] == "run" and sys.argv[2].endswith(".py") and Path(sys.argv[2]).is_file()
    if runs:
        gc.disable()  # until the script begins: imports make many objects and no garbage
        _begin_stack()
    from wooly_bus.lean_imports import import_nats

    import_nats()
    from wooly.cli.commands import main as run_command

    if runs:
        from wooly.local_stack import fork_executor

        fork_executor()  # it needs many of the modules that are imported now
    run_command()


def _open_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`). Else sockets take their numbers, and children write there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open for the process's life


def _print_everywhere() -> None:
    """Let commands print "?" for what the output's encoding lacks (LC_ALL=C, latin-1), in place of an error.

    A script of `wooly run` or `wooly record` gets Python's error, as without Wooly. Their own lines go to stderr, which has no
    such error.
    """
    its_own = sys.argv[1:2] not in (["run"], ["record"]) or sys.argv[2:3] == ["--help"]
    if its_own and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _begin_stack() -> None:
    from wooly_bus.other_names import CLIENT, translated

    from wooly.local_stack import begin
    from wooly.settings import SettingsError, load

    try:
        if not translated(os.environ, CLIENT)[1]:  # else the command prints the warnings
            begin(load(), lends=True)
    except (ValueError, SettingsError):
        return  # the command reports the error
