"""Measures a session's work step by step while its client profiles, and keeps the records until the client takes them.

A session that does not profile has no `Recording`, and its runs do not pass through this file.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from wooly_wis.frames import RECORD_WORDS, WHOLE_FRAME, pack_records

from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.protocol import Execution, Outcome

#: Maximum number of records of a session that its client has not taken: 8 MiB. Later ones are dropped and counted.
RECORDS_KEPT = 1 << 18
#: Maximum number of records in one answer: 1 MiB.
RECORDS_AT_ONCE = 1 << 15


class Recording:
    """The records of one session."""

    def __init__(self) -> None:
        self._words: array[int] = array("Q")
        self._taken = 0
        self._dropped = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the records, in bytes."""
        return 8 * len(self._words)

    def add(self, seq: int, instruction: int, instructions: int, begin_ns: int, ns: int) -> None:
        """Add a record; see `wooly_wis.frames.Record`."""
        if len(self._words) - self._taken >= RECORDS_KEPT * RECORD_WORDS:
            self._dropped += 1
            return
        self._words.extend((seq, instruction | instructions << 32, begin_ns, ns))

    def copied(self, seq: int, begin_ns: int) -> None:
        """Add a record of a frame that copied bytes from `begin_ns` until now."""
        self.add(seq, WHOLE_FRAME, 0, begin_ns, time.perf_counter_ns() - begin_ns)

    def take(self) -> bytes:
        """The next records as the payload of a RECORDS frame. They are dropped here."""
        end = min(self._taken + RECORDS_AT_ONCE * RECORD_WORDS, len(self._words))
        part, self._taken = self._words[self._taken : end], end
        left, dropped, self._dropped = (len(self._words) - end) // RECORD_WORDS, self._dropped, 0
        if not left:
            self._words, self._taken = array("Q"), 0
        return pack_records(time.perf_counter_ns(), dropped, left, part)


class MeasuredExecution:
    """A run that stops after each instruction and records its device time.

    Args:
        execution: the run. It must be able to stop between any two positions.
        prepared: its program.
        seq: number of the client's frame.
        recording: gets the records.
    """

    host_bound: Sequence[bool] = ()
    unchecked = False

    def __init__(self, execution: Execution, prepared: PreparedProgram, seq: int, recording: Recording) -> None:
        self._execution, self._prepared, self._seq, self._recording = execution, prepared, seq, recording
        self.outcome: Outcome = execution.outcome
        self._stops = _stops(prepared)
        self._next = 0

    @property
    def kernel_ns(self) -> int:
        """Device time of generated kernels so far, in ns."""
        return int(getattr(self._execution, "kernel_ns", 0))

    def advance(self, edges: Sequence[int], ahead_ns: int = 0) -> list[int]:
        """See `Execution.advance`. Nothing is in flight at the return, because each step is measured."""
        return [self._advance_to(edge) for edge in edges]

    def _advance_to(self, edge: int) -> int:
        stops, acts, total = self._stops, self._prepared.acts, 0
        while self._next < len(stops):
            end, act = stops[self._next]
            if end > edge:
                break
            self._next += 1
            begun = time.perf_counter_ns()
            (ns,) = self._execution.advance((end,))
            total += ns
            if act >= 0:
                done = acts[act]
                self._recording.add(self._seq, done.at, max(len(done.lines), 1), begun, ns)
            if self.outcome.failed_at is not None:
                self._next = len(stops)
        if edge >= self._prepared.end or self.outcome.failed_at is not None:
            return total + sum(self._execution.advance((edge,)))
        return total


def _stops(prepared: PreparedProgram) -> list[tuple[int, int]]:
    """The positions before which to stop, each with the act that computes since the stop before; -1: only memory is managed."""
    begins: list[tuple[int, int]] = []
    for owner, where in zip(prepared.owner, prepared.where, strict=True):
        act = prepared.acts[owner]
        computing = act.launch is not None or act.form.opcode not in ("alloc", "free")
        if not begins or begins[-1][0] != where:
            begins.append((where, owner if computing else -1))
        elif computing and begins[-1][1] < 0:
            begins[-1] = where, owner
    ends = [*[where for where, _ in begins[1:]], prepared.end]
    return [(end, act) for end, (_, act) in zip(ends, begins, strict=False)]
