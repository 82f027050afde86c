"""From messages of the usage stream to entries, sums and quarantine: `book` says what to write, and writes nothing.

Each source numbers its batches. A batch that is not the next one of its source was either booked before, or batches before it
were lost, which is shown in the quarantine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError
from wooly_wis.credits import UsageRecord, UsageRecorded

from wooly_metering.core.checks import LARGEST, impossible
from wooly_metering.core.rating import Tariff, price

HOUR_US = 3_600_000_000
USAGE, CORRECTION = 0, 1
#: The reason that an entry gives which was booked by a journal.
BY_JOURNAL = "by the dispatch journal: no usage record came for it"
#: Characters kept of a message that cannot be read.
PAYLOAD_KEPT = 64 << 10

#: Columns of an entry, in the order of `Entry` tuples.
COLUMNS = (
    "id",
    "source_id",
    "batch",
    "item",
    "kind",
    "corrects",
    "tenant",
    "session_id",
    "executor_id",
    "model",
    "device_kind",
    "priority",
    "begin_us",
    "end_us",
    "runs",
    "gpu_ns",
    "core_ns",
    "pace_ppm",
    "moved_bytes",
    "flops",
    "resident_mib_us",
    "idle_mib_us",
    "plan_id",
    "core_ucr",
    "vram_ucr",
    "reason",
)
#: What is summed in roll-ups.
SUMS = (
    "entries",
    "runs",
    "gpu_ns",
    "core_ns",
    "moved_bytes",
    "flops",
    "resident_mib_us",
    "idle_mib_us",
    "core_ucr",
    "vram_ucr",
)
_NOTHING = (0,) * len(SUMS)
Entry = tuple[int | str | None, ...]
#: tenant, hour (us), model, device kind, class
HourKey = tuple[str, int, str, str, int]
#: session, executor
RunKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message of the stream: its number there, and its bytes."""

    sequence: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that is not booked, and why. `batch` and `item` are 0 where nothing is known of them."""

    sequence: int
    source: str
    batch: int
    item: int
    reason: str
    payload: str


@dataclass(slots=True)
class RunSum:
    """What a run adds up to, and what is known of it."""

    tenant: str
    model: str
    began_us: int
    until_us: int
    ended: bool
    sums: list[int]


@dataclass(slots=True)
class RunKnown:
    """What is known of a run on an executor while it is booked.

    Attributes:
        gpu_ns: booked so far; of runs whose totals a journal tells.
        core_ns: likewise.
        ahead_gpu_ns: what of that stands for usage records that have not come.
        ahead_core_ns: likewise.
        last: model, kind of device, class and pace of its last entry; None: it has none.
    """

    gpu_ns: int = 0
    core_ns: int = 0
    ahead_gpu_ns: int = 0
    ahead_core_ns: int = 0
    last: tuple[str, str, int, int] | None = None

    def take(self, record: UsageRecord) -> UsageRecord:
        """A record less what was booked ahead for it."""
        gpu, core = min(record.gpu_ns, self.ahead_gpu_ns), min(record.core_ns, self.ahead_core_ns)
        self.ahead_gpu_ns -= gpu
        self.ahead_core_ns -= core
        if not gpu and not core:
            return record
        return record.model_copy(update={"gpu_ns": record.gpu_ns - gpu, "core_ns": record.core_ns - core})

    def lacking(self, whole: UsageRecord) -> UsageRecord | None:
        """What a journal's total has beyond what is booked, as a record; None: nothing. From now on it is booked ahead."""
        gpu, core = max(whole.gpu_ns - self.gpu_ns, 0), whole.core_ns - self.core_ns
        if core <= 0:
            return None
        self.ahead_gpu_ns += gpu
        self.ahead_core_ns += core
        model, _, priority, pace = self.last or ("", "", whole.priority, whole.pace_ppm)
        changes = {"gpu_ns": gpu, "core_ns": core, "span_us": -(-gpu // 1000), "model": model, "priority": priority}
        return whole.model_copy(update={**changes, "pace_ppm": pace})


@dataclass(slots=True)
class Booking:
    """What to write.

    Attributes:
        entries: rows, as `COLUMNS` says.
        runs: what runs gain.
        hours: what hours gain, as `SUMS` says.
        sources: per source that had anything new: its number and its last batch.
        new_sources: those that were not known.
        duplicates: batches that had been booked before.
        tenants: whose entries there are.
    """

    entries: list[Entry] = field(default_factory=list)
    runs: dict[RunKey, RunSum] = field(default_factory=dict)
    hours: dict[HourKey, list[int]] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    new_sources: set[str] = field(default_factory=set)
    duplicates: int = 0

    @property
    def tenants(self) -> set[str]:
        """Whose entries there are."""
        return {key[0] for key in self.hours}


def read(deliveries: Iterable[Delivery]) -> tuple[list[tuple[Delivery, UsageRecorded]], list[Quarantined]]:
    """Messages as events; what is none is for the quarantine."""
    events: list[tuple[Delivery, UsageRecorded]] = []
    bad: list[Quarantined] = []
    for delivery in deliveries:
        try:
            events.append((delivery, UsageRecorded.model_validate_json(delivery.data)))
        except ValidationError as e:
            first = e.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "message"
            reason = f"not a UsageRecorded: {where}: {first['msg']}"
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


def book(
    events: Iterable[tuple[Delivery, UsageRecorded]],
    bad: Iterable[Quarantined],
    sources: Mapping[str, tuple[int, int]],
    next_entry: int,
    next_source: int,
    tariff: Tariff,
    now_us: int,
    known_runs: dict[RunKey, RunKnown] | None = None,
) -> Booking:
    """What to write for messages in the order of the stream.

    Args:
        sources: number and last batch of each source among them that is known.
        known_runs: those among them whose totals a journal tells, or told; they are kept up to date.
        next_entry: the first entry's id.
        next_source: the number of the first source that is not known.
    """
    out = Booking(quarantined=list(bad), sources={})
    known, watched = dict(sources), known_runs or {}
    entry_id = next_entry
    #: Per session and hour: its first and last moment, whether it ended, and `SUMS`.
    gained: dict[tuple[str, int, str, str, int, str, str], list[int]] = {}
    for delivery, event in events:
        found = known.get(event.source)
        if found is None:
            found = (next_source, 0)
            next_source += 1
            out.new_sources.add(event.source)
        number, last = found
        if event.batch <= last:
            out.duplicates += 1
            continue
        if event.batch > last + 1 and not event.whole:
            lost = f"batches {last + 1} to {event.batch - 1} of this source are missing: nothing is booked for them"
            out.quarantined.append(Quarantined(delivery.sequence, event.source, last + 1, 0, lost, ""))
        known[event.source] = out.sources[event.source] = number, event.batch
        executor = event.executor_id
        for item, told in enumerate(event.records):
            record, run, kind = told, watched.get((told.session_id, executor)), event.device_kind
            why = impossible(record, event, now_us)
            if not why and run is not None:
                found_lacking = run.lacking(record) if event.whole else run.take(record)
                if found_lacking is None:
                    continue
                record = found_lacking
                kind = kind or (run.last[1] if run.last else "")
                run.gpu_ns += record.gpu_ns
                run.core_ns += record.core_ns
                run.last = record.model, kind, record.priority, record.pace_ppm
            if not why:
                begin = record.at_us - record.span_us
                plan = tariff.plan(kind, record.priority, begin)
                core, vram = price(record, plan)
                if core > LARGEST or vram > LARGEST:
                    why = "its price is astronomical"
            if why:
                shown = record.model_dump_json()[:PAYLOAD_KEPT]
                out.quarantined.append(Quarantined(delivery.sequence, event.source, event.batch, item, why, shown))
                continue
            r = record
            out.entries.append(
                (entry_id, number, event.batch, item, USAGE, None, r.tenant, r.session_id, executor, r.model, kind, r.priority,
                 begin, r.at_us, r.runs, r.gpu_ns, r.core_ns, r.pace_ppm, r.moved_bytes, r.flops, r.resident_mib_us,
                 r.idle_mib_us, plan.id, core, vram, BY_JOURNAL if event.whole else "")
            )  # fmt: skip
            entry_id += 1
            key = r.tenant, begin - begin % HOUR_US, r.model, kind, r.priority, r.session_id, executor
            sums = gained.get(key)
            if sums is None:
                gained[key] = sums = [begin, r.at_us, r.ended, *_NOTHING]
            elif begin < sums[0]:
                sums[0] = begin
            if r.at_us > sums[1]:
                sums[1] = r.at_us
            if r.ended:
                sums[2] = True
            sums[3] += 1
            sums[4] += r.runs
            sums[5] += r.gpu_ns
            sums[6] += r.core_ns
            sums[7] += r.moved_bytes
            sums[8] += r.flops
            sums[9] += r.resident_mib_us
            sums[10] += r.idle_mib_us
            sums[11] += core
            sums[12] += vram
    for (tenant, hour, model, kind, priority, session, executor), (begin, end, ended, *rest) in gained.items():
        add_run(out, session, executor, tenant, model, begin, end, bool(ended), tuple(rest))
        add_hour(out, (tenant, hour, model, kind, priority), tuple(rest))
    return out


def add_run(
    out: Booking,
    session: str,
    executor: str,
    tenant: str,
    model: str,
    begin: int,
    end: int,
    ended: bool,
    sums: tuple[int, ...],
) -> None:
    """Add to a run's sums."""
    run = out.runs.get((session, executor))
    if run is None:
        out.runs[session, executor] = RunSum(tenant, model, begin, end, ended, list(sums))
        return
    run.began_us, run.until_us, run.ended = min(run.began_us, begin), max(run.until_us, end), run.ended or ended
    for i, value in enumerate(sums):
        run.sums[i] += value


def add_hour(out: Booking, key: HourKey, sums: tuple[int, ...]) -> None:
    """Add to an hour's sums. Usage is counted in the hour in which it began."""
    hour = out.hours.get(key)
    if hour is None:
        out.hours[key] = list(sums)
        return
    for i, value in enumerate(sums):
        hour[i] += value
