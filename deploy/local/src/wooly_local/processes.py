"""One supervised child process: start, log file, restart with back-off, stop. Children die with their supervisor.

Services in Python are forks of the supervisor, which has loaded what they share: most of what a service does to start is
importing. The supervisor has one thread, and runs none of their code itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from wooly_local.python_private import finish

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
MAX_BACKOFF_S = 10.0
_ENDING = (signal.SIGTERM, signal.SIGINT)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, however that happens. Elsewhere this does nothing."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return


class Child(Protocol):
    """What `subprocess.Popen` and `Forked` have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def preload(modules: Iterable[str]) -> None:
    """Import what services that are forked from now on have in common. What is not installed here, they do without."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector of a fork need not write to what it shares with others


class Forked:
    """A process that runs `python -m module` in a fork of this one.

    Args:
        module: what it runs.
        env: variables that it has besides ours.
        log: where its output goes.
        name: for lists of processes.
    """

    def __init__(self, module: str, env: dict[str, str], log: Path, name: str) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until they mean the fork itself
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        else:
            code = 1
            try:
                code = _become(module, env, log, name)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Its exit status once it has ended; negative: the signal."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _become(module: str, env: dict[str, str], log: Path, name: str) -> int:
    """Be that module's process, in a fork. Returns its exit status."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    die_with_parent()
    call_it(name)
    os.environ.update(env)
    ours = [os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)]
    for there, here in ((0, ours[0]), (1, ours[1]), (2, ours[1])):
        os.dup2(here, there)
    for descriptor in ours:
        os.close(descriptor)
    return run_as_main(module, [])


def run_as_main(module: str, arguments: list[str]) -> int:
    """Do what `python -m module arguments` does, in a fork, until its end. Returns its exit status."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finish()
    return code


def call_it(name: str) -> None:
    """What lists of processes call this one, where the system has such names."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, f"wooly-{name}".encode()[:15])


@dataclass
class Service:
    """A child to be kept running.

    Attributes:
        name: for logs and status.
        argv: command line; or a module's name, which is run in a fork.
        env: variables added to the supervisor's own.
        log: where its output goes.
    """

    name: str
    argv: list[str] | str
    env: dict[str, str]
    log: Path
    process: Child | None = None
    started_at: float = 0.0
    failures: int = 0
    not_before: float = field(default=0.0)

    def start(self) -> None:
        """Start it now."""
        self.started_at = time.monotonic()
        if isinstance(self.argv, str):
            self.process = Forked(self.argv, self.env, self.log, self.name)
            return
        with self.log.open("ab") as out:  # private: the supervisor's umask
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                preexec_fn=die_with_parent,
            )

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
        self.ask_to_end()
        self.see_it_end(timeout)

    def ask_to_end(self) -> None:
        """Send SIGTERM, and wait for nothing."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def see_it_end(self, timeout: float = 5.0) -> None:
        """Wait for its end, and make one after `timeout` seconds."""
        process = self.process
        if process is None or process.poll() is not None:
            return
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
