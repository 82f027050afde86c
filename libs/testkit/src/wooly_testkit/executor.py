"""A real executor process without a control plane, for tests of clients of its data channel."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wooly_testkit.forks import OTHER_PYTHON

TOKEN = "test-token"


@dataclass(frozen=True)
class RunningExecutor:
    """A standalone executor: its process, its endpoints (unix first, then TCP), the id of a session to open, and its token."""

    process: subprocess.Popen[bytes]
    endpoints: list[str]
    session_id: str = "standalone"
    token: str = TOKEN


def _popen(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([os.environ.get(OTHER_PYTHON) or sys.executable, "-m", module, *arguments], **options)


@contextlib.contextmanager
def executor_process(
    *,
    runtime: str = "torch_cpu",
    port: int = 0,
    threads: int = 1,
    environment: Mapping[str, str | None] | None = None,
    start: Callable[..., subprocess.Popen[bytes]] = _popen,
) -> Iterator[RunningExecutor]:
    """Run an executor for the duration of the block, and wait until it listens.

    Args:
        runtime: runtime of the executor.
        port: port of its TCP endpoint; 0: no TCP endpoint.
        threads: number of its compute threads.
        environment: environment variables that differ from this process; None: the variable is not set.
        start: starts the process; use `forks.Forked` for many processes.

    Raises:
        RuntimeError: the executor did not start.
    """
    with tempfile.TemporaryDirectory(prefix="wooly-executor-") as directory:
        path = Path(directory) / "x.sock"
        endpoints = [f"unix://{path}"] + ([f"tcp://127.0.0.1:{port}"] if port else [])
        log = Path(directory) / "log"
        wanted: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": str(threads), "WOOLY_EXECUTOR_PLANS": "0"}
        wanted |= environment or {}
        argv = ["--standalone", "--runtime", runtime, "--listen", ",".join(endpoints), "--token", TOKEN]
        with log.open("wb") as out:
            process = start(
                "wooly_executor",
                *argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in wanted.items() if v is not None},
            )
        try:
            deadline = time.monotonic() + 120
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the executor did not start; its log:\n{log.read_text()}")
                time.sleep(0.02)
            yield RunningExecutor(process, endpoints)
        finally:
            process.kill()
            process.wait()
