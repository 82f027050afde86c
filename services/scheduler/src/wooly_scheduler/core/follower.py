"""Follows the journals of one executor: replays, audits and sums up every entry. The input is bytes, the output is violations.

A violation is not an exception, because it is a normal result of an audit. After a violation that breaks the hash chain, no later
entry of the journal can be trusted. Then the follower sets `lost` and waits for the executor's next journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from wooly_dispatch.errors import DispatchError, GapError, JournalError, ReplayError
from wooly_dispatch.invariants import Auditor, AuditorRecord
from wooly_dispatch.journal import Batch, Replayer
from wooly_dispatch.state import DispatchState

from wooly_scheduler.core.meters import GpuMeters, GpuMetersRecord

MAX_FINISHED = 16
"""Maximum number of finished journals whose totals wait for metering. It bounds memory if an executor restarts again and
again.
"""
MAX_EARLY = 64
"""Maximum number of batches that wait for an earlier batch. Beyond it, the earlier batch is considered lost."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A journal differs from the dispatch rule, or breaks a law."""

    journal: str
    entry: int
    law: str
    message: str


@dataclass(frozen=True, slots=True)
class Ran:
    """A session's totals in a journal: device time and core time in ns; `priority` is its class at the end."""

    session: str
    tenant: str
    priority: int
    gpu_ns: int
    core_ns: int


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of all sessions in a journal's first `entries` entries. With more entries, totals never decrease."""

    journal: str
    entries: int
    ran: tuple[Ran, ...]


@dataclass(frozen=True, slots=True)
class FollowerRecord:
    """A `Follower` as plain data, with the same attribute names. `early`: batches as text, with one character per byte."""

    executor_id: str
    journal: str
    lost: str
    gaps: int
    counts: dict[str, int]
    last: Violation | None
    past: list[str]
    early: list[str]
    finished: list[Totals]
    meters: GpuMetersRecord
    auditor: AuditorRecord


class Follower:
    """Everything that is known of one executor from its journals.

    Attributes:
        journal: name of the current journal.
        lost: why the journal cannot be followed any more; "" while it is followed.
        gaps: number of journals with missing entries.
        counts: number of violations by law, over all journals.
        last: the latest violation.
        finished: totals of the journals before the current one that metering does not have yet; the newest `MAX_FINISHED`.
    """

    def __init__(self, executor_id: str) -> None:
        self.executor_id = executor_id
        self.lost = ""
        self.gaps = 0
        self.counts: Counter[str] = Counter()
        self.last: Violation | None = None
        self.finished: list[Totals] = []
        self._past: dict[str, None] = {}
        self._early: dict[int, Batch] = {}
        self._begin("")

    def _begin(self, journal: str) -> None:
        self.journal = journal
        self.replayer = Replayer(journal)
        self.meters = GpuMeters()
        self.auditor = Auditor(raises=False)
        self._early = {}
        self.lost = ""

    @property
    def state(self) -> DispatchState:
        """The executor's dispatch state after the last replayed entry."""
        return self.replayer.state

    @property
    def entries(self) -> int:
        """Number of replayed entries of the current journal."""
        return self.replayer.next - 1

    def feed(self, data: bytes) -> Iterator[Violation | None]:
        """Take in a batch. Yields after every entry: None, or the violation. The caller must run the iterator to its end."""
        try:
            batch = Batch.decode(data)
        except JournalError as e:
            yield self._violated(self.entries + 1, "bytes", str(e))
            return
        if batch.journal != self.journal:
            if batch.journal in self._past:
                return  # the batch arrived late: its journal has ended
            if not batch.journal.startswith(f"{self.executor_id}/"):
                yield self._violated(
                    batch.first, "name", f"journal {batch.journal} does not belong to executor {self.executor_id}"
                )
                return
            self._past[self.journal] = None
            for old in list(self._past)[:-16]:
                del self._past[old]
            if self.journal:
                self.finished = [*self.finished, self.totals()][-MAX_FINISHED:]
            self._begin(batch.journal)
        if self.lost:
            return
        self._early[batch.first] = batch
        while not self.lost and (ready := self._next()) is not None:
            yield from self._replay(ready)
        if len(self._early) > MAX_EARLY:
            self._lose(GapError(self.replayer.next, min(self._early)))

    def totals(self) -> Totals:
        """The totals of this journal: of open sessions, and of sessions that closed in the last ten minutes."""
        sessions = self.state.sessions
        ran = [
            Ran(name, m.tenant, sessions[name].policy.priority if name in sessions else 2, m.paid_ns, m.core_ns)
            for name, m in self.meters.meters.items()
            if m.core_ns
        ]
        return Totals(self.journal, self.entries, tuple(ran))

    def _next(self) -> Batch | None:
        first = min(self._early, default=None)
        return self._early.pop(first) if first is not None and first <= self.replayer.next else None

    def _replay(self, batch: Batch) -> Iterator[Violation | None]:
        try:
            for event, decisions in self.replayer.replay(batch):
                self.meters.observe(event, decisions)
                self.auditor.audit(event, decisions, self.replayer.state.windows)
                found, self.auditor.violations = self.auditor.violations, []
                for error in found:
                    yield self._violated(self.replayer.next - 1, error.law, error.detail)
                yield None
        except ReplayError as e:
            self.lost = f"entry {e.entry} cannot be trusted"
            self._early = {}
            yield self._violated(e.entry, "replay", e.reason)
        except DispatchError as e:
            self.lost = str(e)
            yield self._violated(self.entries + 1, e.code, str(e))
        except Exception as e:  # the core or the ledger cannot process an entry that the rule would never write
            self.lost = f"entry {self.entries} cannot be processed"
            yield self._violated(self.entries, "books", f"{type(e).__name__}: {e}")

    def give_up(self) -> bool:
        """Give up waiting for missing entries, because the reader has no more batches. Returns whether entries are missing."""
        if self.lost or not self._early:
            return False
        self._lose(GapError(self.replayer.next, min(self._early)))
        return True

    def _lose(self, gap: GapError) -> None:
        self.gaps += 1
        self.lost = str(gap)
        self._early = {}

    @property
    def waiting(self) -> bool:
        """Whether batches wait for an earlier batch."""
        return bool(self._early)

    def _violated(self, entry: int, law: str, message: str) -> Violation:
        self.counts[law] += 1
        self.last = Violation(self.journal, entry, law[:128], message[:2000])
        return self.last

    # -- records -----------------------------------------------------------------------------------------------------

    def record(self) -> FollowerRecord:
        """All state except `replayer` as plain data. The record shares tables with this object: encode the record before the
        next batch.
        """
        return FollowerRecord(
            self.executor_id, self.journal, self.lost, self.gaps, dict(self.counts), self.last, list(self._past),
            [batch.encode().decode("latin-1") for batch in self._early.values()],
            self.finished,
            self.meters.gpu_record(), self.auditor.auditor_record(),
        )  # fmt: skip

    @staticmethod
    def of_record(record: FollowerRecord, replayer: Replayer) -> Follower:
        """The follower that a record and its replayer's checkpoint describe.

        Raises:
            LookupError: the record is inconsistent, or does not match the replayer's journal and entry.
            JournalError: a waiting batch is damaged.
        """
        found = Follower(record.executor_id)
        books = {record.meters.metrics.ledger.entry, record.auditor.ledger.entry}
        if replayer.name != record.journal or (not record.lost and books != {replayer.next - 1}):
            raise LookupError(f"the record does not match entry {replayer.next - 1} of journal {replayer.name}")
        found.journal, found.lost, found.gaps = record.journal, record.lost, record.gaps
        found.counts, found.last = Counter(record.counts), record.last
        found._past, found.finished = dict.fromkeys(record.past), record.finished
        found._early = {b.first: b for b in (Batch.decode(text.encode("latin-1")) for text in record.early)}
        found.replayer = replayer
        found.meters.load_gpu_record(record.meters)
        found.auditor.load_auditor_record(record.auditor)
        return found
