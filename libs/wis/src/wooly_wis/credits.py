"""Messages of metering: usage reports of executors, and requests about credits.

Quantities and amounts are integers. Amounts are micro-credits (a millionth of a credit). Prices are in millionths of a credit per
core-millisecond, or per MiB-second.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from wooly_wis.messages import Id, Message, Name, SessionId

#: Ranges of a signed 64-bit database column: any sign, and not negative.
Amount = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Quantity = Annotated[int, Field(ge=0, lt=1 << 63)]
Label = Annotated[str, StringConstraints(max_length=256)]
#: A request id that the client chooses. A repeated request with the same id has no further effect.
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=128)]
#: Microseconds since 1970.
Micros = Annotated[int, Field(ge=0, lt=1 << 62)]
Period = Literal["total", "month", "day"]


class UsageRecord(BaseModel):
    """The usage of one session on one device since the session's previous record.

    The message accepts any number. Metering checks each record and puts impossible records into quarantine.

    Attributes:
        model: the session's name for its model, as the client declared it.
        at_us: end of the covered time, in microseconds since 1970.
        span_us: length of the covered time, in microseconds of a monotonic clock.
        runs: number of finished programs.
        gpu_ns: device time.
        core_ns: device time times the number of occupied cores.
        pace_ppm: the relative speed of the device's cores in the covered time, in millionths. Prices are multiplied with it. On
            CPUs,
            it is derived from the average duration of equal runs.
        moved_bytes: bytes that the programs' instructions read and wrote, by the op table.
        flops: operations of those instructions whose cost the op table knows.
        resident_mib_us: resident MiB times microseconds of the session's own device time.
        idle_mib_us: resident MiB times all other microseconds.
        ended: the session has ended, and this is its last record.
        part: index of the session's device.
        epoch: how often the session had gone on in another executor.
        repeats_core_ns: the part of `core_ns` that repeated work after the cluster had lost the session's executor. Metering does
            not bill it, up to the work that was lost.
        unsaved_core_ns: core time of this epoch since the newest stored checkpoint; None: no checkpoint was stored in this epoch.
        trace: in the last record of a traced session: its span, as W3C's `traceparent`. It has no effect on bills.
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
    part: int = 0
    epoch: int = 0
    repeats_core_ns: int = 0
    unsaved_core_ns: int | None = None
    trace: str = ""


class UsageRecorded(Message):
    """Usage of an executor's sessions (event, on a stream).

    `source` names one process of an executor; the process numbers its batches 1, 2, 3, …. `cores` and `memory` (bytes) describe
    the device.

    With `whole`, each record is a total: what the session ran on this executor according to the first `batch` entries of a
    dispatch journal (`source`). Such a record has only device time and core time. Metering books the part that no usage record
    of the same process covered. `process`: the source of those usage records; empty: unknown, so usage records of all processes
    of this executor count.
    """

    source: Annotated[str, StringConstraints(min_length=1, max_length=192)]
    batch: int = Field(ge=1, lt=1 << 62)
    executor_id: Id
    device_kind: Annotated[str, StringConstraints(max_length=64)]
    cores: int = Field(ge=1, lt=1 << 31)
    memory: int = Field(ge=0, lt=1 << 62)
    records: tuple[UsageRecord, ...] = Field(max_length=20_000)
    whole: bool = False
    process: Annotated[str, StringConstraints(max_length=192)] = ""


class CreditsRequest(Message):
    """Ask for booked credits, summed by run, model or hour, newest first. `offset`: number of rows to skip.

    With `session_id`, only the rows of that run. The ranks of a gang are one run, under the id of the gang. `settled`: answer
    when the run has ended and is booked completely, or after two seconds.
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
    """One run, model or hour of a tenant (`name`), with its first and last time. `ended`: the run has ended."""

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
    """A tenant's budget and the micro-credits spent in the budget's period. `held`: the tenant's sessions are suspended."""

    tenant: Name
    period: Period = "total"
    soft_ucr: Quantity | None = None
    hard_ucr: Quantity | None = None
    spent_ucr: Amount = 0
    held: bool = False


class CreditsReply(Message):
    """The credits that the tenant (or all tenants) spent, budgets, and the requested rows. `more`: further rows exist."""

    core_ucr: int
    vram_ucr: int
    quarantined: int = 0
    budgets: tuple[BudgetState, ...] = ()
    rows: tuple[CreditsRow, ...] = ()
    more: bool = False


class SetBudgetRequest(Message):
    """Set a tenant's budget. None removes the limit."""

    tenant: Name
    period: Period = "total"
    soft_ucr: Quantity | None = None
    hard_ucr: Quantity | None = None


class CheckBudgetRequest(Message):
    """Ask whether a tenant has credits for another session (router to metering)."""

    tenant: Name


class CheckBudgetReply(Message):
    """`refusal`: why the tenant may not open a session (the limit, the spent credits, how to raise the limit); empty if it
    may.
    """

    refusal: str = ""


class PricePlan(Message):
    """Prices of usage for a kind of device and a class, for a span of time.

    Attributes:
        device_kind: as in `DeviceFacts.vendor`; empty: any kind.
        priority: class 0 to 4; None: any class.
        core_rate: millionths of a credit per core and millisecond.
        vram_rate: millionths of a credit per MiB and second, while the session executes.
        idle_rate: millionths of a credit per MiB and second, while the session does not execute.
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
    """Add a price plan. A plan with an existing name is refused. Booked entries keep their price."""

    plan: PricePlan


class PlansRequest(Message):
    """Ask for all price plans."""


class PlansReply(Message):
    """The plans, oldest first."""

    plans: tuple[PricePlan, ...]


class EntriesRequest(Message):
    """Ask for the ledger's entries with a number above `after`: of a tenant, of a run, or all."""

    tenant: Label = ""
    session_id: SessionId | None = None
    after: Quantity = 0
    limit: int = Field(default=100, ge=1, le=1000)


class LedgerEntry(Message):
    """One ledger entry. A correction names the corrected entry, has negative amounts, and states a reason.

    `repeated_core_ns` is the part of `core_ns` that is not billed, because it repeated work that the cluster had lost.
    """

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
    repeated_core_ns: int = 0
    plan_id: int
    core_ucr: int
    vram_ucr: int
    reason: str = ""


class EntriesReply(Message):
    """Entries, ordered by number. `more`: further entries exist."""

    entries: tuple[LedgerEntry, ...]
    more: bool = False


class CorrectEntryRequest(Message):
    """Take back credits of an entry. Without amounts, take back all remaining credits of the entry."""

    request_id: RequestId
    entry: int = Field(ge=1, lt=1 << 62)
    core_ucr: Quantity | None = None
    vram_ucr: Quantity | None = None
    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class MakeStatementRequest(Message):
    """Make a statement of all the tenant's usage that no statement covers. Without new usage, return the last statement again."""

    tenant: Name


class StatementsRequest(Message):
    """Ask for a tenant's statements with a number above `after`."""

    tenant: Name
    after: Quantity = 0


class Statement(Message):
    """A final bill of a tenant: the tenant's entries from `first_entry` to `last_entry`.

    `digest` is SHA-256 over all other fields of the statement. One of them is `previous`: the digest of the previous statement.
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
    """Statements, ordered by number, as many as fit into one message. `more`: further statements exist."""

    statements: tuple[Statement, ...]
    more: bool = False


class QuarantineRequest(Message):
    """Ask for quarantined usage with a number above `after`: usage that could not be booked."""

    after: Quantity = 0
    limit: int = Field(default=100, ge=1, le=200)


class QuarantinedUsage(Message):
    """A record, or a whole message, that metering considers impossible. `payload`: the original, in hex if it is not text."""

    id: int
    sequence: int
    source: str
    batch: int
    item: int
    at_us: int
    reason: str
    payload: str


class QuarantineReply(Message):
    """Quarantined usage, in order of arrival. `more`: further usage is in quarantine."""

    found: tuple[QuarantinedUsage, ...]
    more: bool = False


class BudgetReached(Message):
    """A tenant has reached a limit of its budget (event)."""

    budget: BudgetState
    limit: Literal["soft", "hard"]


class UsageQuarantined(Message):
    """Usage could not be booked (event). `id`: its number in the quarantine."""

    id: int
    reason: str


class StatementMade(Message):
    """A new statement exists (event)."""

    tenant: Name
    number: int
    core_ucr: int
    vram_ucr: int
    digest: str
