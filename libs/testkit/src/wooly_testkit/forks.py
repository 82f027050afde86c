"""Starts Wooly's processes quickly: as forks of a process that has already imported the modules, which take most of a start.

The first fork starts this parent. The workers of pytest-xdist share one, because its imports take seconds (`share`). The services
of a local stack start in the same way (ADR 26). Tests of the start itself use `subprocess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wooly_testkit.python_private import close_pipe_ends, waiting_lock

if TYPE_CHECKING:
    from wooly_local.stack import Stack

#: Modules that import PyTorch. The parent loads PyTorch before the first fork of one of these.
_WITH_TORCH = ("wooly", "wooly_executor", "wooly_local.supervisor")
#: PyTorch, and the module that its first inference of a shape imports, in clients and executors. This module imports SymPy.
_TORCH = ("torch", "torch.fx.experimental.symbolic_shapes")
#: Services. The parent loads the modules of a service before its first fork; importing them has no side effects.
_SERVICES = ("wooly_executor", "wooly_router", "wooly_scheduler", "wooly_metering", "wooly_compiler")
#: Modules that a client imports before it has a session, except modules that read the environment or the terminal on import.
_OF_A_CLIENT = (
    "typer", "rich.console", "rich.live", "rich.table",
    "wooly.api", "wooly.control", "wooly.export", "wooly.jobs", "wooly.traces", "wooly.kernels.cuda_c",
    "torch._dynamo",  # every optimizer imports it, which takes a second
)  # fmt: skip
#: Services whose modules are loaded before the fork of a module. The services of a stack are forks of its supervisor.
_OF_A_STACK = {"wooly_local.supervisor": _SERVICES, **{service: (service,) for service in _SERVICES}}
#: Further modules of a service, which it imports only if it serves REST.
_OF_SERVICE = {"wooly_router": ("wooly_router.front",)}
#: Environment variable with another interpreter for executors: its environment may have another PyTorch (`tests/matrix.py`).
OTHER_PYTHON = "WOOLY_TEST_EXECUTOR"
_lock = threading.Lock()
_parent: tuple[subprocess.Popen[bytes] | None, socket.socket] | None = None
#: The folder of the socket at which the parent listens for other processes, once `share` has been called.
_shared: str | None = None


class Forked(subprocess.Popen[Any]):
    """As `subprocess.Popen` of `python -m module arguments`, but by a fork. The process dies with the test process.

    Args:
        module: module to run as `__main__`.
        arguments: command line arguments.
        like: if `module` belongs to a test: the module of Wooly whose imports it needs.
        options: options of `subprocess.Popen`: working folder, environment, standard streams.
    """

    _status: socket.socket

    def __new__(cls, module: str, *arguments: str, like: str = "", **options: Any) -> Any:
        """An executor of another interpreter is no fork."""
        other = os.environ.get(OTHER_PYTHON)
        if other and module == "wooly_executor":
            return subprocess.Popen([other, "-m", module, *arguments], **options)
        return super().__new__(cls)

    def __init__(self, module: str, *arguments: str, like: str = "", **options: Any) -> None:
        self._like = like or module
        super().__init__([module, *arguments], **options)

    def _execute_child(
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *_: Any,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        request = json.dumps([args, environment, str(cwd or Path.cwd()), self._like]).encode()
        self._status, theirs = socket.socketpair()
        descriptors = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs, _lock:
            socket.send_fds(_start(), [len(request).to_bytes(4, "little")], [theirs.fileno(), *descriptors])
            _start().sendall(request)
        self.pid = int.from_bytes(self._status.recv(4), "little")
        if not self.pid:
            raise RuntimeError("cannot fork: the parent of all forks has ended; look for its error on standard error")
        self._child_created = True
        close_pipe_ends(self, (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended(0) if self._status.fileno() >= 0 else self.returncode

    def _wait(self, timeout: float | None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._status], [], [], left if left is None else min(left, 0.1))
            with waiting_lock(self):  # another thread may be waiting, too
                if ready and self.returncode is None:
                    said = self._status.recv(4)
                    self.returncode = int.from_bytes(said, "little", signed=True) if said else -signal.SIGKILL
                    self._status.close()
            if left == 0:
                break
        return self.returncode


def run(module: str, *arguments: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -m module arguments` with captured text output, but by a fork."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Forked(module, *arguments, text=True, **pipes, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess([module, *arguments], process.returncode, out, errors)


def start_stack(state_dir: Path, *, ephemeral: bool = False, gpus: int = 1, **env: str) -> Stack:
    """As `wooly_local.stack.start_stack`, but the supervisor is a fork that has loaded PyTorch for its executors.

    Args:
        state_dir: state directory.
        ephemeral: the stack ends with this process.
        gpus: number of executors.
        env: further environment variables.
    """
    from wooly_local.stack import StartingStack

    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = ["--state-dir", str(state_dir), "--gpus", str(gpus), *(["--die-with-stdin"] if ephemeral else [])]
    stdin = subprocess.PIPE if ephemeral else subprocess.DEVNULL
    with (state_dir / "supervisor.log").open("wb") as log:
        process = Forked(
            "wooly_local.supervisor", *argv, env=os.environ | env, stdin=stdin, stdout=log, stderr=subprocess.STDOUT
        )
    return StartingStack(state_dir, ephemeral, process).wait()


def share() -> str:
    """The path of a socket at which other processes of this user reach the parent of this process's forks.

    It must be called before the first fork. Forks for another process end with that process.
    """
    global _shared
    if _shared is None:
        assert _parent is None, "the parent of all forks runs already, and does not listen"
        _shared = tempfile.mkdtemp(prefix="wooly-forks-")
        _start()
    return f"{_shared}/socket"


def join(path: str) -> None:
    """Use the parent that another process shares at `path`, instead of an own one. It must be called before the first fork."""
    global _parent
    way = socket.socket(socket.AF_UNIX)
    way.connect(path)
    _parent = (None, way)


def _start() -> socket.socket:
    """The socket to the parent of all forks. The first call starts the parent."""
    global _parent
    if _parent is None:
        with contextlib.ExitStack() as theirs:
            ours, way = socket.socketpair()
            given = [theirs.enter_context(way)]
            if _shared is not None:
                given.append(theirs.enter_context(socket.socket(socket.AF_UNIX)))
                given[1].bind(f"{_shared}/socket")
                given[1].listen()
            numbers = [s.fileno() for s in given]
            argv = [sys.executable, "-m", "wooly_testkit.forks", *map(str, numbers)]
            env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
            _parent = (subprocess.Popen(argv, pass_fds=numbers, env=env), ours)
    return _parent[1]


def shut_down() -> None:
    """End all remaining forks of this process, and the parent of all forks if this process has started it."""
    global _parent, _shared
    if _parent is not None:
        process, way = _parent
        _parent = None
        way.close()
        if process is not None:
            process.wait(20)
    if _shared is not None:
        shutil.rmtree(_shared, ignore_errors=True)
        _shared = None


# -- the parent ----------------------------------------------------------------------------------------------------------


class _Server:
    """Forks on request, and reports the end of each fork. This process has one thread.

    Args:
        way: socket to the process that started this one.
        listener: socket at which other processes connect.
    """

    def __init__(self, way: socket.socket, listener: socket.socket | None) -> None:
        self._first, self._listener = way, listener
        self._ways = [way]
        #: By process id: the socket that gets the exit status, and the socket that the request came from.
        self._children: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._threads = 0

    def run(self) -> None:
        """Serve until the process that started this one has ended."""
        from wooly_local.processes import preload
        from wooly_local.supervisor import EVERYWHERE, WITH_REST

        preload((*EVERYWHERE, *WITH_REST))
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while self._first in self._ways:
            listeners = [] if self._listener is None else [self._listener]
            watched: list[Any] = [*self._ways, *listeners, self._woken]
            ready, _, _ = select.select(watched, [], [])
            if self._woken in ready:  # read first: a fork that ends after this wakes the loop again
                os.read(self._woken, 1 << 10)
            self._report()
            if self._listener in ready and self._listener is not None:
                self._ways.append(self._listener.accept()[0])
            for way in [w for w in self._ways if w in ready]:
                self._answer(way)

    def _report(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with self._children.pop(pid)[0] as teller, contextlib.suppress(OSError):
                teller.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))

    def _answer(self, way: socket.socket) -> None:
        """Fork once, or end the forks of a process that has ended."""
        head: bytes = b""
        descriptors: list[int] = []
        with contextlib.suppress(ConnectionError):
            head, descriptors, _, _ = socket.recv_fds(way, 4, 4)
        if not head:
            self._ways.remove(way)
            way.close()
            for pid, (_, whose) in self._children.items():
                if whose is way:
                    os.kill(pid, signal.SIGTERM)  # not yet waited for, so the number is still its own
            return
        request = b""
        while left := int.from_bytes(head, "little") - len(request):
            request += way.recv(left)
        (module, *arguments), env, cwd, like = json.loads(request)
        self._load(like)
        status_fd, *standard = descriptors
        teller = socket.socket(fileno=status_fd)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            tellers = [t for t, _ in self._children.values()]
            listeners = [] if self._listener is None else [self._listener]
            for s in (*self._ways, *listeners, *tellers, teller):
                s.close()
            for descriptor in (self._woken, self._wake):
                os.close(descriptor)
            _run_in_fork(module, arguments, env, cwd, standard, self._threads)
        self._children[pid] = teller, way
        for descriptor in standard:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            teller.sendall(pid.to_bytes(4, "little"))

    def _load(self, like: str) -> None:
        """Import what forks of a module share."""
        from wooly_local.processes import preload

        if like in _WITH_TORCH and not self._threads:
            preload(_TORCH)
            self._threads = sys.modules["torch"].get_num_threads()
        if like == "wooly" and "wooly.api" not in sys.modules:
            preload(_OF_A_CLIENT)
            sys.modules["wooly.torch_private"].all_aten_overloads()  # PyTorch creates each overload at its first use
        wanted = [*[f"{s}.app" for s in _OF_A_STACK.get(like, ())], *_OF_SERVICE.get(like, ())]
        if new := [name for name in wanted if name not in sys.modules]:
            preload(new)


def _run_in_fork(
    module: str, arguments: list[str], env: dict[str, str], cwd: str, standard: list[int], threads: int
) -> None:
    """Run a module in this fork, and exit with its status."""
    from wooly_local.processes import die_with_parent, run_as_main  # type: ignore[attr-defined,unused-ignore]

    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # as in a terminal, even if the tests run in the background
        die_with_parent()
        for here, there in enumerate(standard):
            os.dup2(there, here)
            os.close(there)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[0] = cwd
        sys.path[1:1] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
        if threads:  # OpenMP has read OMP_NUM_THREADS in the parent, when it was loaded
            sys.modules["torch"].set_num_threads(int(env.get("OMP_NUM_THREADS", threads)))
        code = run_as_main(module, arguments)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from wooly_local.processes import die_with_parent

    die_with_parent()
    _way, *_listeners = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    _Server(_way, _listeners[0] if _listeners else None).run()
    # At the end of an interpreter, Triton prints thirty lines about objects that the frozen modules keep.
    os._exit(0)
