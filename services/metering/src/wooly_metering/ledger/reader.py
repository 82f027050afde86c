"""All queries of the ledger. They change nothing."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, case, func, literal, literal_column, or_, select
from wooly_wis.credits import (
    CreditsRequest,
    CreditsRow,
    EntriesRequest,
    LedgerEntry,
    PricePlan,
    QuarantinedUsage,
    QuarantineRequest,
    Statement,
)
from wooly_wis.messages.sessions import GANG_ID_CHARS, GANG_MARK, PEER_MARK

from wooly_metering.core.booking import COLUMNS, SUMS, USAGE
from wooly_metering.core.budgets import Budget, period_begin_us
from wooly_metering.ledger.database import Database
from wooly_metering.ledger.tables import budgets, entries, hours, plans, quarantine, runs, statements

_QUANTITIES = SUMS[1:]
_SHOWN = tuple(
    name for name in COLUMNS if name not in ("source_id", "batch", "item", "kind", "part", "epoch", "unsaved_core_ns")
)
#: Approximate size, in bytes, of the statements in one reply.
STATEMENT_BYTES = 600_000


class Reader:
    """Reads one database."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # -- credits -----------------------------------------------------------------------------------------------------

    def totals(self, tenant: str = "") -> tuple[int, int]:
        """All booked core and VRAM credits, of a tenant or of all tenants."""
        query = select(func.sum(hours.c.core_ucr), func.sum(hours.c.vram_ucr))
        if tenant:
            query = query.where(hours.c.tenant == tenant)
        with self._db.reading() as c:
            core, vram = c.execute(query).one()
        return int(core or 0), int(vram or 0)

    def by_tenant(self) -> dict[str, dict[str, int]]:
        """All sums, per tenant."""
        query = select(hours.c.tenant, *[func.sum(hours.c[n]).label(n) for n in SUMS]).group_by(hours.c.tenant)
        with self._db.reading() as c:
            return {row.tenant: {n: int(getattr(row, n)) for n in SUMS} for row in c.execute(query)}

    def rows(self, request: CreditsRequest) -> tuple[list[CreditsRow], bool]:
        """The rows of a request, and whether further rows exist."""
        query = self._by_run(request) if request.by == "run" or request.session_id else self._by_hour(request)
        query = query.offset(request.offset).limit(request.limit + 1)
        with self._db.reading() as c:
            found = [_row(row) for row in c.execute(query)]
        return found[: request.limit], len(found) > request.limit

    def _by_run(self, request: CreditsRequest) -> Select[Any]:
        """One row per run. A run may use several executors, and the ranks of a gang are one run. It has ended when it has ended
        on all executors.
        """
        began, until = func.min(runs.c.began_us), func.max(runs.c.until_us)
        # Constants, because two parameters would not count as the same expression.
        is_part = or_(
            *[
                runs.c.session_id.like(literal_column(f"'{'_' * GANG_ID_CHARS}{mark}%'"))
                for mark in (GANG_MARK, PEER_MARK)
            ]
        )
        whole = func.substr(runs.c.session_id, literal_column("1"), literal_column(str(GANG_ID_CHARS)))
        name = case((is_part, whole), else_=runs.c.session_id)
        keys = name, runs.c.tenant, runs.c.model
        query = (
            select(
                runs.c.tenant,
                name.label("name"),
                runs.c.model,
                began.label("began_us"),
                until.label("until_us"),
                (func.count() == func.count().filter(runs.c.ended)).label("ended"),
                *[func.sum(runs.c[n]).label(n) for n in _QUANTITIES],
            )
            .group_by(*keys)
            .order_by(began.desc(), name)
        )
        if request.session_id:
            query = query.where(or_(runs.c.session_id == request.session_id, name == request.session_id))
        if request.tenant:
            query = query.where(runs.c.tenant == request.tenant)
        if request.since_us:
            query = query.where(runs.c.until_us >= request.since_us)
        if request.until_us is not None:
            query = query.where(runs.c.began_us < request.until_us)
        return query

    def _by_hour(self, request: CreditsRequest) -> Select[Any]:
        by_model = request.by == "model"
        name = hours.c.model if by_model else hours.c.hour_us
        query = (
            select(
                hours.c.tenant,
                name.label("name"),
                (name if by_model else literal("")).label("model"),
                func.min(hours.c.hour_us).label("began_us"),
                func.max(hours.c.hour_us).label("until_us"),
                *[func.sum(hours.c[n]).label(n) for n in _QUANTITIES],
            )
            .group_by(hours.c.tenant, name)
            .order_by(func.max(hours.c.hour_us).desc(), name, hours.c.tenant)
        )
        if request.tenant:
            query = query.where(hours.c.tenant == request.tenant)
        if request.since_us:
            query = query.where(hours.c.hour_us >= request.since_us)
        if request.until_us is not None:
            query = query.where(hours.c.hour_us < request.until_us)
        return query

    def open_runs(self) -> list[tuple[str, str, str, int]]:
        """(session, executor, tenant, time of the last booked usage) of runs whose end is not booked."""
        with self._db.reading() as c:
            query = select(runs.c.session_id, runs.c.executor_id, runs.c.tenant, runs.c.until_us).where(
                runs.c.ended.is_(False)
            )
            return [(row.session_id, row.executor_id, row.tenant, row.until_us) for row in c.execute(query)]

    # -- budgets and plans -------------------------------------------------------------------------------------------

    def budgets(self, tenant: str = "") -> list[Budget]:
        """All budgets, or a tenant's."""
        query = select(budgets).order_by(budgets.c.tenant)
        if tenant:
            query = query.where(budgets.c.tenant == tenant)
        with self._db.reading() as c:
            return [Budget(**row._mapping) for row in c.execute(query)]

    def spent(self, budget: Budget, now_us: int) -> int:
        """The tenant's spending in the budget's current period: core and VRAM credits together."""
        query = (
            select(func.sum(hours.c.core_ucr), func.sum(hours.c.vram_ucr))
            .where(hours.c.tenant == budget.tenant)
            .where(hours.c.hour_us >= period_begin_us(budget.period, now_us))
        )
        with self._db.reading() as c:
            core, vram = c.execute(query).one()
        return int(core or 0) + int(vram or 0)

    def plans(self) -> list[PricePlan]:
        """All price plans, oldest first."""
        with self._db.reading() as c:
            return [PricePlan(**row._mapping) for row in c.execute(select(plans).order_by(plans.c.id))]

    # -- entries, statements, quarantine -----------------------------------------------------------------------------

    def entries(self, request: EntriesRequest) -> tuple[list[LedgerEntry], bool]:
        """Entries, ordered by number, and whether further entries exist."""
        query = select(entries).where(entries.c.id > request.after).order_by(entries.c.id).limit(request.limit + 1)
        if request.tenant:
            query = query.where(entries.c.tenant == request.tenant)
        if request.session_id:
            query = query.where(entries.c.session_id == request.session_id)
        with self._db.reading() as c:
            found = [
                LedgerEntry(kind="usage" if row.kind == USAGE else "correction", **{n: getattr(row, n) for n in _SHOWN})
                for row in c.execute(query)
            ]
        return found[: request.limit], len(found) > request.limit

    def statements(self, tenant: str, after: int = 0) -> tuple[list[Statement], bool]:
        """A tenant's statements, as many as fit into one message, and whether further statements exist."""
        query = (
            select(statements.c.body)
            .where(statements.c.tenant == tenant)
            .where(statements.c.number > after)
            .order_by(statements.c.number)
        )
        found: list[Statement] = []
        size = 0
        with self._db.reading() as c:
            for row in c.execute(query):
                size += len(row.body)
                if found and size > STATEMENT_BYTES:
                    return found, True
                found.append(Statement.model_validate_json(row.body))
        return found, False

    def quarantined(self, request: QuarantineRequest) -> tuple[list[QuarantinedUsage], bool]:
        """Quarantined usage, and whether there is more."""
        query = (
            select(quarantine).where(quarantine.c.id > request.after).order_by(quarantine.c.id).limit(request.limit + 1)
        )
        found: list[QuarantinedUsage] = []
        size = 0
        with self._db.reading() as c:
            for row in c.execute(query):
                size += len(row.payload) + 256
                if len(found) == request.limit or (found and size > STATEMENT_BYTES):
                    return found, True
                found.append(QuarantinedUsage(**row._mapping))
        return found, False

    def quarantine_count(self) -> int:
        """Number of records and messages in quarantine."""
        with self._db.reading() as c:
            return int(c.scalar(select(func.count()).select_from(quarantine)) or 0)


def _row(row: Any) -> CreditsRow:
    amounts: dict[str, Any] = {n: int(getattr(row, n)) for n in _QUANTITIES}
    return CreditsRow(
        tenant=row.tenant,
        name=str(row.name),
        model=row.model,
        began_us=int(row.began_us),
        until_us=int(row.until_us),
        ended=bool(getattr(row, "ended", False)),
        **amounts,
    )
