"""Turns the errors that an executor reports into exceptions that name the operation and its Python line.

An acknowledgement does not say whether a run failed; only the next answer does. So the origins of a run are kept until a later
frame is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from wooly.distributed.errors import RemoteCollectiveError
from wooly.errors import IpcError, RemoteNotImplementedError, RemoteOperationError
from wooly.origins import Origin, describe_origin

#: Errors of operations by the executor's code.
_ERRORS: dict[str, type[RemoteOperationError]] = {
    "executor.missing_kernel": RemoteNotImplementedError,
    "executor.collective": RemoteCollectiveError,
    "executor.ipc": IpcError,
}
#: Number of failed operations that are remembered.
_FAILURES_KEPT = 64
#: Number of acknowledged runs whose origins are kept.
RUNS_REMEMBERED = 1024
#: Number of runs that are not answered from which acknowledgements must be read.
RUNS_INFLIGHT = RUNS_REMEMBERED + 64


class Failures:
    """The origins of a link's runs that are not answered, and its failed operations.

    Args:
        name_of: returns the name of an instruction, by the words of its program and its index.

    Attributes:
        inflight: per run its number, the words of its program or what it is, and its origins.
    """

    def __init__(self, name_of: Callable[[list[int], int], str]) -> None:
        self._name_of = name_of
        self.inflight: deque[tuple[int, list[int] | str, list[Origin]]] = deque()
        #: Number of the frame that defines the program of the next run; None: the program was defined before.
        self._definition: int | None = None
        #: Numbers of runs, by the number of the frame that defines their program.
        self._run_of: dict[int, int] = {}
        #: Code, operation and Python line of failures, by message. What needs a result of theirs fails with the same message.
        self._known: dict[str, tuple[str, str | None, str | None]] = {}

    def defined(self, seq: int) -> None:
        """The definition of the next run's program was sent."""
        self._definition = seq

    def sent(self, seq: int, words: list[int] | str, origins: list[Origin]) -> None:
        """A run was sent."""
        self.inflight.append((seq, words, origins))
        if self._definition is not None:
            self._run_of[self._definition], self._definition = seq, None

    def prune(self, acked: int) -> None:
        """Forget the origins of old runs up to the frame `acked`."""
        while len(self.inflight) > RUNS_REMEMBERED and self.inflight[0][0] <= acked:
            self.inflight.popleft()
        self._forget_definitions()

    def answered(self, seq: int) -> None:
        """Forget the origins of all runs up to a frame that is answered."""
        while self.inflight and self.inflight[0][0] <= seq:
            self.inflight.popleft()
        self._forget_definitions()

    def _forget_definitions(self) -> None:
        """Forget the definitions of the programs of runs that are forgotten."""
        if self._run_of:
            first = self.inflight[0][0] if self.inflight else None
            self._run_of = {} if first is None else {k: run for k, run in self._run_of.items() if run >= first}

    def error(self, error: dict[str, Any], seq: int) -> Exception:
        """The exception for an error that an executor reports.

        Args:
            error: what the executor says.
            seq: number of the frame that failed: a run, or the definition of its program.
        """
        message, code = str(error.get("message", "")), str(error.get("code", ""))
        operation = recorded_at = None
        seq = self._run_of.get(seq, seq)
        for at, words, origins in self.inflight:
            index = error.get("instruction")
            if at == seq and isinstance(index, int) and index < len(origins):
                operation = words if isinstance(words, str) else self._name_of(words, index)
                recorded_at = describe_origin(origins[index])
        if code == "executor.poisoned":
            failed = self._known.get(message)
            if failed is not None:
                code, operation, failed_at = failed
                recorded_at = f"{failed_at}, needed at {recorded_at}" if recorded_at else failed_at
        elif operation is not None:
            self._known[message] = code, operation, recorded_at
            if len(self._known) > _FAILURES_KEPT:
                del self._known[next(iter(self._known))]
        return error_of(code, message, operation, recorded_at)


def error_of(code: str, message: str, operation: str | None = None, recorded_at: str | None = None) -> Exception:
    """The exception for an executor's code and message, an operation and its Python line."""
    if code == "executor.out_of_memory":
        return torch.OutOfMemoryError(message + (f"\n  recorded at {recorded_at}" if recorded_at else ""))
    return _ERRORS.get(code, RemoteOperationError)(message, operation=operation, recorded_at=recorded_at)
