"""Turns messages of the usage stream into entries, sums and quarantine. `book` decides what to write, and writes nothing itself.

Each source numbers its batches. A batch with an unexpected number was booked before, or batches before it were lost. Lost batches
are listed in the quarantine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from pydantic import ValidationError
from wooly_wis.credits import UsageRecord, UsageRecorded

from wooly_metering.core.checks import LARGEST, impossible, in_time
from wooly_metering.core.rating import Tariff, price

HOUR_US = 3_600_000_000
USAGE, CORRECTION = 0, 1
#: The reasons in an entry of repeated work, and in an entry that was booked from a journal.
REPEATED = "it repeated work that was lost with its executor"
BY_JOURNAL = "by the dispatch journal: no usage record came for it"
#: The reason in an entry of lost work that came after the entries of its repetition.
PAID_ALREADY = "its repetition after the loss is billed already"
#: Maximum number of stored characters of a message that cannot be decoded.
PAYLOAD_KEPT = 64 << 10


class Entry(NamedTuple):
    """A row of the table of entries; the fields are its columns."""

    id: int
    source_id: int
    batch: int
    item: int
    kind: int
    corrects: int | None
    tenant: str
    session_id: str
    executor_id: str
    model: str
    device_kind: str
    priority: int
    begin_us: int
    end_us: int
    runs: int
    gpu_ns: int
    core_ns: int
    pace_ppm: int
    moved_bytes: int
    flops: int
    resident_mib_us: int
    idle_mib_us: int
    part: int
    epoch: int
    repeated_core_ns: int
    unsaved_core_ns: int | None
    plan_id: int
    core_ucr: int
    vram_ucr: int
    reason: str


@dataclass(slots=True)
class Sums:
    """The sums over entries that a run and an hour have; the fields are columns of both tables."""

    entries: int = 0
    runs: int = 0
    gpu_ns: int = 0
    core_ns: int = 0
    moved_bytes: int = 0
    flops: int = 0
    resident_mib_us: int = 0
    idle_mib_us: int = 0
    core_ucr: int = 0
    vram_ucr: int = 0

    def add(self, other: Sums) -> None:
        """Add other sums to these."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_record(self, record: UsageRecord, core_ucr: int, vram_ucr: int) -> None:
        """Add the entry of one usage record and its price."""
        self.entries += 1
        self.runs += record.runs
        self.gpu_ns += record.gpu_ns
        self.core_ns += record.core_ns
        self.moved_bytes += record.moved_bytes
        self.flops += record.flops
        self.resident_mib_us += record.resident_mib_us
        self.idle_mib_us += record.idle_mib_us
        self.core_ucr += core_ucr
        self.vram_ucr += vram_ucr

    def columns(self) -> dict[str, int]:
        """The sums by name."""
        return {name: getattr(self, name) for name in SUMS}


#: Names of the columns of an entry, and of all sums.
COLUMNS = Entry._fields
SUMS = tuple([f.name for f in fields(Sums)])


class HourKey(NamedTuple):
    """The key of a row in the table of hours. The row sums up usage that began in that hour (us since 1970)."""

    tenant: str
    hour_us: int
    model: str
    device_kind: str
    priority: int


#: (session, executor)
RunKey = tuple[str, str]
#: (session, executor, process of the executor). Process "": all processes of the executor.
ProcessKey = tuple[str, str, str]
#: (session, index of its device)
DeviceKey = tuple[str, int]


class Source(NamedTuple):
    """A source of usage: its number in the ledger, and its last booked batch."""

    number: int
    batch: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message of the stream: its number in the stream, its bytes, and when the stream stored it, in us since 1970."""

    sequence: int
    data: bytes
    stored_us: int = 0


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Usage that is not booked, and why. `batch` and `item` are 0 if they are unknown."""

    sequence: int
    source: str
    batch: int
    item: int
    reason: str
    payload: str


@dataclass(slots=True)
class RunSum:
    """The sums and the facts of a run."""

    tenant: str
    model: str
    began_us: int
    until_us: int
    ended: bool
    sums: Sums = field(default_factory=Sums)

    def widen(self, began_us: int, until_us: int, ended: bool) -> None:
        """Extend the run by further usage: the time of that usage, and whether the run ended with it.

        A run goes on after its end if its session comes back to the executor, and usage from before may arrive later.
        """
        if began_us < self.began_us:
            self.began_us = began_us
        if until_us >= self.until_us:
            self.ended = ended or (self.ended and until_us == self.until_us)
            self.until_us = until_us


class LastUsage(NamedTuple):
    """Facts about a run, from its last usage entry."""

    model: str
    device_kind: str
    priority: int
    pace_ppm: int
    part: int = 0
    epoch: int = 0


@dataclass(slots=True)
class RunState:
    """The state of a run in one process of an executor during booking. After a restart, a session can go on in an executor of the
    same id, with another journal.

    Attributes:
        gpu_ns: device time booked so far. It is known only for runs whose totals a journal states now.
        core_ns: core time booked so far. It is known for the same runs.
        ahead_gpu_ns: the part of `gpu_ns` that was booked from a journal, and whose usage records have not arrived.
        ahead_core_ns: the same part of `core_ns`.
        last: facts from the run's last usage entry; None: the run has no entry.
    """

    gpu_ns: int = 0
    core_ns: int = 0
    ahead_gpu_ns: int = 0
    ahead_core_ns: int = 0
    last: LastUsage | None = None

    def take(self, record: UsageRecord) -> UsageRecord:
        """The record, less the usage that was booked from a journal already."""
        gpu, core = min(record.gpu_ns, self.ahead_gpu_ns), min(record.core_ns, self.ahead_core_ns)
        self.ahead_gpu_ns -= gpu
        self.ahead_core_ns -= core
        if not gpu and not core:
            return record
        return record.model_copy(update={"gpu_ns": record.gpu_ns - gpu, "core_ns": record.core_ns - core})

    def missing_part(self, whole: UsageRecord) -> UsageRecord | None:
        """The part of a journal's total that is not booked, as a record; None if nothing is missing. The part counts as booked
        ahead.
        """
        gpu, core = max(whole.gpu_ns - self.gpu_ns, 0), whole.core_ns - self.core_ns
        if core <= 0:
            return None
        self.ahead_gpu_ns += gpu
        self.ahead_core_ns += core
        last = self.last or LastUsage("", "", whole.priority, whole.pace_ppm)
        changes = {"gpu_ns": gpu, "core_ns": core, "span_us": -(-gpu // 1000)}
        described = {
            "model": last.model,
            "priority": last.priority,
            "pace_ppm": last.pace_ppm,
            "part": last.part,
            "epoch": last.epoch,
        }
        return whole.model_copy(update={**changes, **described})


@dataclass(slots=True)
class LostWork:
    """The billed work of one device of a session that its next executor must repeat if this one is lost.

    Attributes:
        epoch: the last epoch with an entry.
        billed_ns: billed core time since the newest stored checkpoint, in epochs before `epoch`.
        current_ns: the same in `epoch`.
        repeated_ns: core time of `epoch` that was not billed.
        saved_epoch: the epoch in which the newest checkpoint was stored.
        paid: by epoch, core time that repeated lost work and was billed, because no entry of the lost work existed yet.
    """

    epoch: int = 0
    billed_ns: int = 0
    current_ns: int = 0
    repeated_ns: int = 0
    saved_epoch: int = 0
    paid: dict[int, int] = field(default_factory=dict)

    def _enter(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.billed_ns += self.current_ns
            self.epoch, self.current_ns, self.repeated_ns = epoch, 0, 0

    def free_part(self, record: UsageRecord) -> int:
        """The part of a record's core time that is not billed: it repeats work that was lost, and no more than that.

        A record that comes after its epoch is of lost work. As far as the repetition of lost work was billed, it is free.
        """
        self._enter(record.epoch)
        if record.epoch < self.epoch:
            return min(record.core_ns, sum([ns for epoch, ns in self.paid.items() if epoch > record.epoch]))
        return max(min(record.repeats_core_ns, record.core_ns, self.billed_ns - self.repeated_ns), 0)

    def booked(
        self, epoch: int, core_ns: int, repeated_ns: int, unsaved_ns: int | None, repeats_ns: int | None = None
    ) -> None:
        """Note the next entry of the device.

        Args:
            epoch: its epoch.
            core_ns: its core time.
            repeated_ns: the part of it that is not billed.
            unsaved_ns: core time of its epoch since the newest stored checkpoint; None: no checkpoint was stored in its epoch.
            repeats_ns: core time of it that repeated lost work, as the executor says; None: the entry is in `paid`.
        """
        self._enter(epoch)
        if epoch < self.epoch:  # it came late
            if epoch >= self.saved_epoch:
                self.billed_ns += core_ns - repeated_ns
            if repeats_ns is not None:
                self._matched(epoch, repeated_ns)
            return
        if repeats_ns is not None and repeats_ns > repeated_ns:
            self.paid[epoch] = self.paid.get(epoch, 0) + repeats_ns - repeated_ns
        if unsaved_ns is not None:
            self.billed_ns, self.current_ns, self.repeated_ns, self.saved_epoch = 0, unsaved_ns, 0, epoch
        else:
            self.current_ns += core_ns - repeated_ns
            self.repeated_ns += repeated_ns

    def _matched(self, epoch: int, core_ns: int) -> None:
        """Lost work of an epoch was not billed, because its repetition was."""
        for later in sorted(self.paid):
            if later > epoch:
                part = min(core_ns, self.paid[later])
                self.paid[later] -= part
                core_ns -= part


@dataclass(slots=True)
class Booking:
    """Everything to write.

    Attributes:
        entries: rows.
        runs: additions to runs.
        hours: additions to hours.
        quarantined: usage for the quarantine.
        sources: sources with new batches.
        new_sources: sources that the ledger does not have yet.
        duplicates: number of batches that were booked before.
        tenants: tenants of the entries.
    """

    entries: list[Entry] = field(default_factory=list)
    runs: dict[RunKey, RunSum] = field(default_factory=dict)
    hours: dict[HourKey, Sums] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    new_sources: set[str] = field(default_factory=set)
    duplicates: int = 0

    @property
    def tenants(self) -> set[str]:
        """Tenants of the entries."""
        return {key.tenant for key in self.hours}


def read(deliveries: Iterable[Delivery]) -> tuple[list[tuple[Delivery, UsageRecorded]], list[Quarantined]]:
    """Decode messages to events. Messages that cannot be decoded go to the quarantine."""
    events: list[tuple[Delivery, UsageRecorded]] = []
    bad: list[Quarantined] = []
    for delivery in deliveries:
        try:
            events.append((delivery, UsageRecorded.model_validate_json(delivery.data)))
        except ValidationError as e:
            first = e.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "message"
            reason = f"the message is not a UsageRecorded: {where}: {first['msg']}"
            bad.append(Quarantined(delivery.sequence, "", 0, 0, reason[:1024], _shown(delivery.data)))
    return events, bad


def _shown(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or "\0" in text:
        text = data.hex()
    return text[:PAYLOAD_KEPT]


def known_under(record: UsageRecord, event: UsageRecorded) -> list[ProcessKey]:
    """The keys under which the run of a record can be known to journals: the process, else all processes of the executor."""
    processes = [event.process] if event.whole else [event.source, ""]
    return [(record.session_id, event.executor_id, process) for process in processes]


def book(
    events: Iterable[tuple[Delivery, UsageRecorded]],
    bad: Iterable[Quarantined],
    sources: Mapping[str, Source],
    next_entry: int,
    next_source: int,
    tariff: Tariff,
    now_us: int,
    known_runs: dict[ProcessKey, RunState] | None = None,
    lost_work: Mapping[DeviceKey, LostWork] | None = None,
) -> Booking:
    """Decide what to write for messages in the order of the stream.

    Args:
        sources: known sources among the messages' sources.
        known_runs: runs among them whose totals a journal states, or stated before. The function updates their state.
        lost_work: the work that was lost, of the devices whose records repeat work, or did and were billed. The function updates
            it.
        next_entry: id of the first entry.
        next_source: number of the first new source.
        now_us: time of our clock. A record that is ahead of this clock and of the stream's is booked at its arrival.
    """
    books = _Books(
        Booking(quarantined=list(bad)),
        dict(sources),
        known_runs or {},
        lost_work or {},
        tariff,
        next_entry,
        next_source,
    )
    for delivery, event in events:
        source = books.source_of(delivery, event)
        if source is None:
            continue
        latest_us = max(now_us, delivery.stored_us)  # a clock of ours that is behind makes no usage impossible
        for item, told in enumerate(event.records):
            why, record = books.record(source, event, item, told, latest_us)
            if why:
                shown = record.model_dump_json()[:PAYLOAD_KEPT]
                books.out.quarantined.append(
                    Quarantined(delivery.sequence, event.source, event.batch, item, why, shown)
                )
    return books.summed_up()


@dataclass(slots=True)
class _Books:
    """What `book` knows while it goes through the messages.

    Attributes:
        out: what to write.
        sources: the known sources by name, with their last batch.
        runs: see `known_runs` of `book`.
        lost_work: see `book`.
        tariff: the prices.
        next_entry: id of the next entry.
        next_source: number of the next new source.
        gained: additions to each run in each hour.
    """

    out: Booking
    sources: dict[str, Source]
    runs: dict[ProcessKey, RunState]
    lost_work: Mapping[DeviceKey, LostWork]
    tariff: Tariff
    next_entry: int
    next_source: int
    gained: dict[tuple[HourKey, RunKey], RunSum] = field(default_factory=dict)

    def source_of(self, delivery: Delivery, event: UsageRecorded) -> Source | None:
        """The source of a message, which has this batch from now on; None: the batch was booked before."""
        found = self.sources.get(event.source)
        if found is None:
            found = Source(self.next_source, 0)
            self.next_source += 1
            self.out.new_sources.add(event.source)
        if event.batch <= found.batch:
            self.out.duplicates += 1
            return None
        expected = found.batch + 1
        if event.batch > expected and not event.whole:
            lost = f"batches {expected} to {event.batch - 1} of this source are missing, so their usage is not booked"
            self.out.quarantined.append(Quarantined(delivery.sequence, event.source, expected, 0, lost, ""))
        self.sources[event.source] = self.out.sources[event.source] = Source(found.number, event.batch)
        return found

    def record(
        self, source: Source, event: UsageRecorded, item: int, told: UsageRecord, latest_us: int
    ) -> tuple[str, UsageRecord]:
        """Book a record of a message. Returns why it cannot be booked, else an empty text, and the record."""
        record, moved = in_time(told, latest_us)
        kind = event.device_kind
        why = impossible(record, event)
        if why:
            return why, record
        run = next((self.runs[key] for key in known_under(told, event) if key in self.runs), None)
        if run is not None:
            part = run.missing_part(record) if event.whole else run.take(record)
            if part is None:
                return "", record
            record, kind = part, kind or (run.last.device_kind if run.last else "")
            run.gpu_ns += record.gpu_ns
            run.core_ns += record.core_ns
            run.last = LastUsage(record.model, kind, record.priority, record.pace_ppm, record.part, record.epoch)
        plan = self.tariff.plan(kind, record.priority, record.at_us - record.span_us)
        work = self.lost_work.get((record.session_id, record.part))
        repeated = 0 if work is None else work.free_part(record)
        core_ucr, vram_ucr = price(record, plan, repeated)
        if core_ucr > LARGEST or vram_ucr > LARGEST:
            return "its price does not fit into 64 bits", record
        if work is not None:
            late = record.epoch < work.epoch
            repeats_ns = min(record.repeats_core_ns, record.core_ns)
            work.booked(record.epoch, record.core_ns, repeated, record.unsaved_core_ns, repeats_ns)
            if repeated:
                moved = moved or (PAID_ALREADY if late else REPEATED)
        reason = "; ".join([text for text in (BY_JOURNAL if event.whole else "", moved) if text])
        self._add(
            _usage_entry(
                self.next_entry, source, event, item, record, kind, repeated, plan.id, core_ucr, vram_ucr, reason
            ),
            record,
        )
        return "", record

    def _add(self, entry: Entry, record: UsageRecord) -> None:
        """Add an entry, and note what its run and its hour gain."""
        self.out.entries.append(entry)
        self.next_entry += 1
        begin = entry.begin_us
        hour = HourKey(record.tenant, begin - begin % HOUR_US, record.model, entry.device_kind, record.priority)
        key = hour, (record.session_id, entry.executor_id)
        gain = self.gained.get(key)
        if gain is None:
            gain = self.gained[key] = RunSum(record.tenant, record.model, begin, record.at_us, record.ended)
        gain.widen(begin, record.at_us, record.ended)
        gain.sums.add_record(record, entry.core_ucr, entry.vram_ucr)

    def summed_up(self) -> Booking:
        """Return what to write, with the sums of runs and hours."""
        for (hour, run), gain in self.gained.items():
            add_run(self.out, run, gain)
            add_hour(self.out, hour, gain.sums)
        return self.out


def _usage_entry(
    id: int,
    source: Source,
    event: UsageRecorded,
    item: int,
    record: UsageRecord,
    device_kind: str,
    repeated_core_ns: int,
    plan_id: int,
    core_ucr: int,
    vram_ucr: int,
    reason: str,
) -> Entry:
    r = record
    return Entry(
        id=id,
        source_id=source.number,
        batch=event.batch,
        item=item,
        kind=USAGE,
        corrects=None,
        tenant=r.tenant,
        session_id=r.session_id,
        executor_id=event.executor_id,
        model=r.model,
        device_kind=device_kind,
        priority=r.priority,
        begin_us=r.at_us - r.span_us,
        end_us=r.at_us,
        runs=r.runs,
        gpu_ns=r.gpu_ns,
        core_ns=r.core_ns,
        pace_ppm=r.pace_ppm,
        moved_bytes=r.moved_bytes,
        flops=r.flops,
        resident_mib_us=r.resident_mib_us,
        idle_mib_us=r.idle_mib_us,
        part=r.part,
        epoch=r.epoch,
        repeated_core_ns=repeated_core_ns,
        unsaved_core_ns=r.unsaved_core_ns,
        plan_id=plan_id,
        core_ucr=core_ucr,
        vram_ucr=vram_ucr,
        reason=reason,
    )


def add_run(out: Booking, key: RunKey, gain: RunSum) -> None:
    """Add a gain to a run."""
    run = out.runs.get(key)
    if run is None:
        out.runs[key] = run = RunSum(gain.tenant, gain.model, gain.began_us, gain.until_us, gain.ended)
    run.widen(gain.began_us, gain.until_us, gain.ended)
    run.sums.add(gain.sums)


def add_hour(out: Booking, key: HourKey, sums: Sums) -> None:
    """Add sums to an hour. Usage counts in the hour in which it began."""
    out.hours.setdefault(key, Sums()).add(sums)
