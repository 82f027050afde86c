"""Start, find and stop a local stack. The stack itself runs in its supervisor process.

`wooly run` imports this module before all others, so what takes long to import is imported where it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from wooly_bus import host
from wooly_bus.private import refuse_foreign

from wooly_local.processes import can_lend, fork_lent

if TYPE_CHECKING:
    from wooly_bus.access import Access
    from wooly_bus.authority import Authority

#: Longest start of a stack, in seconds.
START_TIMEOUT_S = 90.0
#: Seconds after which the processes of a stack that still run get SIGKILL.
STOP_TIMEOUT_S = 15.0
#: Timeout of a request to the router's REST, in seconds.
REST_TIMEOUT_S = 10.0
#: File in which an ephemeral stack asks its parent process to fork the executor.
LENT = "executor.lent"
#: Name patterns of the files of a stack. Earlier versions let other users read some of them; their modes are corrected.
OURS = (
    "stack.json*",
    "*.token",
    "*.port",
    "*.log",
    "*.sqlite*",
    "*.db*",
    "*.sock",
    "logs",
    "nats",
    "jetstream",
    "keys",
    "compiler",
    "artifacts",
    "pocl",
    "swap",
)


class StackError(RuntimeError):
    """The local stack cannot be started; the message has the reason."""

    code = "local.stack"
    retryable = False


@dataclass
class Stack:
    """A running local stack.

    Attributes:
        state_dir: directory of its files.
        nats_url: URL of its NATS server.
        rest_url: URL of its router's REST.
        services: process id of each service.
        ephemeral: the stack ends with this process, and its files are removed.
    """

    state_dir: Path
    nats_url: str
    rest_url: str
    services: dict[str, int]
    ephemeral: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _executor: int = 0

    @property
    def token(self) -> str:
        """The owner's token for REST and for `/metrics`."""
        return owner_token(self.state_dir).read_text().strip()

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send a request to `/api/v1/<path>` of the router's REST with the owner's token. Returns the JSON of the answer.

        Raises:
            OSError: the router does not answer, or refuses (`urllib.error.HTTPError`).
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.rest_url}/api/v1/{path}", data, headers, method=method)
        with open_directly(asked, REST_TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"null")

    def ui_url(self) -> str:
        """The URL of the web UI with a login code that is valid once. If REST does not answer, the URL has no code.

        The code is after the `#`, which browsers do not send.
        """
        try:
            return f"{self.rest_url}/ui/#/login/{self.request('POST', 'login/code')['code']}"
        except (OSError, ValueError):
            return f"{self.rest_url}/ui/"

    @property
    def creds(self) -> Path:
        """The owner's credentials for NATS."""
        return keys_of(self.state_dir).admin_creds

    def access(self) -> Access:
        """The owner's access to NATS."""
        from wooly_bus.access import Access
        from wooly_bus.credentials import Credentials

        return Access(self.nats_url, lambda: Credentials.load(self.creds))

    @property
    def client_env(self) -> dict[str, str]:
        """Environment variables with which clients find the stack and have the owner's permissions."""
        return {"WOOLYAI_CONTROLLER_URL": self.nats_url, "WOOLYAI_NATS_CREDS": str(self.creds)}

    def stop(self) -> None:
        """Stop the stack, and wait for its end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # the supervisor notices this sooner than a signal
        stop_stack(self.state_dir)
        if self._process is not None:
            self._process.wait(10)
        if self._executor:
            with contextlib.suppress(ChildProcessError):  # the script has waited for all children of this process
                os.waitpid(self._executor, 0)
        if self.ephemeral:
            shutil.rmtree(self.state_dir, ignore_errors=True)


def open_directly(request: urllib.request.Request | str, timeout_s: float) -> Any:
    """Send an HTTP request to a service of this machine: not through a proxy (`http_proxy`), which must not see tokens.

    Raises:
        OSError: no answer, or a refusal (`urllib.error.HTTPError`).
    """
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)


def keys_of(state_dir: Path) -> Authority:
    """The keys of a stack. Only its user may read the files."""
    from wooly_bus.authority import Authority

    return Authority(state_dir / "keys")


def owner_token(state_dir: Path) -> Path:
    """The file with the token of a stack's owner. Only its user may read the file."""
    return state_dir / "owner.token"


def make_owner_token(state_dir: Path) -> None:
    """Create the token of a stack's owner if it does not exist."""
    with os.fdopen(os.open(owner_token(state_dir), os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        if not file.read().strip():
            file.write(f"wooly_{secrets.token_urlsafe(32)}")


def default_state_dir() -> Path:
    """`$WOOLYAI_STATE_DIR`, or the user's state directory."""
    configured = os.environ.get("WOOLYAI_STATE_DIR")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly"


def _alive(identity: dict[str, Any]) -> psutil.Process | None:
    """The process with this process id and creation time; None if it has ended, even if its process id was reused."""
    try:
        process = psutil.Process(int(identity["pid"]))
        if abs(process.create_time() - float(identity["created"])) > 1 or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except (KeyError, ValueError, psutil.NoSuchProcess):
        return None
    return process


def _read(state_dir: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((state_dir / "stack.json").read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_stack(state_dir: Path) -> Stack | None:
    """The stack that runs in `state_dir`; None if no stack runs there."""
    content = _read(state_dir)
    if content is None or content.get("state") != "ready" or _alive(content.get("supervisor", {})) is None:
        return None
    services = {name: s["pid"] for name, s in content.get("services", {}).items() if _alive(s) is not None}
    return Stack(state_dir, content["nats_url"], content["rest_url"], services)


def is_starting(state_dir: Path) -> bool:
    """Whether a stack is being started in `state_dir`."""
    content = _read(state_dir) or {}
    return content.get("state") == "starting" and _alive(content.get("supervisor", {})) is not None


@dataclass
class StartingStack:
    """A stack whose supervisor was started.

    Attributes:
        state_dir: directory of its files.
        ephemeral: the stack ends with this process, and its files are removed.
        lends: it waits for `fork_executor`.
    """

    state_dir: Path
    ephemeral: bool
    _process: subprocess.Popen[bytes]
    lends: bool = False
    _executor: int = 0

    def fork_executor(self) -> None:
        """Fork the executor of a stack that was begun with `lends` from this process, which has imported torch.

        This saves a second import of torch. If the stack does not start, `wait` reports it.

        Raises:
            OSError: no process can be forked.
        """
        self.lends = False
        paper = self.state_dir / LENT
        deadline = time.monotonic() + START_TIMEOUT_S
        while not paper.exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if paper.exists():
            self._executor = fork_lent(paper)

    def wait(self) -> Stack:
        """Wait until the stack can serve clients.

        Raises:
            StackError: the stack did not start.
        """
        process = self._process
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            if self.lends:
                self.fork_executor()
            while time.monotonic() < deadline:
                stack = read_stack(self.state_dir)
                if stack is not None:
                    stack.ephemeral = self.ephemeral
                    stack._process, stack._executor = process, self._executor
                    return stack
                if process.poll() is not None:
                    break
                time.sleep(0.02)
        except BaseException:  # after Ctrl-C, nothing else would stop the starting stack
            self.cancel()
            raise
        process.kill()
        words = _log(self.state_dir).read_text(errors="replace").strip()
        self.cancel()
        raise StackError(words or f"the local stack did not start; its log is {_log(self.state_dir)}")

    def cancel(self) -> None:
        """Stop the starting stack, and wait for its end."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        stop_stack(self.state_dir)  # stops services that a killed supervisor left behind
        if self.ephemeral:
            shutil.rmtree(self.state_dir, ignore_errors=True)


def begin_stack(
    state_dir: Path | None = None, *, ephemeral: bool = False, gpus: int = 1, lends: bool = False
) -> StartingStack:
    """Start a stack without waiting until it is ready.

    Args:
        state_dir: state directory; None: the default one, or a temporary one for an ephemeral stack.
        ephemeral: end the stack when this process ends for any reason.
        gpus: number of executors; each serves one device.
        lends: this process will fork the executor of an ephemeral stack (`StartingStack.fork_executor`). If the stack has
            several, or the system cannot do this, the stack does it.

    Raises:
        StackError: a stack already runs in the directory, another user owns it, or it cannot be made.
    """
    if state_dir is None:
        state_dir = _temporary() if ephemeral else default_state_dir()
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise StackError(
            f"cannot make the state directory {state_dir}: {e.strerror}; set WOOLYAI_STATE_DIR to a folder that you may write to"
        ) from e
    try:
        refuse_foreign(state_dir)  # check first: a foreign user could have put files or links in it
    except PermissionError as e:
        raise StackError(f"{e} (WOOLYAI_STATE_DIR)") from e
    if read_stack(state_dir) is not None:
        raise StackError(f"a stack already runs in {state_dir}; `wooly status` shows it, `wooly down` stops it")
    if is_starting(state_dir):
        raise StackError(f"a stack is already being started in {state_dir}; wait for it, or stop it with `wooly down`")
    stop_stack(state_dir)
    argv = [sys.executable, "-m", "wooly_local.supervisor", "--state-dir", str(state_dir), "--gpus", str(gpus)]
    lends = lends and ephemeral and gpus == 1 and can_lend()  # each of several executors has its own number of threads
    if lends:
        argv.append("--lend-executor")
    with os.fdopen(os.open(_log(state_dir), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
        process = subprocess.Popen(
            [*argv, "--die-with-stdin"] if ephemeral else argv,
            stdin=subprocess.PIPE if ephemeral else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return StartingStack(state_dir, ephemeral, process, lends)


def _temporary() -> Path:
    """A new folder for an ephemeral stack, from which kernels can run: hardened machines forbid it in `/tmp`."""
    home = default_state_dir()
    if not host.why_no_code(Path(tempfile.gettempdir())) or host.why_no_code(home):
        return Path(tempfile.mkdtemp(prefix="wooly-"))
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(prefix="run-", dir=home))


def start_stack(state_dir: Path | None = None, *, ephemeral: bool = False, gpus: int = 1) -> Stack:
    """Start a stack as `begin_stack` does, and wait until it can serve clients.

    Raises:
        StackError: as `begin_stack`; or the stack did not start.
    """
    return begin_stack(state_dir, ephemeral=ephemeral, gpus=gpus).wait()


def _log(state_dir: Path) -> Path:
    return state_dir / "supervisor.log"


def stop_stack(state_dir: Path, timeout: float = STOP_TIMEOUT_S) -> bool:
    """Stop the stack in `state_dir`, including services of a killed supervisor. Returns whether any process ran."""
    content = _read(state_dir)
    if content is None:
        return False
    processes = []
    supervisor = _alive(content.get("supervisor", {}))
    if supervisor is not None:
        supervisor.terminate()
        processes.append(supervisor)
    else:
        for identity in content.get("services", {}).values():
            process = _alive(identity)
            if process is not None:
                process.terminate()
                processes.append(process)
    _, stubborn = psutil.wait_procs(processes, timeout)
    for process in stubborn:
        process.kill()
    psutil.wait_procs(stubborn, 5)
    for identity in content.get("services", {}).values():
        left = _alive(identity)
        if left is not None:
            left.kill()
    (state_dir / "stack.json").unlink(missing_ok=True)
    return bool(processes)
