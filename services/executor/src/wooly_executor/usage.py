"""What each session uses of the device: counted by the device loop, taken now and then for metering.

    used.launched(gpu_ns, core_ns, now)     after each launch: a few additions
    book.take(now)                          what was counted since, per session

Residency is the integral of the bytes that a session bears, which it is asked for (`Session.borne`). While its own launches run a
session executes; all other time is idle. Counts are exact integers; what is less than a MiB-microsecond stays for the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wooly_wis.optable import cost
from wooly_wis.program import Program

from wooly_executor.bell import Bell
from wooly_executor.core_speed import FULL

#: Bytes times nanoseconds in a MiB-microsecond.
MIB_US = (1 << 20) * 1000
#: A session that only holds memory is told of so often.
IDLE_NS = 10_000_000_000
#: Programs of a session of which it is kept how often each ended. Of more, while nobody takes the counts, their work is added up.
RUNS_KEPT = 1024
#: By digest: a program, and how often it ended.
Runs = dict[bytes, list[Any]]


Borne = Callable[[int], tuple[int, int]]
"""What a session bears at a time (monotonic ns), in bytes, and has borne in its life, in bytes times ns."""


class SessionUsage:
    """One session's counts. Owned by the device loop's thread.

    Attributes:
        gpu_ns: device time since it was taken last.
        core_ns: cores times device time since then, and what decoders took.
        paced: that, times the pace at which each launch is priced (`wooly_executor.core_speed`), in ns times millionths.
        runs: programs that ended since then, the last `RUNS_KEPT` of them.
        summed: of those before them, how often any ended, and the work of that: bytes that were moved, and arithmetic.
        executing_byte_ns: bytes times ns of its own device time, of the session's whole life.
        byte_ns: bytes times ns of all time, of its whole life.
        trace: the session's span, as `traceparent`; told with its last record.
    """

    __slots__ = (
        "_borne",
        "_held",
        "_idle_told",
        "_resident_told",
        "_since",
        "byte_ns",
        "core_ns",
        "ended",
        "executing_byte_ns",
        "gpu_ns",
        "model",
        "paced",
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
        self.trace = ""
        self._borne, self._since = borne, now
        self._held, self.byte_ns = borne(now)
        self._resident_told = self._idle_told = 0

    def launched(self, gpu_ns: int, core_ns: int, now: int, pace: int = FULL) -> None:
        """A launch ended. What the session held when it began, it held while it ran."""
        self.gpu_ns += gpu_ns
        self.core_ns += core_ns
        self.paced += core_ns * pace
        if self.ended:
            return
        part, before = self._held * gpu_ns, self.byte_ns
        self._held, self.byte_ns = self._borne(now)
        borne = self.byte_ns - before
        self.executing_byte_ns += part if part < borne else borne

    def decoded(self, core_ns: int, pace: int = FULL) -> None:
        """What its client sent was taken in, at that pace: it took so much of a core, and none of the device."""
        self.core_ns += core_ns
        self.paced += core_ns * pace

    def ran(self, digest: bytes, program: Program) -> None:
        """A program ended."""
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
        """Nothing of it ran since the last time."""
        self._held, self.byte_ns = self._borne(now)

    def end(self, now: int) -> None:
        """The session is over: it is not asked any more, and need not stay for that."""
        self.settle(now)
        self.ended = True
        del self._borne

    def due(self, now: int) -> bool:
        """Whether there is anything to tell."""
        if self.ended or self.gpu_ns or self.core_ns or self.runs:
            return True
        return now - self._since > IDLE_NS and self.byte_ns - self.executing_byte_ns >= (self._idle_told + 1) * MIB_US

    def taken(self, priority: int, now: int) -> UsageDelta:
        """What was counted since the last time, which is forgotten here."""
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
        )
        self._resident_told, self._idle_told, self._since = resident, idle, now
        self.gpu_ns = self.core_ns = self.paced = 0
        self.runs, self.summed = {}, (0, 0, 0)
        return found


@dataclass(frozen=True, slots=True)
class UsageDelta:
    """What a session used in `span_ns`. `resident` and `idle` in MiB-microseconds; `runs` and `summed`: see `SessionUsage`."""

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


class UsageBook:
    """All sessions' counts. Owned by the device loop's thread.

    Attributes:
        bell: rings when a session ended, so that nobody waits for its last record.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self._open: dict[str, SessionUsage] = {}
        self._ended: list[SessionUsage] = []

    def opened(self, session_id: str, tenant: str, model: str, borne: Borne, now: int) -> SessionUsage:
        """A session begins."""
        used = self._open[session_id] = SessionUsage(session_id, tenant, model, borne, now)
        return used

    def closed(self, session_id: str, now: int) -> None:
        """A session is over; it still has what it held. A launch of its may be told of afterwards."""
        used = self._open.pop(session_id, None)
        if used is not None:
            used.end(now)
            self._ended.append(used)
            self.bell.ring()

    def take(self, priority_of: Callable[[str], int], now: int) -> list[UsageDelta]:
        """What was counted, of those of whom there is anything to tell."""
        for used in self._open.values():
            used.settle(now)
        found = [u.taken(priority_of(u.session_id), now) for u in self._open.values() if u.due(now)]
        found += [u.taken(priority_of(u.session_id), now) for u in self._ended]
        self._ended.clear()
        return found


def work_of(program: Program) -> tuple[int, int]:
    """Bytes that a program's instructions read and write, and their arithmetic as far as the op table knows it."""
    moved, flops = [], []
    for form in program.forms:
        found = cost(form)
        moved.append(found.bytes_read + found.bytes_written)
        flops.append(found.flops or 0)
    return sum([moved[i.form] for i in program.body]), sum([flops[i.form] for i in program.body])
