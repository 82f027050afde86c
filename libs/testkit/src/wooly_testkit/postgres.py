"""A real PostgreSQL server for tests, on a unix socket in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

_OPTIONS = ("fsync=off", "full_page_writes=off", "max_connections=50", "shared_buffers=16MB")
#: A server that `crash` ends keeps each committed transaction: the machine lives on, so only the processes' memory is lost.
_LAZY = ("synchronous_commit=off",)


class PostgresMissingError(RuntimeError):
    """PostgreSQL is not installed; the message names the remedy."""


def _binary(name: str) -> str:
    found = shutil.which(name)
    if found:
        return found
    for directory in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (directory / name).exists():
            return str(directory / name)
    raise PostgresMissingError(
        f"PostgreSQL is not installed ({name} not found); on Debian, install it with: make postgres"
    )


def _user() -> str | None:
    """The user that runs the server, because the server refuses to run as root. None: the current user."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam("postgres")
    except KeyError as e:
        raise PostgresMissingError(
            "cannot start PostgreSQL: it does not run as root, and the user postgres does not exist"
        ) from e
    return "postgres"


@contextlib.contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """Run a server for the duration of the block.

    Args:
        durable: keep committed transactions when the server's processes are killed (`PostgresServer.crash`).

    Raises:
        PostgresMissingError: PostgreSQL is not installed.
        RuntimeError: the server did not start.
    """
    initdb, postgres, user = _binary("initdb"), _binary("postgres"), _user()
    with tempfile.TemporaryDirectory(prefix="wooly-pg-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        data = directory / "data"
        if user is not None:
            shutil.chown(directory, user)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "PYTHON"))} | {"LC_ALL": "C"}
        made = subprocess.run(
            [initdb, "--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8", "-D", str(data)],
            user=user, env=clean, cwd=name, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")
        settings = (*_OPTIONS, *(() if durable else _LAZY), f"unix_socket_directories={name}", "listen_addresses=")
        options = [word for o in settings for word in ("-c", o)]
        server = PostgresServer(directory, [postgres, "-D", str(data), *options], user, clean)
        try:
            server.start()
            yield server
        finally:
            server.end()


def _wait(process: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(host=str(directory), user="postgres", dbname="postgres").close()
            return
        time.sleep(0.02)
    raise RuntimeError(f"PostgreSQL did not start; its log:\n{log.read_text(errors='replace')}")


class PostgresServer:
    """A PostgreSQL server in a folder of its own.

    Args:
        directory: folder of its socket, data and log.
        argv: its command.
        user: user that runs it; None: the current user.
        env: its environment.
    """

    def __init__(self, directory: Path, argv: list[str], user: str | None, env: Mapping[str, str]) -> None:
        self._directory = directory
        self._argv, self._user, self._env = argv, user, env
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0

    def start(self) -> None:
        """Start the server, and wait until it accepts connections. After a crash, it first recovers its data.

        Raises:
            RuntimeError: the server did not start.
        """
        log = self._directory / "log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                self._argv,
                user=self._user,
                env=self._env,
                cwd=self._directory,
                stdout=out,
                stderr=out,
            )
        _wait(self._process, self._directory, log)

    def crash(self) -> None:
        """Kill all processes of the server at once, as a crash or the kernel's out-of-memory killer does."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        for each in (first, *first.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait(10)

    def end(self) -> None:
        """End the server at once, despite connections, because the data is not kept."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(10)

    def database(self, template: str = "template1") -> str:
        """Create a database from a template, in 50 ms. Returns its URL for SQLAlchemy's asynchronous and synchronous engines."""
        import psycopg

        self._made += 1
        name = f"test_{self._made}"
        with psycopg.connect(
            host=str(self._directory), user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            # copy files instead of logging each page, which takes a third of the time; before version 15, this is the only way
            how = " STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else ""
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"{how}'.encode())
        return f"postgresql+psycopg://postgres@/{name}?host={self._directory}"
