"""Builds in a separate process with limits. If a compiler crashes, hangs or uses too much memory, one source gets an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from wooly_bus import worker
from wooly_bus.worker import Limits
from wooly_wis.errors import WisError

from wooly_compiler.build.targets import Target
from wooly_compiler.errors import BuildError
from wooly_compiler.render.source import Source

__all__ = ["MAX_SOURCE", "BuildWorker", "Limits", "WorkerProcess", "serve"]

#: Maximum length of a source, in characters.
MAX_SOURCE: Final = 4 << 20


class WorkerProcess(worker.WorkerProcess):
    """A worker process of the compiler. Its failures are raised as `BuildError`."""

    error: ClassVar[type[WisError]] = BuildError

    def __init__(
        self,
        limits: Limits | None = None,
        module: str = "wooly_compiler.build.worker",
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(limits or Limits(), module, arguments)


class BuildWorker(WorkerProcess):
    """Builds sources, one at a time."""

    def __enter__(self) -> BuildWorker:
        return self

    def build(self, source: Source, target: Target) -> bytes:
        """Build a source and return its artifact.

        Raises:
            BuildError: the compiler is missing, rejected the source, crashed, or ran out of time; or the source is too large.
        """
        if len(source.text) > MAX_SOURCE:
            raise BuildError(f"the source has {len(source.text)} characters, at most {MAX_SOURCE} are allowed")
        if source.dialect != target.dialect.name:
            raise BuildError(f"{target.name} needs a source in {target.dialect.name}, not in {source.dialect}")
        request = {"toolchain": target.toolchain, "arch": target.arch, "source": source.text}
        return self.ask(request, target.name, source.name)


def serve(
    memory: int, answer_to: Callable[[dict[str, Any]], bytes], steps: list[tuple[str, int, int]] | None = None
) -> None:
    """Answer requests until the input ends: the worker's main loop. `answer_to` appends its steps to `steps`."""
    from wooly_compiler.build.toolchains import default_signals

    worker.serve(memory, answer_to, default_signals, steps)


def _build(request: dict[str, Any]) -> bytes:
    from wooly_compiler.build.toolchains import BUILDERS, missing

    why = missing(request["toolchain"])
    if why:
        raise BuildError(why)
    return BUILDERS[request["toolchain"]](request["source"], request["arch"])


if __name__ == "__main__":
    serve(int(sys.argv[1]), _build)
