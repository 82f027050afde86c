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
from dataclasses import dataclass
from typing import Any, Final

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


class BuildWorker:
    """Builds sources, one at a time.

    Args:
        limits: of each build.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._process: subprocess.Popen[bytes] | None = None

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
        deadline = time.monotonic() + self._limits.seconds
        process = self._started()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._read(process, None, deadline))
            if "error" in answer:
                raise BuildError(answer["error"])
            return self._read(process, answer["nbytes"], deadline)
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self.close()
            raise BuildError(f"the compiler for {target.name} crashed (exit {code}) on {source.name}") from None
        except TimeoutError:
            self.close()
            raise BuildError(
                f"the compiler for {target.name} took more than {self._limits.seconds:g} s on {source.name}"
            ) from None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "wooly_compiler.build.worker", str(self._limits.memory)],
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

    def __enter__(self) -> BuildWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(memory: int) -> None:
    """Answer requests until the input ends: the worker's main loop."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    from wooly_compiler.build.toolchains import BUILDERS, default_signals, missing

    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        artifact = b""
        try:
            why = missing(request["toolchain"])
            if why:
                raise BuildError(why)
            default_signals()
            artifact = BUILDERS[request["toolchain"]](request["source"], request["arch"])
            answer: dict[str, Any] = {"nbytes": len(artifact)}
        except BuildError as e:
            answer = {"error": str(e)}
        except MemoryError:
            answer = {"error": f"the compiler wanted more than {memory} bytes"}
        answers.write(json.dumps(answer).encode() + b"\n" + artifact)
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
