"""All changes of the ledger: booking from the stream, corrections, budgets, plans, statements."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Table, case, delete, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from wooly_bus.contracts import USAGE_AGE_S
from wooly_wis.credits import CreditsRow, PricePlan, Statement, UsageRecorded

from wooly_metering.core.booking import (
    COLUMNS,
    CORRECTION,
    HOUR_US,
    SUMS,
    USAGE,
    Booking,
    Delivery,
    DeviceKey,
    Entry,
    HourKey,
    LastUsage,
    LostWork,
    ProcessKey,
    Quarantined,
    RunState,
    RunSum,
    Source,
    Sums,
    add_hour,
    add_run,
    book,
    known_under,
    read,
)
from wooly_metering.core.budgets import Budget
from wooly_metering.core.checks import impossible
from wooly_metering.core.rating import PLAIN, Tariff, TariffPlan
from wooly_metering.errors import CorrectionError, OvertakenError, PlanError, StatementError
from wooly_metering.ledger.database import Database
from wooly_metering.ledger.tables import (
    ahead,
    budgets,
    entries,
    hours,
    paid_repeats,
    plans,
    positions,
    quarantine,
    runs,
    sources,
    statements,
)

#: Microseconds for which usage booked from a journal is remembered. Usage records stay in their stream no longer than that.
AHEAD_KEPT_US = int((USAGE_AGE_S + 86_400) * 1e6)
#: Maximum number of lines of a statement. Further runs are summed up in one line.
LINES = 1000
#: Both functions support ON CONFLICT, but they have no common type with it.
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_QUANTITIES = SUMS[1:]


class BookedRun(NamedTuple):
    """A run for which usage was booked, until a time. `ended`: the run ended at this time."""

    session_id: str
    executor_id: str
    tenant: str
    until_us: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Booked:
    """The result of one transaction.

    Attributes:
        entries: number of added entries.
        duplicates: number of batches that were booked before.
        tenants: tenants of the entries.
        runs: runs of the entries.
        quarantined: ids and reasons.
        core_ucr: booked core credits.
        vram_ucr: booked VRAM credits.
        traced: (traceparent, session) of traced sessions whose last record was booked.
    """

    entries: int
    duplicates: int
    tenants: frozenset[str]
    runs: tuple[BookedRun, ...]
    quarantined: tuple[tuple[int, str], ...]
    core_ucr: int
    vram_ucr: int
    traced: tuple[tuple[str, str], ...] = ()


class Writer:
    """Writes to one database. Each method is one transaction; a process that dies in a transaction leaves no part of it.

    Booking follows the order of the stream and stores the position with the entries. So messages that are delivered again are
    recognized.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._tariff: Tariff | None = None
        self._tariff_id = -1

    # -- the stream --------------------------------------------------------------------------------------------------

    def position(self, stream: str, created: str) -> int:
        """Number of the last booked message of a stream; 0: none is booked."""
        with self._db.reading() as c:
            row = c.execute(select(positions).where(positions.c.stream == stream)).first()
        return row.sequence if row is not None and row.created == created else 0

    def take(self, stream: str, created: str, after: int, deliveries: Sequence[Delivery], now_us: int) -> Booked:
        """Book messages: the stream's messages after number `after`, in order.

        Raises:
            OvertakenError: another process booked these messages in the meantime.
        """
        events, bad = read(deliveries)
        with self._db.writing() as c:
            self._advance(c, stream, created, after, deliveries[-1].sequence)
            names = {event.source for _, event in events}
            known = _known_sources(c, names)
            next_source = (c.scalar(select(func.max(sources.c.id))) or 0) + 1
            decoded = [event for _, event in events]
            watched, lost = _watched(c, decoded), _lost_work(c, decoded, _paid(c, decoded))
            booking = book(events, bad, known, _next_entry(c), next_source, self._prices(c), now_us, watched, lost)
            _write_ahead(c, watched, now_us)
            _write_paid(c, lost, now_us)
            _write_sources(c, booking)
            ids = _write_quarantine(c, booking.quarantined, now_us)
            self._write(c, booking)
        return Booked(
            len(booking.entries),
            booking.duplicates,
            frozenset(booking.tenants),
            tuple([BookedRun(s, e, run.tenant, run.until_us, run.ended) for (s, e), run in booking.runs.items()]),
            tuple(zip(ids, [q.reason for q in booking.quarantined], strict=True)),
            sum([run.sums.core_ucr for run in booking.runs.values()]),
            sum([run.sums.vram_ucr for run in booking.runs.values()]),
            tuple(
                [
                    (r.trace, r.session_id)
                    for _, event in events
                    for r in event.records
                    if r.trace and r.ended and (r.session_id, event.executor_id) in booking.runs
                ]
            ),
        )

    def _advance(self, c: Connection, stream: str, created: str, after: int, until: int) -> None:
        row = c.execute(select(positions).where(positions.c.stream == stream)).first()
        if row is None:
            c.execute(insert(positions).values(stream=stream, created=created, sequence=until))
            return
        if (row.sequence if row.created == created else 0) != after:
            raise OvertakenError(
                f"another process has booked stream {stream} up to message {row.sequence}; this process continues after it"
            )
        c.execute(update(positions).where(positions.c.stream == stream).values(created=created, sequence=until))

    def _prices(self, c: Connection) -> Tariff:
        newest = c.scalar(select(func.max(plans.c.id))) or 0
        if self._tariff is None or newest != self._tariff_id:
            self._tariff = Tariff([TariffPlan(**row._mapping) for row in c.execute(select(plans))])
            self._tariff_id = newest
        return self._tariff

    def _write(self, c: Connection, booking: Booking) -> None:
        if not booking.entries:
            return
        if self._db.sqlite:
            c.exec_driver_sql(
                f"INSERT INTO entries ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})",
                booking.entries,
            )
        else:
            _copy(c, booking.entries)
        _add(c, runs, [
            {"session_id": s, "executor_id": e, "tenant": r.tenant, "model": r.model, "began_us": r.began_us,
             "until_us": r.until_us, "ended": r.ended} | r.sums.columns()
            for (s, e), r in sorted(booking.runs.items())
        ], self._db.sqlite)  # fmt: skip
        _add(c, hours, [
            key._asdict() | sums.columns() for key, sums in sorted(booking.hours.items(), key=lambda item: item[0])
        ], self._db.sqlite)  # fmt: skip

    # -- corrections -------------------------------------------------------------------------------------------------

    def correct(
        self, request_id: str, entry: int, core_ucr: int | None, vram_ucr: int | None, reason: str, now_us: int
    ) -> int:
        """Take back credits of an entry with a counter-entry. Without amounts, take back all remaining credits.

        Returns:
            Number of the counter-entry. A repeated request returns the number of its first counter-entry.

        Raises:
            CorrectionError: the entry does not exist, is a correction itself, or has fewer credits than requested.
        """
        name = f"correction/{request_id}"
        with self._db.writing() as c:
            known = _known_sources(c, {name}).get(name)
            if known is not None:
                return int(c.scalars(select(entries.c.id).where(entries.c.source_id == known.number)).one())
            found = c.execute(select(entries).where(entries.c.id == entry)).first()
            if found is None:
                raise CorrectionError(f"entry {entry} does not exist")
            if found.kind != USAGE:
                raise CorrectionError(f"entry {entry} is a correction; correct entry {found.corrects} again instead")
            core_taken, vram_taken = c.execute(
                select(func.coalesce(func.sum(entries.c.core_ucr), 0), func.coalesce(func.sum(entries.c.vram_ucr), 0))
                .where(entries.c.session_id == found.session_id)
                .where(entries.c.corrects == entry)
            ).one()
            core_left, vram_left = found.core_ucr + int(core_taken), found.vram_ucr + int(vram_taken)
            core_back = core_left if core_ucr is None else core_ucr
            vram_back = vram_left if vram_ucr is None else vram_ucr
            if core_back > core_left or vram_back > vram_left:
                raise CorrectionError(
                    f"the correction exceeds the rest of entry {entry}: {core_left} core and {vram_left} VRAM micro-credits"
                )
            if core_back == 0 and vram_back == 0:
                raise CorrectionError(
                    f"the correction of entry {entry} is empty: the amounts are 0, or the entry has no credits left"
                )
            number, source = _next_entry(c), (c.scalar(select(func.max(sources.c.id))) or 0) + 1
            c.execute(insert(sources).values(id=source, name=name, batch=0))
            row = Entry(
                id=number,
                source_id=source,
                batch=0,
                item=0,
                kind=CORRECTION,
                corrects=entry,
                tenant=found.tenant,
                session_id=found.session_id,
                executor_id=found.executor_id,
                model=found.model,
                device_kind=found.device_kind,
                priority=found.priority,
                begin_us=found.begin_us,
                end_us=max(now_us, found.end_us),
                runs=0,
                gpu_ns=0,
                core_ns=0,
                pace_ppm=found.pace_ppm,
                moved_bytes=0,
                flops=0,
                resident_mib_us=0,
                idle_mib_us=0,
                part=found.part,
                epoch=found.epoch,
                repeated_core_ns=0,
                unsaved_core_ns=None,
                plan_id=found.plan_id,
                core_ucr=-core_back,
                vram_ucr=-vram_back,
                reason=reason,
            )
            sums = Sums(entries=1, core_ucr=-core_back, vram_ucr=-vram_back)
            booking = Booking(entries=[row])
            gain = RunSum(found.tenant, found.model, found.begin_us, found.end_us, False, sums)
            add_run(booking, (found.session_id, found.executor_id), gain)
            hour = found.begin_us - found.begin_us % HOUR_US
            add_hour(booking, HourKey(found.tenant, hour, found.model, found.device_kind, found.priority), sums)
            self._write(c, booking)
            return number

    # -- plans and budgets -------------------------------------------------------------------------------------------

    def add_plan(self, plan: PricePlan) -> PricePlan:
        """Add a price plan. Booked entries keep their price.

        Raises:
            PlanError: the name is in use, or the plan ends before it begins.
        """
        if plan.valid_until_us is not None and plan.valid_until_us <= plan.valid_from_us:
            raise PlanError(f"plan {plan.name} ends before it begins")
        with self._db.writing() as c:
            if c.scalar(select(plans.c.id).where(plans.c.name == plan.name)) is not None:
                raise PlanError(
                    f"plan {plan.name} exists already, and plans cannot change; add a plan with another name"
                )
            number = (c.scalar(select(func.max(plans.c.id))) or PLAIN.id) + 1
            made = plan.model_copy(update={"id": number})
            c.execute(insert(plans).values(**made.model_dump(exclude={"schema_version"})))
        return made

    def set_budget(self, budget: Budget) -> None:
        """Set a tenant's budget."""
        values = asdict(budget)
        with self._db.writing() as c:
            statement = _INSERT[c.dialect.name](budgets).values(**values)
            c.execute(statement.on_conflict_do_update(index_elements=["tenant"], set_=values))

    # -- statements --------------------------------------------------------------------------------------------------

    def make_statement(self, tenant: str, now_us: int) -> tuple[Statement, bool]:
        """Make a statement of all the tenant's entries that no statement covers. Returns the statement, and whether it is new.

        Raises:
            StatementError: the tenant has no entry.
        """
        with self._db.writing() as c:
            last = c.execute(
                select(statements).where(statements.c.tenant == tenant).order_by(statements.c.number.desc()).limit(1)
            ).first()
            first = last.last_entry + 1 if last is not None else 1
            mine = (entries.c.tenant == tenant) & (entries.c.id >= first)
            until = c.scalar(select(func.max(entries.c.id)).where(mine))
            if until is None:
                if last is None:
                    raise StatementError(f"tenant {tenant} has no booked usage, so there is no statement")
                return Statement.model_validate_json(last.body), False
            sums = [func.sum(entries.c[name]).label(name) for name in _QUANTITIES]
            of_run = [entries.c.session_id, entries.c.model]
            query = (
                select(
                    *of_run,
                    func.min(entries.c.begin_us).label("began_us"),
                    func.max(entries.c.end_us).label("until_us"),
                    func.count().label("entries"),
                    *sums,
                )
                .where(mine)
                .group_by(*of_run)
                .order_by(func.min(entries.c.id))
            )
            rows = c.execute(query).all()
            lines = [_line(tenant, row) for row in rows[:LINES]]
            if len(rows) > LINES:
                lines.append(_rest(tenant, [_line(tenant, row) for row in rows[LINES:]]))
            statement = Statement(
                tenant=tenant,
                number=(last.number if last is not None else 0) + 1,
                first_entry=first,
                last_entry=int(until),
                entries=sum([int(row.entries) for row in rows]),
                made_us=now_us,
                core_ucr=sum([line.core_ucr for line in lines]),
                vram_ucr=sum([line.vram_ucr for line in lines]),
                lines=tuple(lines),
                previous=last.digest if last is not None else "",
            )
            statement = statement.model_copy(update={"digest": digest_of(statement)})
            c.execute(
                insert(statements).values(
                    tenant=tenant,
                    number=statement.number,
                    first_entry=statement.first_entry,
                    last_entry=statement.last_entry,
                    made_us=now_us,
                    body=statement.model_dump_json(),
                    digest=statement.digest,
                )
            )
            return statement, True


def digest_of(statement: Statement) -> str:
    """SHA-256, in hex, over all fields of a statement except its digest."""
    return hashlib.sha256(statement.model_dump_json(exclude={"digest"}).encode()).hexdigest()


def _line(tenant: str, row: Any) -> CreditsRow:
    amounts: dict[str, Any] = {name: int(getattr(row, name)) for name in _QUANTITIES}
    return CreditsRow(
        tenant=tenant, name=row.session_id, model=row.model, began_us=row.began_us, until_us=row.until_us, **amounts
    )


def _rest(tenant: str, lines: list[CreditsRow]) -> CreditsRow:
    amounts: dict[str, Any] = {name: sum([getattr(line, name) for line in lines]) for name in _QUANTITIES}
    return CreditsRow(
        tenant=tenant,
        name=f"{len(lines)} further runs",
        began_us=min([line.began_us for line in lines]),
        until_us=max([line.until_us for line in lines]),
        **amounts,
    )


def _next_entry(c: Connection) -> int:
    """The next entry's number. The writer's lock protects it, so numbers have no gaps, and later entries have higher numbers."""
    return (c.scalar(select(func.max(entries.c.id))) or 0) + 1


def _known_sources(c: Connection, names: Iterable[str]) -> dict[str, Source]:
    found: dict[str, Source] = {}
    wanted = sorted(names)
    for at in range(0, len(wanted), 500):
        rows = c.execute(select(sources).where(sources.c.name.in_(wanted[at : at + 500])))
        found.update({row.name: Source(row.id, row.batch) for row in rows})
    return found


def _watched(c: Connection, events: Sequence[UsageRecorded]) -> dict[ProcessKey, RunState]:
    """The runs of these events whose totals a journal states now, or stated before."""
    by_journal = {
        key for event in events if event.whole for record in event.records for key in known_under(record, event)
    }
    told = {}
    if by_journal or c.execute(select(ahead.c.at_us).limit(1)).first() is not None:
        among = {key for event in events for record in event.records for key in known_under(record, event)}
        names = sorted({session for session, _, _ in among})
        for at in range(0, len(names), 500):
            for row in c.execute(select(ahead).where(ahead.c.session_id.in_(names[at : at + 500]))):
                key = row.session_id, row.executor_id, row.process
                if key in among:
                    told[key] = row
    watched = {}
    for key in sorted(by_journal | told.keys()):
        run = watched[key] = _booked(c, key) if key in by_journal else RunState()
        if key in told:
            run.ahead_gpu_ns, run.ahead_core_ns = int(told[key].gpu_ns), int(told[key].core_ns)
    return watched


def _booked(c: Connection, key: ProcessKey) -> RunState:
    """What is booked of a run in one process, or in all processes of an executor."""
    session, executor, process = key
    run = RunState()
    of_executor = (entries.c.session_id == session) & (entries.c.executor_id == executor) & (entries.c.kind == USAGE)
    if process:
        named = (sources.c.name == process) | sources.c.name.startswith(f"journal/{process}.", autoescape=True)
        of_process = of_executor & entries.c.source_id.in_(select(sources.c.id).where(named))
        booked = c.execute(select(func.sum(entries.c.gpu_ns), func.sum(entries.c.core_ns)).where(of_process)).first()
        run.last = _last_usage(c, of_process) or _last_usage(c, of_executor)
    else:
        of_run = (runs.c.session_id == session) & (runs.c.executor_id == executor)
        booked = c.execute(select(runs.c.gpu_ns, runs.c.core_ns).where(of_run)).first()
        run.last = _last_usage(c, of_executor)
    if booked is not None:
        run.gpu_ns, run.core_ns = (int(each or 0) for each in booked)
    return run


def _last_usage(c: Connection, among: ColumnElement[bool]) -> LastUsage | None:
    facts = [entries.c[name] for name in LastUsage._fields]
    last = c.execute(select(*facts).where(among).order_by(entries.c.id.desc()).limit(1)).first()
    return None if last is None else LastUsage(*last)


def _paid(c: Connection, events: Sequence[UsageRecorded]) -> dict[DeviceKey, dict[int, int]]:
    """Of the sessions in these events: what `LostWork.paid` has."""
    found: dict[DeviceKey, dict[int, int]] = {}
    if c.execute(select(paid_repeats.c.at_us).limit(1)).first() is None:
        return found
    names = sorted({r.session_id for event in events for r in event.records})
    for at in range(0, len(names), 500):
        for row in c.execute(select(paid_repeats).where(paid_repeats.c.session_id.in_(names[at : at + 500]))):
            found.setdefault((row.session_id, row.part), {})[row.epoch] = int(row.core_ns)
    return found


def _lost_work(
    c: Connection, events: Sequence[UsageRecorded], paid_before: Mapping[DeviceKey, dict[int, int]]
) -> dict[DeviceKey, LostWork]:
    """The lost work of the devices whose records in these events repeat work, or come after such records were billed
    (`paid_before`), by the entries since their newest checkpoint.
    """
    found = {}
    repeating = [(r, e) for e in events for r in e.records if r.repeats_core_ns > 0]
    devices = {(r.session_id, r.part) for r, e in repeating if not impossible(r, e)}
    if paid_before:
        late = {(r.session_id, 0 if e.whole else r.epoch) for e in events for r in e.records}
        devices |= {key for key, paid in paid_before.items() for s, epoch in late if s == key[0] and epoch < max(paid)}
    for session, part in sorted(devices):
        mine = (entries.c.session_id == session) & (entries.c.part == part) & (entries.c.kind == USAGE)
        stored = select(entries.c.id).where(mine & entries.c.unsaved_core_ns.is_not(None))
        saved = stored.order_by(entries.c.epoch.desc(), entries.c.id.desc()).limit(1)
        rows = c.execute(
            select(entries.c.epoch, entries.c.core_ns, entries.c.repeated_core_ns, entries.c.unsaved_core_ns)
            .where(mine & (entries.c.id >= (c.scalar(saved) or 0)))
            .order_by(entries.c.id)
        )
        lost = found[session, part] = LostWork()
        for row in rows:
            lost.booked(*row)
        lost.paid = dict(paid_before.get((session, part), {}))
    return found


def _write_paid(c: Connection, lost: Mapping[DeviceKey, LostWork], now_us: int) -> None:
    """Store the repeated work that was billed, for as long as usage of the lost work may still arrive."""
    rows = [
        {"session_id": session, "part": part, "epoch": epoch, "core_ns": ns, "at_us": now_us}
        for (session, part), work in sorted(lost.items())
        for epoch, ns in sorted(work.paid.items())
    ]
    if rows:
        statement = _INSERT[c.dialect.name](paid_repeats)
        changes = {name: statement.excluded[name] for name in ("core_ns", "at_us")}
        keys = ["session_id", "part", "epoch"]
        c.execute(statement.on_conflict_do_update(index_elements=keys, set_=changes), rows)
        c.execute(
            delete(paid_repeats).where((paid_repeats.c.at_us < now_us - AHEAD_KEPT_US) | (paid_repeats.c.core_ns == 0))
        )


def _write_ahead(c: Connection, watched: dict[ProcessKey, RunState], now_us: int) -> None:
    """Store the usage that was booked from journals, for as long as its usage records may still arrive."""
    rows = [
        {
            "session_id": session,
            "executor_id": executor,
            "process": process,
            "gpu_ns": run.ahead_gpu_ns,
            "core_ns": run.ahead_core_ns,
            "at_us": now_us,
        }
        for (session, executor, process), run in sorted(watched.items())
    ]
    if rows:
        statement = _INSERT[c.dialect.name](ahead)
        changes = {name: statement.excluded[name] for name in ("gpu_ns", "core_ns", "at_us")}
        keys = ["session_id", "executor_id", "process"]
        c.execute(statement.on_conflict_do_update(index_elements=keys, set_=changes), rows)
        c.execute(delete(ahead).where(ahead.c.at_us < now_us - AHEAD_KEPT_US))


def _write_sources(c: Connection, booking: Booking) -> None:
    new = [
        {"id": number, "name": name, "batch": batch}
        for name, (number, batch) in booking.sources.items()
        if name in booking.new_sources
    ]
    if new:
        c.execute(insert(sources), new)
    for name, (number, batch) in booking.sources.items():
        if name not in booking.new_sources:
            c.execute(update(sources).where(sources.c.id == number).values(batch=batch))


def _write_quarantine(c: Connection, found: Iterable[Quarantined], now_us: int) -> list[int]:
    ids = []
    for q in found:
        made = c.execute(insert(quarantine).values(**{s: getattr(q, s) for s in Quarantined.__slots__}, at_us=now_us))
        assert made.inserted_primary_key is not None
        ids.append(int(made.inserted_primary_key[0]))
    return ids


def _copy(c: Connection, rows: list[Entry]) -> None:
    """Insert many rows with PostgreSQL's COPY."""
    driver: Any = c.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY entries ({', '.join(COLUMNS)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _add(c: Connection, table: Table, rows: list[dict[str, Any]], is_sqlite: bool) -> None:
    """Insert sums, or add them to existing rows. The facts of a run are merged."""
    statement = _INSERT[c.dialect.name](table)
    new = statement.excluded
    changes: dict[str, Any] = {name: table.c[name] + new[name] for name in SUMS}
    if table is runs:
        least, most = (func.min, func.max) if is_sqlite else (func.least, func.greatest)
        changes["began_us"] = least(table.c.began_us, new.began_us)
        changes["until_us"] = most(table.c.until_us, new.until_us)
        changes["ended"] = case(  # as `RunSum.widen`
            (new.until_us > table.c.until_us, new.ended),
            (new.until_us == table.c.until_us, or_(table.c.ended, new.ended)),
            else_=table.c.ended,
        )
    keys = [column.name for column in table.primary_key]
    c.execute(statement.on_conflict_do_update(index_elements=keys, set_=changes), rows)
