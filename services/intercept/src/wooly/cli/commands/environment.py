"""The commands `wooly env` and `wooly jupyter`: the variables that capture Python processes, for shells and for notebooks."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from wooly import capture
from wooly.cli.commands.app import Json, app, err, fail, out, read_settings
from wooly.errors import WoolyError
from wooly.local_stack import local_stack
from wooly.settings import ENV_PREFIX, Settings

jupyter = typer.Typer(name="jupyter", no_args_is_help=True, help="Notebooks whose “cuda” runs on Wooly devices.")
app.add_typer(jupyter)


@app.command()
def env(
    off: Annotated[bool, typer.Option("--off", help="Print the commands that undo it.")] = False,
    shell: Annotated[
        Literal["sh", "fish", "powershell", ""], typer.Option(help="Syntax; by default that of $SHELL.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Print the variables that make Python programs use Wooly devices: eval "$(wooly env)"."""
    settings = read_settings()
    variables: dict[str, str | None] = {**capture.variables()}
    if off:
        path = os.environ.get("PATH", "").removeprefix(os.path.dirname(sys.executable) + os.pathsep)
        variables = {capture.VARIABLE: None, "PATH": path}
    elif not _is_reachable(settings):
        err.print(
            "[yellow]wooly:[/] no local stack runs and no controller is set, so each process that uses “cuda” will start a "
            "stack of its own; `wooly up` starts one for all",
            highlight=False,
            soft_wrap=True,
        )
    if as_json:
        out.print_json(json.dumps(variables))
        return
    syntax = shell or ("fish" if Path(os.environ.get("SHELL", "")).name == "fish" else "sh")
    for name, value in variables.items():
        print(_assignment(syntax, name, value))


def _is_reachable(settings: Settings) -> bool:
    """Whether processes will find a controller or an executor."""
    stack = local_stack()
    return bool(settings.controller_url or settings.executor_url) or (
        stack is not None and stack.read_stack(settings.state_dir) is not None
    )


def _assignment(syntax: str, name: str, value: str | None) -> str:
    """A command that sets a variable, or removes it."""
    if syntax == "fish":
        return f"set -e {name};" if value is None else f"set -gx {name} {shlex.quote(value)};"
    if syntax == "powershell":
        quoted = (value or "").replace("'", "''")
        return f"Remove-Item Env:{name}" if value is None else f"$Env:{name} = '{quoted}'"
    return f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"


@jupyter.command("install")
def install_kernel(
    name: Annotated[str, typer.Option(help="Name of the kernel.")] = "wooly",
    prefix: Annotated[Path | None, typer.Option(help="Folder of a Python environment; default: for this user.")] = None,
) -> None:
    """Add a notebook kernel that runs this Python with “cuda” on Wooly devices.

    The kernel keeps the WOOLYAI_ variables that are set now, except the API token.
    """
    if find_spec("ipykernel") is None:
        raise fail(WoolyError(f"this Python has no ipykernel: {sys.executable} -m pip install ipykernel"))
    from jupyter_client.kernelspec import KernelSpecManager

    kept = {n: v for n, v in os.environ.items() if n.startswith(ENV_PREFIX) and n != f"{ENV_PREFIX}CREDENTIAL"}
    variables = {**kept, capture.VARIABLE: "1"}
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python (Wooly)" if name == "wooly" else f"Python ({name})",
        "language": "python",
        "metadata": {"debugger": True},
        "env": variables,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        try:
            where = KernelSpecManager().install_kernel_spec(
                folder, name, user=prefix is None, prefix=None if prefix is None else str(prefix)
            )
        except (OSError, ValueError) as e:
            raise fail(WoolyError(f"the kernel cannot be installed: {e}")) from e
    out.print(f"installed the kernel [bold]{spec['display_name']}[/] in {where}", highlight=False)
    if f"{ENV_PREFIX}CREDENTIAL" in os.environ:
        out.print(
            f"  {ENV_PREFIX}CREDENTIAL is not in that file; set it where Jupyter starts, or in the configuration file"
        )


@jupyter.command("remove")
def remove_kernel(name: Annotated[str, typer.Option(help="Name of the kernel.")] = "wooly") -> None:
    """Remove a kernel that `wooly jupyter install` added."""
    if find_spec("jupyter_client") is None:
        raise fail(WoolyError(f"this Python has no ipykernel: {sys.executable} -m pip install ipykernel"))
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        out.print(f"removed {KernelSpecManager().remove_kernel_spec(name)}", highlight=False)
    except (NoSuchKernel, OSError) as e:
        raise fail(WoolyError(f"the kernel {name!r} cannot be removed: {e}")) from e
