"""One supervised child process: start, log file, restart with back-off, stop. Children die with their supervisor."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
MAX_BACKOFF_S = 10.0


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, however that happens. Elsewhere this does nothing."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return


@dataclass
class Service:
    """A child to be kept running.

    Attributes:
        name: for logs and status.
        argv: command line.
        env: variables added to the supervisor's own.
        log: where its output goes.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    not_before: float = field(default=0.0)

    def start(self) -> None:
        """Start it now."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                preexec_fn=die_with_parent,
            )
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def keep_alive(self, now: float) -> bool:
        """Restart it if it has died and its back-off is over. True if it was restarted."""
        if self.pid is not None:
            if self.failures and now - self.started_at > 30:
                self.failures = 0
            return False
        if not self.not_before:
            self.failures += 1
            self.not_before = now + min(0.2 * 2**self.failures, MAX_BACKOFF_S)
        if now < self.not_before:
            return False
        self.not_before = 0.0
        self.start()
        return True

    def stop(self, timeout: float = 5.0) -> None:
        """End it: SIGTERM, and SIGKILL if it does not listen."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def last_words(self, lines: int = 12) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
