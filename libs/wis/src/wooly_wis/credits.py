"""Messages of metering: what executors report, and what may be asked about credits.

Quantities and amounts are integers. Amounts are micro-credits (a millionth of a credit); prices are in millionths of a credit per
core-millisecond, or per MiB-second.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from wooly_wis.messages import Id, Message, Name, SessionId

#: What a signed 64-bit column holds, both ways and not below zero.
Amount = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Quantity = Annotated[int, Field(ge=0, lt=1 << 63)]
Label = Annotated[str, StringConstraints(max_length=256)]
#: A name that its asker made up: the same again changes nothing.
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=128)]
#: Microseconds since 1970.
Micros = Annotated[int, Field(ge=0, lt=1 << 62)]
Period = Literal["total", "month", "day"]


class UsageRecord(BaseModel):
    """What one session used on one device since its record before.

    Numbers are taken as they come: whether they can be is judged by metering, one record at a time.

    Attributes:
        model: what the session calls what it runs.
        at_us: until when, microseconds since 1970.
        span_us: the time that it covers, by a clock that is never set.
        runs: programs that ended.
        gpu_ns: device time.
        core_ns: cores occupied times device time.
        pace_ppm: the pace at which its times are priced, in millionths: how fast the device's cores were meanwhile, and on CPUs
            what equal runs take on average.
        moved_bytes: read and written by the programs' instructions, by the op table.
        flops: of those instructions whose arithmetic the op table knows.
        resident_mib_us: MiB resident times microseconds of its own device time.
        idle_mib_us: MiB resident times all other microseconds.
        ended: the session is over, and this is its last record.
        trace: with the last record of a session that is traced: its span, as W3C's `traceparent`. Nothing is billed by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    session_id: str
    tenant: str
    model: str = ""
    priority: int = 2
    at_us: int
    span_us: int
    runs: int = 0
    gpu_ns: int = 0
    core_ns: int = 0
    pace_ppm: int = 1_000_000
    moved_bytes: int = 0
    flops: int = 0
    resident_mib_us: int = 0
    idle_mib_us: int = 0
    ended: bool = False
    trace: str = ""


class UsageRecorded(Message):
    """Usage of an executor's sessions (event, on a stream).

    `source` is one life of an executor, which numbers its batches 1, 2, 3, …; `cores` and `memory` (bytes) are the device's.

    With `whole`, the records say what each session ran in all on this executor, by a dispatch journal (`source`), in its first
    `batch` entries: device and core time, nothing else. Metering books what the session's usage records lack of that.
    """

    source: Annotated[str, StringConstraints(min_length=1, max_length=192)]
    batch: int = Field(ge=1, lt=1 << 62)
    executor_id: Id
    device_kind: Annotated[str, StringConstraints(max_length=64)]
    cores: int = Field(ge=1, lt=1 << 31)
    memory: int = Field(ge=0, lt=1 << 62)
    records: tuple[UsageRecord, ...] = Field(max_length=20_000)
    whole: bool = False


class CreditsRequest(Message):
    """What has been booked, summed by run, model or hour; the newest first, those that come after `offset`.

    With `session_id`, of that run alone; `settled`: once it has ended and all of it is booked, or after two seconds.
    """

    tenant: Label = ""
    by: Literal["run", "model", "hour"] = "run"
    session_id: SessionId | None = None
    settled: bool = False
    since_us: Micros = 0
    until_us: Micros | None = None
    offset: int = Field(default=0, ge=0, lt=1 << 31)
    limit: int = Field(default=100, ge=1, le=1000)


class CreditsRow(Message):
    """One run, model or hour of a tenant (`name`), from its first to its last moment. `ended`: a run that is over."""

    tenant: str
    name: str
    model: str = ""
    began_us: int = 0
    until_us: int = 0
    ended: bool = False
    runs: int = 0
    gpu_ns: int = 0
    core_ns: int = 0
    moved_bytes: int = 0
    flops: int = 0
    resident_mib_us: int = 0
    idle_mib_us: int = 0
    core_ucr: int = 0
    vram_ucr: int = 0


class BudgetState(Message):
    """A tenant's budget, and what it has spent of it in the period, in micro-credits. `held`: its sessions are suspended."""

    tenant: Name
    period: Period = "total"
    soft_ucr: Quantity | None = None
    hard_ucr: Quantity | None = None
    spent_ucr: Amount = 0
    held: bool = False


class CreditsReply(Message):
    """All that the tenant spent (or all tenants), its budgets, and the rows asked for. `more`: there are further ones."""

    core_ucr: int
    vram_ucr: int
    quarantined: int = 0
    budgets: tuple[BudgetState, ...] = ()
    rows: tuple[CreditsRow, ...] = ()
    more: bool = False


class SetBudgetRequest(Message):
    """A tenant's budget from now on; None: no such limit."""

    tenant: Name
    period: Period = "total"
    soft_ucr: Quantity | None = None
    hard_ucr: Quantity | None = None


class CheckBudgetRequest(Message):
    """May this tenant have another session? (router to metering)"""

    tenant: Name


class CheckBudgetReply(Message):
    """Why not: which limit, what was spent, how to raise it; empty: it may."""

    refusal: str = ""


class PricePlan(Message):
    """What usage costs on a kind of device and in a class, from a moment on (and until another).

    Attributes:
        device_kind: as in `DeviceFacts.vendor`; empty: any.
        priority: class 0 to 4; None: any.
        core_rate: millionths of a credit per core and millisecond.
        vram_rate: millionths of a credit per MiB and second, while the session executes.
        idle_rate: the same, while it does not.
    """

    id: int = Field(default=0, ge=0)
    name: Name
    device_kind: Annotated[str, StringConstraints(max_length=64)] = ""
    priority: int | None = Field(default=None, ge=0, le=4)
    valid_from_us: Micros = 0
    valid_until_us: Micros | None = None
    core_rate: int = Field(default=1_000_000, ge=0, le=1_000_000_000_000)
    vram_rate: int = Field(default=1_000_000, ge=0, le=1_000_000_000_000)
    idle_rate: int = Field(default=0, ge=0, le=1_000_000_000_000)


class AddPlanRequest(Message):
    """Book by this plan, too. A name that is there is refused; what is booked keeps its price."""

    plan: PricePlan


class PlansRequest(Message):
    """Ask for all price plans."""


class PlansReply(Message):
    """The plans, oldest first."""

    plans: tuple[PricePlan, ...]


class EntriesRequest(Message):
    """The ledger's entries after number `after`, of a tenant or a run, or all."""

    tenant: Label = ""
    session_id: SessionId | None = None
    after: Quantity = 0
    limit: int = Field(default=100, ge=1, le=1000)


class LedgerEntry(Message):
    """One entry. A correction has the number of the entry that it corrects, negative amounts, and says why."""

    id: int
    kind: Literal["usage", "correction"]
    corrects: int | None = None
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
    pace_ppm: int = 1_000_000
    moved_bytes: int
    flops: int
    resident_mib_us: int
    idle_mib_us: int
    plan_id: int
    core_ucr: int
    vram_ucr: int
    reason: str = ""


class EntriesReply(Message):
    """Entries in their order. `more`: there are further ones."""

    entries: tuple[LedgerEntry, ...]
    more: bool = False


class CorrectEntryRequest(Message):
    """Take credits of an entry back, all that is left of it unless amounts are given."""

    request_id: RequestId
    entry: int = Field(ge=1, lt=1 << 62)
    core_ucr: Quantity | None = None
    vram_ucr: Quantity | None = None
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class MakeStatementRequest(Message):
    """Bill what a tenant used and no statement has yet. Nothing new: the last statement again."""

    tenant: Name


class StatementsRequest(Message):
    """A tenant's statements after number `after`."""

    tenant: Name
    after: Quantity = 0


class Statement(Message):
    """What a tenant used, once and for all: the entries from `first_entry` to `last_entry` that are its.

    `digest` is SHA-256 over the statement's other fields, `previous` among them: the digest of the statement before.
    """

    tenant: Name
    number: int = Field(ge=1)
    first_entry: int
    last_entry: int
    entries: int
    made_us: int
    core_ucr: int
    vram_ucr: int
    lines: tuple[CreditsRow, ...]
    previous: str
    digest: str = ""


class StatementsReply(Message):
    """Statements in their order; as many as fit a message."""

    statements: tuple[Statement, ...]
    more: bool = False


class QuarantineRequest(Message):
    """Usage that could not be booked, after number `after`."""

    after: Quantity = 0
    limit: int = Field(default=100, ge=1, le=200)


class QuarantinedUsage(Message):
    """A record, or a whole message, that cannot be right. `payload`: it, as it came (what is not text in hex)."""

    id: int
    sequence: int
    source: str
    batch: int
    item: int
    at_us: int
    reason: str
    payload: str


class QuarantineReply(Message):
    """What is in quarantine, in the order of its arrival."""

    found: tuple[QuarantinedUsage, ...]
    more: bool = False


class BudgetReached(Message):
    """A tenant has spent as much as its budget says (event)."""

    budget: BudgetState
    limit: Literal["soft", "hard"]


class UsageQuarantined(Message):
    """Usage could not be booked (event). `id`: in the quarantine."""

    id: int
    reason: str


class StatementMade(Message):
    """A statement is there (event)."""

    tenant: Name
    number: int
    core_ucr: int
    vram_ucr: int
    digest: str
