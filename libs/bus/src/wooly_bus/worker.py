"""A process beside a service for risky work, with limits: what crashes, hangs or eats memory there is one failed request.

The process is started with the first request and serves many; after a crash or a timeout the next request starts another. It
talks through its standard input and output: a JSON line each way, answers followed by bytes.
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

MAX_ANSWER: Final = 64 << 20


class WorkerError(WisError):
    """A worker refused a request, crashed, or took too long."""

    code = "worker.failed"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take.

    Attributes:
        seconds: of wall clock.
        memory: of address space, in bytes.
    """

    seconds: float = 60.0
    memory: int = 16 << 30


class WorkerProcess:
    """Answers requests one at a time, each within limits.

    Args:
        limits: of each request.
        module: what runs in the process; it calls `serve`.
        arguments: of the process, besides the limit.

    Attributes:
        steps: what the last answer's work consisted of: names, and when each began and ended in ns since 1970.
    """

    #: What it is, in messages: goes before the target.
    noun: ClassVar[str] = "the compiler for"
    #: What is raised.
    error: ClassVar[type[WisError]] = WorkerError

    def __init__(self, limits: Limits, module: str, arguments: Sequence[str] = ()) -> None:
        self._limits = limits
        self._module = module
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.steps: list[tuple[str, int, int]] = []

    def ask(self, request: dict[str, Any], target: str, what: str) -> bytes:
        """The answer to a request; `target` and `what` are for messages.

        Raises:
            WorkerError: it is refused, or the process crashed or took too long (of the class that `error` says).
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
            if "error" in answer:
                error = self.error(answer["error"])
                error.retryable = bool(answer["retryable"])
                raise error
            return self._read(process, answer["nbytes"], deadline)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self.close()
            raise self._failed(f"{self.noun} {target} crashed (exit {code}) on {what}") from None
        except TimeoutError:
            self.close()
            seconds = f"{self._limits.seconds:g} s"
            raise self._failed(f"{self.noun} {target} took more than {seconds} on {what}") from None

    def _failed(self, message: str) -> WisError:
        """What is not the request's fault for sure: it may be asked again."""
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
        """That many bytes, or a line."""
        assert process.stdout is not None
        fd = process.stdout.fileno()
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while nbytes is None or len(found) < nbytes:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                # a line is read byte by byte, so that nothing of what follows is taken with it
                chunk = os.read(fd, 1 if nbytes is None else min(nbytes - len(found), 1 << 20))
                if not chunk:
                    raise EOFError
                if nbytes is None and chunk == b"\n":
                    break
                found += chunk
                if len(found) > MAX_ANSWER:
                    raise self.error(f"an answer of more than {MAX_ANSWER} bytes")
        return bytes(found)

    def close(self) -> None:
        """End the process."""
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
    """Answer requests until the input ends: the worker's main loop.

    Args:
        memory: bytes of address space that the process may have.
        answer_to: what answers a request; a `WisError` that it raises is the answer.
        before: called before each request.
        steps: where `answer_to` notes what it did.
    """
    noted = steps if steps is not None else []
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
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
            answer = {"error": f"the compiler wanted more than {memory} bytes", "retryable": False}
        if noted:
            answer["steps"] = noted
        answers.write(json.dumps(answer).encode() + b"\n" + found)
        answers.flush()
