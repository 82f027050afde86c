"""Sessions without a device of PyTorch, for frames that exist already; and executors that are started for them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from wooly.control import connect
from wooly.errors import WoolyError
from wooly.link import Link
from wooly.opening import open_link
from wooly.settings import Settings

Runtime = Literal["torch_cpu", "opencl", "cuda", "hip"]
_PR_SET_PDEATHSIG = 1


class RuntimeMissingError(WoolyError):
    """No executor with the wanted runtime can be started or found."""

    code = "wooly.runtime_missing"


@contextlib.contextmanager
def session(settings: Settings, jit: str) -> Iterator[Link]:
    """A session with one device that ends with its executor.

    Args:
        settings: the client's settings.
        jit: generated kernels that the executor may use.

    Raises:
        WoolyError: no session can be opened.
    """
    changes = {"gpu_count": 1, "recovery": "off", "dedup": "off", "jit": jit}
    opened, link = open_link(settings.model_copy(update=changes))
    try:
        yield link
    finally:
        link.close()
        opened.close()


@contextlib.contextmanager
def executor_with(runtime: Runtime, settings: Settings) -> Iterator[Settings]:
    """An executor with a runtime: one that is started on this machine, or else one of the cluster.

    Yields:
        The settings with which sessions open there.

    Raises:
        RuntimeMissingError: there is none. The message says why.
    """
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(_started(runtime, settings.state_dir / "replay"))
        except RuntimeMissingError as e:
            yield settings.model_copy(update={"node": _in_cluster(runtime, settings, e)})
            return
        alone = {"executor_url": url, "controller_url": "", "node": "", "node_groups": (), "gpu_mode": "shared"}
        yield settings.model_copy(update=alone | {"latency_objective_ms": 0.0, "channel": "auto"})


@contextlib.contextmanager
def _started(runtime: Runtime, state_dir: Path) -> Iterator[str]:
    """Start a standalone executor. Yields its URL for WOOLYAI_EXECUTOR_URL."""
    if find_spec("wooly_executor") is None:
        raise RuntimeMissingError("the executor is not installed on this machine (pip install wooly-executor)")
    with tempfile.TemporaryDirectory(prefix="wooly-replay-") as folder:
        environment = os.environ | {
            "WOOLY_EXECUTOR_STATE_DIR": str(state_dir),
            "WOOLY_EXECUTOR_TOKEN": secrets.token_urlsafe(24),
            "WOOLYAI_CAPTURE": "",
        }
        arguments = ["--standalone", "--json", "--runtime", runtime, "--listen", f"unix://{folder}/x.sock"]
        log = Path(folder, "log")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "wooly_executor", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                preexec_fn=_die_with_parent,
            )
        with process:
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
                if not said:
                    last = log.read_text(errors="replace").strip().rpartition("\n")[2].rpartition(" wooly.executor ")[2]
                    raise RuntimeMissingError(f"an executor with the runtime {runtime} does not start here: {last}")
                yield str(json.loads(said)["urls"][0])
            finally:
                process.kill()


def _die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies for any reason. On other systems this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _in_cluster(runtime: Runtime, settings: Settings, why: RuntimeMissingError) -> str:
    """The id of an executor of the cluster that has the runtime."""
    try:
        if settings.executor_url:
            raise why
        with closing(connect(settings)) as controller:
            nodes = controller.nodes().nodes
    except WoolyError as e:
        raise RuntimeMissingError(f"{why}; and no cluster offers one: {e}" if e is not why else str(why)) from e
    for node in nodes:
        if node.state == "alive" and node.device.runtime.replace("-", "_") == runtime:
            return node.executor_id
    kinds = sorted({node.device.runtime for node in nodes})
    raise RuntimeMissingError(
        f"{why}; and no executor of the cluster has it (there: {', '.join(kinds) or 'none'})"
    ) from why
