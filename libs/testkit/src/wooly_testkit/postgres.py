"""A real PostgreSQL server for tests: on a unix socket in a temporary directory, gone when the block ends."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_OPTIONS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=50", "shared_buffers=16MB")


class PostgresMissingError(RuntimeError):
    """There is no PostgreSQL server to start here; the message says what to install."""


def _binary(name: str) -> str:
    found = shutil.which(name)
    if found:
        return found
    for directory in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (directory / name).exists():
            return str(directory / name)
    raise PostgresMissingError(f"no PostgreSQL server here ({name}); on Debian: make postgres")


def _user() -> str | None:
    """Who the server runs as: it refuses to be root."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam("postgres")
    except KeyError as e:
        raise PostgresMissingError("PostgreSQL does not run as root, and there is no user postgres") from e
    return "postgres"


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server of the block's own.

    Raises:
        PostgresMissingError: it is not installed.
        RuntimeError: it did not start.
    """
    initdb, postgres, user = _binary("initdb"), _binary("postgres"), _user()
    with tempfile.TemporaryDirectory(prefix="wooly-pg-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        data, log = directory / "data", directory / "log"
        if user is not None:
            shutil.chown(directory, user)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "PYTHON"))} | {"LC_ALL": "C"}
        made = subprocess.run(
            [initdb, "--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8", "-D", str(data)],
            user=user, env=clean, cwd=name, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")
        options = [
            word for o in (*_OPTIONS, f"unix_socket_directories={name}", "listen_addresses=") for word in ("-c", o)
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [postgres, "-D", str(data), *options], user=user, env=clean, cwd=name, stdout=out, stderr=out
            )
        try:
            _wait(process, directory, log)
            yield PostgresServer(directory)
        finally:
            process.send_signal(signal.SIGQUIT)  # at once, whoever is connected: nothing of it is kept
            process.wait(10)


def _wait(process: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(host=str(directory), user="postgres", dbname="postgres").close()
            return
        time.sleep(0.02)
    raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}")


class PostgresServer:
    """A running server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made = 0

    def database(self, template: str = "template1") -> str:
        """A new database, as the URL of SQLAlchemy's asynchronous (and synchronous) engine; from a template in 50 ms."""
        import psycopg

        self._made += 1
        name = f"test_{self._made}"
        with psycopg.connect(
            host=str(self._directory), user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            # its files are copied, not logged: a third of the time (before 15 there was no other way)
            how = " STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else ""
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"{how}'.encode())
        return f"postgresql+psycopg://postgres@/{name}?host={self._directory}"
