"""Follows one executor's journals: replays every entry, audits it, folds it. Bytes in, violations out.

A violation is no exception here: it is what an audit finds. After one that breaks the chain nothing of that journal can be
trusted any more; the follower waits for the executor's next one and says so (`lost`).
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
"""Journals whose totals may wait to be told: an executor that restarts in a circle does not fill memory."""
MAX_EARLY = 64
"""Batches that may wait for one before them; then it is taken to be gone for good."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A journal is not what the rule would have written, or breaks a law."""

    journal: str
    entry: int
    law: str
    message: str


@dataclass(frozen=True, slots=True)
class Ran:
    """What a session ran in all by a journal, in ns of the device and of its cores; its class at the end."""

    session: str
    tenant: str
    priority: int
    gpu_ns: int
    core_ns: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What all sessions ran in a journal's first `entries` entries. Of a later number they are the same or more."""

    journal: str
    entries: int
    ran: tuple[Ran, ...]


@dataclass(frozen=True, slots=True)
class FollowerRecord:
    """A `Follower` as plain data, by the names of its attributes; `early`: batches, a character per byte."""

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
    """What is known of one executor from its journals.

    Attributes:
        journal: the one that is followed now.
        lost: why it cannot be followed any more; "" while it is.
        gaps: journals of which entries were missing.
        counts: violations by law, over all journals.
        last: the latest violation.
        finished: of journals that another one followed, until somebody took note; the newest `MAX_FINISHED`.
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
        """The executor's dispatch state, as of the last entry replayed."""
        return self.replayer.state

    @property
    def entries(self) -> int:
        """Entries replayed of this journal."""
        return self.replayer.next - 1

    def feed(self, data: bytes) -> Iterator[Violation | None]:
        """Take a batch in. Yields after every entry: None, or what is wrong with it. Run it to its end."""
        try:
            batch = Batch.decode(data)
        except JournalError as e:
            yield self._violated(self.entries + 1, "bytes", str(e))
            return
        if batch.journal != self.journal:
            if batch.journal in self._past:
                return  # it came late: that run is over
            if not batch.journal.startswith(f"{self.executor_id}/"):
                yield self._violated(batch.first, "name", f"journal {batch.journal} is not one of {self.executor_id}")
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
        """What the sessions of this journal ran so far: those that are open, and those that ended in its last ten minutes."""
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
        except Exception as e:  # entries that the rule would never write: the books, or the core, trip over them
            self.lost = f"entry {self.entries} cannot be booked"
            yield self._violated(self.entries, "books", f"{type(e).__name__}: {e}")

    def give_up(self) -> bool:
        """Whoever fetches has nothing more: entries that are missing will not come. True if there are some."""
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
        """Whether batches wait for one before them."""
        return bool(self._early)

    def _violated(self, entry: int, law: str, message: str) -> Violation:
        self.counts[law] += 1
        self.last = Violation(self.journal, entry, law[:128], message[:2000])
        return self.last

    # -- records -----------------------------------------------------------------------------------------------------

    def record(self) -> FollowerRecord:
        """All of it but `replayer` as plain data. The record shares tables with this object: encode it before the next batch."""
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
            LookupError: the record contradicts itself, or is of another journal or entry than the replayer.
            JournalError: a batch that waits is damaged.
        """
        found = Follower(record.executor_id)
        books = {record.meters.metrics.ledger.entry, record.auditor.ledger.entry}
        if replayer.name != record.journal or (not record.lost and books != {replayer.next - 1}):
            raise LookupError(f"the books are of another entry than {replayer.next - 1} of journal {replayer.name}")
        found.journal, found.lost, found.gaps = record.journal, record.lost, record.gaps
        found.counts, found.last = Counter(record.counts), record.last
        found._past, found.finished = dict.fromkeys(record.past), record.finished
        found._early = {b.first: b for b in (Batch.decode(text.encode("latin-1")) for text in record.early)}
        found.replayer = replayer
        found.meters.take_up_gpu(record.meters)
        found.auditor.take_up_auditor(record.auditor)
        return found
