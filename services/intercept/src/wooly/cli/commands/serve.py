"""`wooly serve`: one executor without a controller."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from wooly.cli.commands.app import Json, app, fail, read_settings
from wooly.control import ControlError

#: The address at which the executor listens by default: only programs on this machine can connect.
DEFAULT_LISTEN = "tcp://127.0.0.1:7400"


@app.command()
def serve(
    gpu: Annotated[
        int | None, typer.Option(min=0, help="Number of the GPU; default: WOOLY_EXECUTOR_DEVICE, or 0.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="Endpoints, comma separated: tcp://HOST:PORT, tls://HOST:PORT (needs WOOLY_EXECUTOR_TLS_CERT and _TLS_KEY), "
            "unix:///PATH; default: WOOLY_EXECUTOR_LISTEN, or " + DEFAULT_LISTEN + ".",
        ),
    ] = "",
    opaque: Annotated[
        bool,
        typer.Option(
            "--opaque-kernels", help="Allow kernels that cannot be checked. Whoever has the token may run them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Serve one device without a controller, until Ctrl-C. Programs reach it with WOOLYAI_EXECUTOR_URL, which this prints.

    The URL contains a token. Whoever has it can use the device. The token stays the same at the next start.
    """
    if find_spec("wooly_executor") is None:
        raise fail(ControlError("the executor is not installed on this machine; run pip install wooly-executor"))
    environment = dict(os.environ)
    environment.setdefault("WOOLY_EXECUTOR_STATE_DIR", str(read_settings().state_dir / "serve"))
    environment.pop("WOOLYAI_CAPTURE", None)
    if gpu is not None:
        environment["WOOLY_EXECUTOR_DEVICE"] = str(gpu)
    arguments = ["--standalone", "--listen", listen or os.environ.get("WOOLY_EXECUTOR_LISTEN") or DEFAULT_LISTEN]
    arguments += ["--opaque-kernels"] * opaque + ["--json"] * as_json
    os.execve(sys.executable, [sys.executable, "-m", "wooly_executor", *arguments], environment)
