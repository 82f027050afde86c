"""One supervised child process: start, log file, restart with back-off, stop. Children die with their supervisor.

Python services are forks of the supervisor, which has imported the modules that they share, because imports take most of the
start time of a service. The supervisor has one thread and runs no code of the services.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from wooly_local.python_private import finish, leave_to_the_end

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
#: Maximum back-off before a service is restarted, in seconds.
MAX_BACKOFF_S = 10.0
_ENDING = (signal.SIGTERM, signal.SIGINT)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies for any reason. On other systems this does nothing."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return


class Child(Protocol):
    """The common interface of `subprocess.Popen` and `Forked`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def preload(modules: Iterable[str]) -> None:
    """Import modules that later forks share. Modules that are not installed are skipped."""
    gc.disable()  # imports make many objects and no garbage
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    gc.freeze()  # the garbage collector of a fork must not write to the shared memory pages
    leave_to_the_end()


class Forked:
    """A fork of this process that runs `python -m module`.

    Args:
        module: the module.
        env: environment variables in addition to those of this process.
        log: file for the output.
        name: name in process lists.
    """

    def __init__(self, module: str, env: dict[str, str], log: Path, name: str) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until the fork has its own handlers
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        else:
            _end_as_service(module, env, log, name)

    def poll(self) -> int | None:
        """The exit status, or None while the process runs. A negative status is the number of a signal."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Lent:
    """A service that another process forks for the supervisor: the client of an ephemeral stack, which has imported torch.

    Args:
        paper: file with what the other process should run. The answer, a process id, comes in a file beside it.
        module: the module.
        env: environment variables in addition to those of the other process.
        log: file for the output.
        name: name in process lists.

    Attributes:
        pid: its process id; 0: it is not forked yet.
        returncode: 0 after its end. Its real exit status is unknown, because its parent is another process.
    """

    def __init__(self, paper: Path, module: str, env: dict[str, str], log: Path, name: str) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._descriptor = -1
        self._answer = paper.with_suffix(".pid")
        text = json.dumps({"module": module, "env": env, "log": str(log), "name": name, "supervisor": os.getpid()})
        _write_whole(paper, text)

    def poll(self) -> int | None:
        """0 if the process has ended; None while it runs, or is not forked yet."""
        if self.returncode is None and (self.pid or self._arrived()) and _ended(self._descriptor, 0.0):
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. A process that is not forked yet counts as ended.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        if self.poll() is None:
            if self.pid and not _ended(self._descriptor, timeout):
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
            self._end()
        return 0

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _arrived(self) -> bool:
        try:
            pid = int(self._answer.read_text())
            self._descriptor = os.pidfd_open(pid)
        except FileNotFoundError:
            return False
        except ProcessLookupError:
            self.returncode = 0
            return False
        self.pid = pid
        return True

    def _end(self) -> None:
        self.returncode = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def can_lend() -> bool:
    """Whether this system lets a process watch the end of a process that is not its child."""
    return hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")


def fork_lent(paper: Path) -> int:
    """Fork the service that a `Lent` asks for. Returns its process id.

    The fork ends with this process and with the supervisor. It has none of this process's files.

    Raises:
        OSError: the file does not exist, or no process can be forked.
    """
    asked = json.loads(paper.read_text())
    client = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's library has threads, and is prepared for forks
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setsid()  # Ctrl-C in the terminal is for the client
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.path[0] = str(Path.cwd())  # as for `python -m`
        gc.enable()
        gc.freeze()  # as in `preload`
        leave_to_the_end()  # what exists now is the client's
        masters = client, int(asked["supervisor"])
        _end_as_service(asked["module"], asked["env"], Path(asked["log"]), asked["name"], masters)
    _write_whole(paper.with_suffix(".pid"), str(pid))
    return pid


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


def _ended(descriptor: int, timeout: float | None) -> bool:
    """Whether the process of a pidfd ends within `timeout` seconds."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if timeout is None else timeout * 1000))


def _end_with(pids: Iterable[int]) -> None:
    """End this process when one of these processes ends, or has ended."""
    waiting = select.poll()
    try:
        for pid in pids:
            waiting.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        waiting.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="wooly-supervised", daemon=True).start()


def _end_as_service(module: str, env: dict[str, str], log: Path, name: str, masters: Sequence[int] = ()) -> NoReturn:
    """Run a module in this fork, and end it.

    Args:
        module: the module.
        env: further environment variables.
        log: file for the output.
        name: name in process lists.
        masters: processes with which it ends; empty: its parent.
    """
    code = 1
    try:
        code = _run_in_fork(module, env, log, name, masters)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_in_fork(module: str, env: dict[str, str], log: Path, name: str, masters: Sequence[int]) -> int:
    """Run a module in this fork. Returns the exit status."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    if masters:
        _end_with(masters)
    else:
        die_with_parent()
    set_process_name(name)
    os.environ.update(env)
    ours = [os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)]
    for there, here in ((0, ours[0]), (1, ours[1]), (2, ours[1])):
        os.dup2(here, there)
    for descriptor in ours:
        os.close(descriptor)
    return run_as_main(module, [])


def run_as_main(module: str, arguments: list[str]) -> int:
    """Do in a fork what `python -m module arguments` does. Returns the exit status."""
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


def set_process_name(name: str) -> None:
    """Set the name of this process in process lists, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, f"wooly-{name}".encode()[:15])


@dataclass
class Service:
    """A child process that is restarted when it ends.

    Attributes:
        name: name for logs and status.
        argv: command line; or the name of a module that runs in a fork.
        env: environment variables in addition to those of the supervisor.
        log: file for the output.
        process: the current process; None before the first start.
        started_at: time of the last start, in monotonic seconds.
        failures: number of recent failures, which determines the back-off.
        not_before: earliest time of the next restart, in monotonic seconds; 0: not set.
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
        """Start the process."""
        self.started_at = time.monotonic()
        if isinstance(self.argv, str):
            self.process = Forked(self.argv, self.env, self.log, self.name)
            return
        with self.log.open("ab") as out:  # the umask of the supervisor makes the file private
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                preexec_fn=die_with_parent,
            )

    def lend(self, paper: Path, more: dict[str, str]) -> None:
        """Let another process fork the service (`fork_lent`). After its end, `start` restarts it as usual.

        Args:
            paper: file by which the other process learns what to run.
            more: further environment variables, which forks of the supervisor inherit.
        """
        assert isinstance(self.argv, str), "only Python services can be lent"
        self.started_at = time.monotonic()
        self.process = Lent(paper, self.argv, more | self.env, self.log, self.name)

    @property
    def pid(self) -> int | None:
        """Process id; None if the process does not run; 0 if another process has not forked it yet."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def keep_alive(self, now: float) -> bool:
        """Restart the process if it has ended and its back-off is over. Returns whether it was restarted."""
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
        """Send SIGTERM, and SIGKILL if the process still runs after `timeout` seconds."""
        self.ask_to_end()
        self.wait_for_end(timeout)

    def ask_to_end(self, *, at_once: bool = False) -> None:
        """Send SIGTERM, or with `at_once` SIGKILL, without waiting."""
        if self.process is not None and self.process.poll() is None:
            (self.process.kill if at_once else self.process.terminate)()

    def wait_for_end(self, timeout: float = 5.0) -> None:
        """Wait for the end of the process. Send SIGKILL after `timeout` seconds."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
