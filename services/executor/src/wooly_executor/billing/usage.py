"""Measures what each session uses of the device. The device loop counts; metering collects the counts periodically.

    used.launched(gpu_ns, core_ns, now)     after each launch: a few additions
    book.take(now)                          usage since the last call, per session

Residency is the integral of the bytes that a session is charged for (`Borne`). A session is executing while its own launches run;
otherwise it is idle. Counts are exact integers. A remainder below one MiB-microsecond is carried over to the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wooly_wis.optable import cost
from wooly_wis.program import Program

from wooly_executor.bell import Bell
from wooly_executor.billing.core_speed import FULL

#: Bytes times nanoseconds in a MiB-microsecond.
MIB_US = (1 << 20) * 1000
#: Minimum ns between two records of a session that only holds memory.
IDLE_NS = 10_000_000_000
#: Maximum number of programs of a session with their own count of runs. Beyond it, until the counts are collected, the oldest
#: programs are added to one sum.
RUNS_KEPT = 1024
#: By digest: the program and its number of runs.
Runs = dict[bytes, list[Any]]


Borne = Callable[[int], tuple[int, int]]
"""Returns a session's charge at a time (monotonic ns): bytes now, and the integral over its life in bytes times ns."""


class Mark:
    """A place in a session's work. `core_ns`: core time of the session's life here up to this place."""

    __slots__ = ("core_ns",)

    def __init__(self, core_ns: int) -> None:
        self.core_ns = core_ns


class SessionUsage:
    """The usage of one session. The device loop's thread owns it.

    Attributes:
        gpu_ns: device time since the last collection.
        core_ns: core time of launches and decoders since the last collection.
        paced: the sum of core time times pace (`wooly_executor.billing.core_speed`), in ns times millionths.
        runs: programs that ended since the last collection, at most the last `RUNS_KEPT`.
        summed: older programs since the last collection: number of runs, bytes moved, arithmetic operations.
        executing_byte_ns: integral of the charged bytes over the session's own device time, for its whole life.
        byte_ns: integral of the charged bytes over all time, for its whole life.
        part: index of the device among the session's devices.
        epoch: how often the session has gone on in another executor.
        repeating: the session repeats work that the cluster has lost.
        repeated_ns: core time of such work since the last collection.
        trace: the session's span, as `traceparent`; sent with its last record.
    """

    __slots__ = (
        "_borne",
        "_held",
        "_idle_told",
        "_launching",
        "_marks",
        "_resident_told",
        "_saved",
        "_since",
        "_told_ns",
        "byte_ns",
        "core_ns",
        "ended",
        "epoch",
        "executing_byte_ns",
        "gpu_ns",
        "model",
        "paced",
        "part",
        "repeated_ns",
        "repeating",
        "runs",
        "session_id",
        "summed",
        "tenant",
        "trace",
    )

    def __init__(self, session_id: str, tenant: str, model: str, borne: Borne, now: int) -> None:
        self.session_id, self.tenant, self.model = session_id, tenant, model
        self.gpu_ns = self.core_ns = self.paced = 0
        self.runs: Runs = {}
        self.summed = 0, 0, 0
        self.executing_byte_ns = 0
        self.ended = False
        self.part = self.epoch = 0
        self.repeating = False
        self.repeated_ns = 0
        #: While a launch runs: whether it repeats, and the marks whose core time it is a part of.
        self._launching: bool | None = None
        self._marks: list[Mark] = []
        #: Core time of the whole life up to the last collection; and the mark of the newest stored checkpoint.
        self._told_ns = 0
        self._saved: Mark | None = None
        self.trace = ""
        self._borne, self._since = borne, now
        self._held, self.byte_ns = borne(now)
        self._resident_told = self._idle_told = 0

    def launches(self) -> None:
        """A launch begins. Frames that follow it may be processed before `launched` adds it."""
        self._launching = self.repeating

    def launched(self, gpu_ns: int, core_ns: int, now: int, pace: int = FULL) -> None:
        """Add a launch that has ended. The bytes that the session had at its start count for the whole launch."""
        self.gpu_ns += gpu_ns
        self.core_ns += core_ns
        self.paced += core_ns * pace
        if self.repeating if self._launching is None else self._launching:
            self.repeated_ns += core_ns
        for mark in self._marks:
            mark.core_ns += core_ns
        self._launching = None
        self._marks.clear()
        if self.ended:
            return
        part, before = self._held * gpu_ns, self.byte_ns
        self._held, self.byte_ns = self._borne(now)
        borne = self.byte_ns - before
        self.executing_byte_ns += part if part < borne else borne

    def decoded(self, core_ns: int, pace: int = FULL) -> None:
        """Add core time, in ns, for decoding what the client sent. This takes no device time."""
        self.core_ns += core_ns
        self.paced += core_ns * pace
        if self.repeating:
            self.repeated_ns += core_ns

    def mark(self) -> Mark:
        """The core time of all frames that are processed, for a checkpoint."""
        mark = Mark(self._told_ns + self.core_ns)
        if self._launching is not None:
            self._marks.append(mark)
        return mark

    def saved(self, mark: Mark) -> None:
        """The checkpoint of a mark is stored."""
        self._saved = mark

    def ran(self, digest: bytes, program: Program) -> None:
        """Add a run of a program that has ended."""
        found = self.runs.get(digest)
        if found is None:
            if len(self.runs) >= RUNS_KEPT:
                self._sum_up(next(iter(self.runs)))
            self.runs[digest] = [program, 1]
        else:
            found[1] += 1

    def _sum_up(self, digest: bytes) -> None:
        program, times = self.runs.pop(digest)
        moved, flops = work_of(program)
        runs, before, flops_before = self.summed
        self.summed = runs + times, before + moved * times, flops_before + flops * times

    def settle(self, now: int) -> None:
        """Integrate up to now, without a launch."""
        self._held, self.byte_ns = self._borne(now)

    def end(self, now: int) -> None:
        """End the session: integrate for the last time, and drop the reference to the session."""
        self.settle(now)
        self.ended = True
        del self._borne

    def due(self, now: int) -> bool:
        """Whether there is usage to report."""
        if self.ended or self.gpu_ns or self.core_ns or self.runs:
            return True
        return now - self._since > IDLE_NS and self.byte_ns - self.executing_byte_ns >= (self._idle_told + 1) * MIB_US

    def collect(self, priority: int, now: int) -> UsageDelta:
        """Return the usage since the last call, and reset the counts."""
        resident = self.executing_byte_ns // MIB_US
        idle = (self.byte_ns - self.executing_byte_ns) // MIB_US
        found = UsageDelta(
            self.session_id,
            self.tenant,
            self.model,
            priority,
            now - self._since,
            self.gpu_ns,
            self.core_ns,
            self.paced // self.core_ns if self.core_ns else FULL,
            resident - self._resident_told,
            idle - self._idle_told,
            self.ended,
            self.runs,
            self.trace if self.ended else "",
            self.summed,
            self.part,
            self.epoch,
            self.repeated_ns,
            None if self._saved is None else self._told_ns + self.core_ns - self._saved.core_ns,
        )
        self._told_ns += self.core_ns
        self._resident_told, self._idle_told, self._since = resident, idle, now
        self.gpu_ns = self.core_ns = self.paced = self.repeated_ns = 0
        self.runs, self.summed = {}, (0, 0, 0)
        return found


@dataclass(frozen=True, slots=True)
class UsageDelta:
    """What a session used within `span_ns`. `resident` and `idle` are in MiB-microseconds; `runs`, `summed` and `repeated_ns`
    are as in `SessionUsage`. `unsaved_ns` is the core time since the newest stored checkpoint, or None if there is none.
    """

    session_id: str
    tenant: str
    model: str
    priority: int
    span_ns: int
    gpu_ns: int
    core_ns: int
    pace: int
    resident: int
    idle: int
    ended: bool
    runs: Runs
    trace: str = ""
    summed: tuple[int, int, int] = (0, 0, 0)
    part: int = 0
    epoch: int = 0
    repeated_ns: int = 0
    unsaved_ns: int | None = None


class UsageBook:
    """The usage of all sessions. The device loop's thread owns it.

    Attributes:
        bell: rings when a session has ended, so that its last record is sent at once.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._open: dict[str, SessionUsage] = {}
        self._ended: list[SessionUsage] = []

    def opened(self, session_id: str, tenant: str, model: str, borne: Borne, now: int) -> SessionUsage:
        """Start the record of a session."""
        used = self._open[session_id] = SessionUsage(session_id, tenant, model, borne, now)
        return used

    def closed(self, session_id: str, now: int) -> None:
        """Close the record of a session while it still has its memory. A last launch may be added afterwards."""
        used = self._open.pop(session_id, None)
        if used is not None:
            used.end(now)
            self._ended.append(used)
            self.bell.ring()

    def take(self, priority_of: Callable[[str], int], now: int) -> list[UsageDelta]:
        """Usage since the last call, for sessions that used anything."""
        for used in self._open.values():
            used.settle(now)
        found = [u.collect(priority_of(u.session_id), now) for u in self._open.values() if u.due(now)]
        found += [u.collect(priority_of(u.session_id), now) for u in self._ended]
        self._ended.clear()
        return found


def work_of(program: Program) -> tuple[int, int]:
    """Bytes that a program's instructions read and write, and their arithmetic operations as far as the op table knows them."""
    moved, flops = [], []
    for form in program.forms:
        found = cost(form)
        moved.append(found.bytes_read + found.bytes_written)
        flops.append(found.flops or 0)
    return sum([moved[i.form] for i in program.body]), sum([flops[i.form] for i in program.body])
