"""A real executor process without a control plane, for tests of what talks to its data channel."""

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

TOKEN = "test-token"


@dataclass(frozen=True)
class RunningExecutor:
    """A standalone executor: its process, its endpoints (unix first, then TCP), and what its one session needs."""

    process: subprocess.Popen[bytes]
    endpoints: list[str]
    session_id: str = "standalone"
    token: str = TOKEN


def _anew(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **options)


@contextlib.contextmanager
def executor_process(
    *,
    runtime: str = "torch_cpu",
    port: int = 0,
    threads: int = 1,
    environment: Mapping[str, str | None] | None = None,
    start: Callable[..., subprocess.Popen[bytes]] = _anew,
) -> Iterator[RunningExecutor]:
    """Start one, wait until it listens, end it with the block. It computes with `threads` threads.

    Args:
        runtime: the executor's.
        port: of its TCP endpoint; none if 0.
        threads: that it computes with.
        environment: variables that are other than in this process; None: not set.
        start: makes its process; `forks.Forked` where there are many.

    Raises:
        RuntimeError: it ended instead.
    """
    with tempfile.TemporaryDirectory(prefix="wooly-executor-") as directory:
        path = Path(directory) / "x.sock"
        endpoints = [f"unix://{path}"] + ([f"tcp://127.0.0.1:{port}"] if port else [])
        log = Path(directory) / "log"
        wanted: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
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
                    raise RuntimeError(f"the executor did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield RunningExecutor(process, endpoints)
        finally:
            process.kill()
            process.wait()
