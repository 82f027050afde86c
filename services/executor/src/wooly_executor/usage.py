"""What each session uses of the device: counted by the device loop, taken now and then for metering.

    used.launched(gpu_ns, core_ns, session.bytes, now)    after each launch: a few additions
    book.take(now)                                        what was counted since, per session

Residency is the integral of the bytes on a session's account. They change where launches end; until then a session holds what it
held before. While its own launches run a session executes; all other time is idle. Counts are exact integers; what is
less than a MiB-microsecond stays for the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wooly_wis.optable import cost
from wooly_wis.program import Program

from wooly_executor.programs import ReadyProgram

#: Bytes times nanoseconds in a MiB-microsecond.
MIB_US = (1 << 20) * 1000
#: A session that only holds memory is told of so often.
IDLE_NS = 10_000_000_000
#: By digest: a program, and how often it ended.
Runs = dict[bytes, list[Any]]


class Used:
    """One session's counts. Owned by the device loop's thread.

    Attributes:
        gpu_ns: device time since the last `take`.
        core_ns: cores times device time since then.
        runs: programs that ended since then.
        executing_byte_ns: bytes times ns of its own device time, of the session's whole life.
        byte_ns: bytes times ns of all time, of its whole life.
    """

    __slots__ = (
        "_at",
        "_bytes",
        "_idle_told",
        "_resident_told",
        "_since",
        "byte_ns",
        "core_ns",
        "ended",
        "executing_byte_ns",
        "gpu_ns",
        "model",
        "runs",
        "session_id",
        "tenant",
    )

    def __init__(self, session_id: str = "", tenant: str = "", model: str = "", now: int = 0) -> None:
        self.session_id, self.tenant, self.model = session_id, tenant, model
        self.gpu_ns = self.core_ns = 0
        self.runs: Runs = {}
        self.executing_byte_ns = self.byte_ns = 0
        self.ended = False
        self._at = self._since = now
        self._bytes = self._resident_told = self._idle_told = 0

    def launched(self, gpu_ns: int, core_ns: int, held: int, now: int) -> None:
        """A launch ended, after which the session holds so many bytes."""
        had, span = self._bytes, now - self._at
        if had:
            self.byte_ns += had * span
            self.executing_byte_ns += had * (gpu_ns if gpu_ns < span else span)
        self._at, self._bytes = now, held
        self.gpu_ns += gpu_ns
        self.core_ns += core_ns

    def ran(self, ready: ReadyProgram) -> None:
        """A program ended."""
        found = self.runs.get(ready.digest)
        if found is None:
            self.runs[ready.digest] = [ready.prepared.program, 1]
        else:
            found[1] += 1

    def settle(self, held: int, now: int) -> None:
        """Nothing ran since the last time, and from now on it holds so many bytes."""
        self.byte_ns += self._bytes * (now - self._at)
        self._at, self._bytes = now, held

    def due(self, now: int) -> bool:
        """Whether there is anything to tell."""
        if self.ended or self.gpu_ns or self.runs:
            return True
        return now - self._since > IDLE_NS and self.byte_ns - self.executing_byte_ns >= (self._idle_told + 1) * MIB_US

    def taken(self, priority: int, now: int) -> Taken:
        """What was counted since the last time, which is forgotten here."""
        resident = self.executing_byte_ns // MIB_US
        idle = (self.byte_ns - self.executing_byte_ns) // MIB_US
        found = Taken(
            self.session_id,
            self.tenant,
            self.model,
            priority,
            now - self._since,
            self.gpu_ns,
            self.core_ns,
            resident - self._resident_told,
            idle - self._idle_told,
            self.ended,
            self.runs,
        )
        self._resident_told, self._idle_told, self._since = resident, idle, now
        self.gpu_ns = self.core_ns = 0
        self.runs = {}
        return found


@dataclass(frozen=True, slots=True)
class Taken:
    """What a session used in `span_ns`. `resident` and `idle` in MiB-microseconds; `runs`: programs that ended, and how often."""

    session_id: str
    tenant: str
    model: str
    priority: int
    span_ns: int
    gpu_ns: int
    core_ns: int
    resident: int
    idle: int
    ended: bool
    runs: Runs


class UsageBook:
    """All sessions' counts. Owned by the device loop's thread.

    Attributes:
        on_ended: called when a session ended, so that nobody waits for its last record.
    """

    def __init__(self) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        self._open: dict[str, Used] = {}
        self._ended: list[Used] = []

    def opened(self, session_id: str, tenant: str, model: str, now: int) -> Used:
        """A session begins."""
        used = self._open[session_id] = Used(session_id, tenant, model, now)
        return used

    def closed(self, session_id: str, now: int) -> None:
        """A session is over, and holds nothing any more. A launch of its may still be told of."""
        used = self._open.pop(session_id, None)
        if used is not None:
            used.settle(0, now)
            used.ended = True
            self._ended.append(used)
            self.on_ended()

    def take(self, priority_of: Callable[[str], int], now: int) -> list[Taken]:
        """What was counted, of those of whom there is anything to tell."""
        for used in self._open.values():
            used.settle(used._bytes, now)
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
