"""Builds in a process of its own, with limits: a compiler that crashes, hangs or eats memory is an error for one source.

The process is started with the first build and serves many; after a crash or a timeout the next build starts another. It talks
through its standard input and output: a JSON line each way, answers followed by the artifact's bytes.
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
from typing import Any, Final

from wooly_wis.errors import WisError

from wooly_compiler.build.targets import Target
from wooly_compiler.errors import BuildError
from wooly_compiler.render.printer import Source

MAX_SOURCE: Final = 4 << 20
MAX_ARTIFACT: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one build may take.

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

    def __init__(
        self,
        limits: Limits | None = None,
        module: str = "wooly_compiler.build.worker",
        arguments: Sequence[str] = (),
    ) -> None:
        self._limits = limits or Limits()
        self._module = module
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.steps: list[tuple[str, int, int]] = []

    def ask(self, request: dict[str, Any], target: str, what: str) -> bytes:
        """The answer to a request; `target` and `what` are for messages.

        Raises:
            BuildError: it is refused, or the process crashed or took too long.
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
                raise BuildError(answer["error"])
            return self._read(process, answer["nbytes"], deadline)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self.close()
            raise BuildError(f"the compiler for {target} crashed (exit {code}) on {what}") from None
        except TimeoutError:
            self.close()
            raise BuildError(f"the compiler for {target} took more than {self._limits.seconds:g} s on {what}") from None

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
                if len(found) > MAX_ARTIFACT:
                    raise BuildError(f"an artifact of more than {MAX_ARTIFACT} bytes")
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


class BuildWorker(WorkerProcess):
    """Builds sources, one at a time."""

    def __enter__(self) -> BuildWorker:
        return self

    def build(self, source: Source, target: Target) -> bytes:
        """The artifact of a source.

        Raises:
            BuildError: the compiler is missing, refuses the source, crashed, or took too long; or the source is too large.
        """
        if len(source.text) > MAX_SOURCE:
            raise BuildError(f"a source of {len(source.text)} characters, at most {MAX_SOURCE}")
        if source.dialect != target.dialect.name:
            raise BuildError(f"{source.dialect} source for {target.name}")
        request = {"toolchain": target.toolchain, "arch": target.arch, "source": source.text}
        return self.ask(request, target.name, source.name)


def serve(
    memory: int, answer_to: Callable[[dict[str, Any]], bytes], steps: list[tuple[str, int, int]] | None = None
) -> None:
    """Answer requests until the input ends: the worker's main loop. `steps`: where `answer_to` notes what it did."""
    noted = steps if steps is not None else []
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    from wooly_compiler.build.toolchains import default_signals

    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        artifact = b""
        noted.clear()
        try:
            default_signals()
            artifact = answer_to(request)
            answer: dict[str, Any] = {"nbytes": len(artifact)}
        except WisError as e:
            answer = {"error": str(e)}
        except MemoryError:
            answer = {"error": f"the compiler wanted more than {memory} bytes"}
        if noted:
            answer["steps"] = noted
        answers.write(json.dumps(answer).encode() + b"\n" + artifact)
        answers.flush()


def _build(request: dict[str, Any]) -> bytes:
    from wooly_compiler.build.toolchains import BUILDERS, missing

    why = missing(request["toolchain"])
    if why:
        raise BuildError(why)
    return BUILDERS[request["toolchain"]](request["source"], request["arch"])


if __name__ == "__main__":
    serve(int(sys.argv[1]), _build)
