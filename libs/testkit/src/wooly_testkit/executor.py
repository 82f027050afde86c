"""A real executor process without a control plane, for tests of what talks to its data channel."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOKEN = "test-token"


@dataclass(frozen=True)
class RunningExecutor:
    """A standalone executor: its process, its endpoints (unix first, then TCP), and what its one session needs."""

    process: subprocess.Popen[bytes]
    endpoints: list[str]
    session_id: str = "standalone"
    token: str = TOKEN


@contextlib.contextmanager
def executor_process(
    *, runtime: str = "torch_cpu", port: int = 0, threads: int = 1, environment: Mapping[str, str | None] | None = None
) -> Iterator[RunningExecutor]:
    """Start one, wait until it listens, end it with the block. It computes with `threads` threads.

    `environment`: variables that are other than in this process; None: not set.

    Raises:
        RuntimeError: it ended instead.
    """
    with tempfile.TemporaryDirectory(prefix="wooly-executor-") as directory:
        path = Path(directory) / "x.sock"
        endpoints = [f"unix://{path}"] + ([f"tcp://127.0.0.1:{port}"] if port else [])
        log = Path(directory) / "log"
        wanted: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        argv = [sys.executable, "-m", "wooly_executor", "--standalone", "--runtime", runtime]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*argv, "--listen", ",".join(endpoints), "--token", TOKEN],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in wanted.items() if v is not None},
            )
        try:
            deadline = time.monotonic() + 120
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the executor did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield RunningExecutor(process, endpoints)
        finally:
            process.kill()
            process.wait()
