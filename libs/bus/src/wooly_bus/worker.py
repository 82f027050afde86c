"""A worker process for risky work, with limits: a crash, a hang or excessive memory use fails one request, not the service.

The first request starts the process, and it serves many requests. After a crash or a timeout, the next request starts a new
process. The protocol uses standard input and output: a JSON line in each direction; bytes follow the line of an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from wooly_wis.errors import WisError

#: Longest error of a worker that ends with it, in characters.
_MESSAGE: Final = 1000
#: Largest answer of a worker, in bytes.
MAX_ANSWER: Final = 64 << 20


class WorkerError(WisError):
    """A worker refused a request, crashed, or took too long."""

    code = "worker.failed"


class _FailedError(Exception):
    """A worker ended with an error that is no answer; the message is the error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request.

    Attributes:
        seconds: wall-clock time, in seconds.
        memory: address space of the process, in bytes.
    """

    seconds: float = 60.0
    memory: int = 16 << 30


class WorkerProcess:
    """Sends requests to a worker process, one at a time.

    Args:
        limits: limits of each request.
        module: the module that the process runs; it calls `serve`.
        arguments: arguments of the process after the memory limit.

    Attributes:
        steps: the steps of the last request: name, begin and end in ns since 1970.
    """

    #: Name of the process in messages; the target follows it.
    noun: ClassVar[str] = "the compiler for"
    #: Class of the errors that `ask` raises.
    error: ClassVar[type[WisError]] = WorkerError

    def __init__(self, limits: Limits, module: str, arguments: Sequence[str] = ()) -> None:
        self._limits = limits
        self._module = module
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.steps: list[tuple[str, int, int]] = []

    def ask(self, request: dict[str, Any], target: str, what: str) -> bytes:
        """Send a request, and return the answer.

        Args:
            request: the request, as JSON. If it has `after_crash`, and the worker crashes, a new worker gets the request with
                the values of `after_crash` in it.
            target: the target of the work, for messages.
            what: the subject of the work, for messages.

        Raises:
            WorkerError: the worker refused the request, crashed, or took too long. `error` is the actual class.
        """
        deadline = time.monotonic() + self._limits.seconds
        self.steps = []
        process = self._started()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._read(process, None, deadline))
            self.steps = [(str(n), int(b), int(e)) for n, b, e in answer.get("steps", ())]
            if "failed" in answer:
                raise _FailedError(answer["failed"])
            if "error" in answer:
                error = self.error(answer["error"])
                error.retryable = bool(answer["retryable"])
                raise error
            return self._read(process, answer["nbytes"], deadline)
        except (EOFError, BrokenPipeError, _FailedError) as e:
            ended = (
                f"failed on {what}: {e}"
                if isinstance(e, _FailedError)
                else f"crashed (exit {process.wait()}) on {what}"
            )
            self.close()
            changes = request.get("after_crash")
            if changes:
                return self.ask({**request, **changes, "after_crash": None}, target, what)
            raise self._failed(f"{self.noun} {target} {ended}") from None
        except TimeoutError:
            self.close()
            seconds = f"{self._limits.seconds:g} s"
            raise self._failed(f"{self.noun} {target} took more than {seconds} on {what}") from None

    def _failed(self, message: str) -> WisError:
        """A retryable error: the request may not be the cause."""
        error = self.error(message)
        error.retryable = True
        return error

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(self._limits.memory), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _read(self, process: subprocess.Popen[bytes], nbytes: int | None, deadline: float) -> bytes:
        """Read `nbytes` bytes, or a line if `nbytes` is None."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while nbytes is None or len(found) < nbytes:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                # read a line byte by byte, so that the bytes after it stay in the pipe
                chunk = os.read(fd, 1 if nbytes is None else min(nbytes - len(found), 1 << 20))
                if not chunk:
                    raise EOFError
                if nbytes is None and chunk == b"\n":
                    break
                found += chunk
                if len(found) > MAX_ANSWER:
                    raise self.error(f"the answer of the worker has more than {MAX_ANSWER} bytes, which is the limit")
        return bytes(found)

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert stream is not None
                    stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    memory: int,
    answer_to: Callable[[dict[str, Any]], bytes],
    before: Callable[[], None] = lambda: None,
    steps: list[tuple[str, int, int]] | None = None,
) -> None:
    """Answer requests until the input ends: the main loop of the worker process.

    Args:
        memory: limit of the process's address space, in bytes.
        answer_to: returns the answer to a request; if it raises a `WisError`, the error is the answer.
        before: called before each request.
        steps: list to which `answer_to` appends its steps.
    """
    noted = steps if steps is not None else []
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # An executor's own limit is for what was free when it started this process.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of a compiler must not mix with answers
    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        found = b""
        noted.clear()
        try:
            before()
            found = answer_to(request)
            answer: dict[str, Any] = {"nbytes": len(found)}
        except WisError as e:
            answer = {"error": str(e), "retryable": e.retryable}
        except MemoryError:
            answer = {"error": f"this work needs more memory than its limit of {memory} bytes", "retryable": False}
        except Exception as e:  # a fault of the worker or its machine, for example a folder that cannot be written
            answers.write(json.dumps({"failed": f"{type(e).__name__}: {str(e)[:_MESSAGE]}"}).encode() + b"\n")
            answers.flush()
            raise
        if noted:
            answer["steps"] = noted
        answers.write(json.dumps(answer).encode() + b"\n" + found)
        answers.flush()
