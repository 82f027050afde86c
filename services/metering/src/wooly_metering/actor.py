"""Metering's front: books the stream, replies to requests over NATS, publishes events about budgets, statements and
quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import sqlalchemy.exc
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_bus.limited_log import first_line
from wooly_wis.credits import (
    AddPlanRequest,
    BudgetState,
    CheckBudgetReply,
    CheckBudgetRequest,
    CorrectEntryRequest,
    CreditsReply,
    CreditsRequest,
    EntriesReply,
    EntriesRequest,
    LedgerEntry,
    MakeStatementRequest,
    PlansReply,
    PlansRequest,
    PricePlan,
    QuarantineReply,
    QuarantineRequest,
    SetBudgetRequest,
    Statement,
    StatementMade,
    StatementsReply,
    StatementsRequest,
    UsageQuarantined,
)

from wooly_metering.core.budgets import Budget
from wooly_metering.enforcement import Enforcer, refusal_reason
from wooly_metering.errors import MeteringError
from wooly_metering.ledger.database import Database
from wooly_metering.ledger.reader import Reader
from wooly_metering.ledger.writer import Booked, Writer

log = logging.getLogger("wooly.metering")
#: Seconds that a request waits for the last usage of a run.
SETTLE_S = 2.0
#: Seconds after which budgets that could not be read are read again.
RETRY_S = 1.0
#: Maximum number of rows in one reply, so that the reply fits into a message.
ROWS = 1000


class MeteringActor:
    """Answers requests from the ledger. The ledger has all state, so any number of processes may run.

    Args:
        app: the connection to NATS.
        database: the ledger.
        clock: returns seconds since 1970.
    """

    def __init__(self, app: ServiceApp, database: Database, clock: Callable[[], float] = time.time) -> None:
        self.reader, self.writer = Reader(database), Writer(database)
        self.enforcer = Enforcer(app, self.reader)
        self.entries = self.duplicates = self.quarantined = 0
        self._app, self._clock = app, clock
        self._ended = asyncio.Event()
        self._spent: set[str] = set()
        self._due = asyncio.Event()
        app.serve(contracts.METERING_CREDITS_SHOW, self.on_credits)
        app.serve(contracts.METERING_BUDGET_SET, self.on_set_budget)
        app.serve(contracts.METERING_BUDGET_CHECK, self.on_check_budget)
        app.serve(contracts.METERING_PLAN_ADD, self.on_add_plan)
        app.serve(contracts.METERING_PLAN_LIST, self.on_plans)
        app.serve(contracts.METERING_ENTRY_LIST, self.on_entries)
        app.serve(contracts.METERING_ENTRY_CORRECT, self.on_correct_entry)
        app.serve(contracts.METERING_STATEMENT_MAKE, self.on_make_statement)
        app.serve(contracts.METERING_STATEMENT_LIST, self.on_statements)
        app.serve(contracts.METERING_QUARANTINE_LIST, self.on_quarantine)
        app.serve_tenants(contracts.METERING_CREDITS_SHOW, self.on_credits_of)

    def now_us(self) -> int:
        """Microseconds since 1970."""
        return int(self._clock() * 1e6)

    async def on_booked(self, booked: Booked) -> None:
        """Process the result of a committed transaction."""
        self.entries += booked.entries
        self.duplicates += booked.duplicates
        self.quarantined += len(booked.quarantined)
        self.enforcer.note_runs(booked.runs)
        if any(ended for *_, ended in booked.runs):
            self._ended.set()
            self._ended = asyncio.Event()
        self._spent |= booked.tenants
        self._due.set()
        for number, reason in booked.quarantined:
            await self._app.publish(
                contracts.METERING_USAGE_QUARANTINED, UsageQuarantined(id=number, reason=reason[:1024])
            )

    async def watch(self, every_s: float) -> None:
        """Check the budgets of tenants after their usage is booked, and all budgets every `every_s`, without end. Booking does
        not wait.
        """
        while True:
            try:
                await self.enforcer.begin(self.now_us())
                break
            except sqlalchemy.exc.SQLAlchemyError as e:
                await self._later(e)
        looked = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), every_s)
            self._due.clear()
            spent, self._spent = self._spent, set()
            everybody = time.monotonic() - looked >= every_s
            try:
                await self.enforcer.look(None if everybody else frozenset(spent), self.now_us())
            except sqlalchemy.exc.SQLAlchemyError as e:
                self._spent |= spent
                await self._later(e)
            if everybody:
                looked = time.monotonic()

    @staticmethod
    async def _later(error: sqlalchemy.exc.SQLAlchemyError) -> None:
        log.warning("budgets cannot be read: %s; metering tries again", first_line(error))
        await asyncio.sleep(RETRY_S)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def on_credits(self, request: CreditsRequest) -> CreditsReply:
        """Booked credits."""
        if request.settled and request.session_id:
            await self._settled(request)
        return await asyncio.to_thread(self._credits, request)

    async def on_credits_of(self, request: CreditsRequest, tenant: str) -> CreditsReply:
        """Booked credits of a tenant."""
        if request.tenant not in ("", "default", tenant):
            raise RefusedError("metering.forbidden", f"these credentials do not belong to tenant {request.tenant}")
        return await self.on_credits(request.model_copy(update={"tenant": tenant}))

    async def _settled(self, request: CreditsRequest) -> None:
        until = time.monotonic() + SETTLE_S
        while True:
            ended = self._ended
            rows, _ = await asyncio.to_thread(self.reader.rows, request)
            left = until - time.monotonic()
            if (rows and rows[0].ended) or left <= 0:
                return
            try:  # check again regularly, because another process may book the usage
                await asyncio.wait_for(ended.wait(), min(left, 0.2))
            except TimeoutError:
                continue

    def _credits(self, request: CreditsRequest) -> CreditsReply:
        rows, more = self.reader.rows(request)
        core, vram = self.reader.totals(request.tenant)
        return CreditsReply(
            core_ucr=core,
            vram_ucr=vram,
            quarantined=self.reader.quarantine_count(),
            budgets=tuple([self._state(b) for b in self.reader.budgets(request.tenant)[:ROWS]]),
            rows=tuple(rows),
            more=more,
        )

    def _state(self, budget: Budget) -> BudgetState:
        spent = self.reader.spent(budget, self.now_us())
        return BudgetState(
            tenant=budget.tenant,
            period=budget.period,  # type: ignore[arg-type]  # the database holds what the model allowed
            soft_ucr=budget.soft_ucr,
            hard_ucr=budget.hard_ucr,
            spent_ucr=spent,
            held=budget.held(spent),
        )

    async def on_set_budget(self, request: SetBudgetRequest) -> BudgetState:
        """Set a tenant's budget. The tenant's sessions are held or resumed before the reply."""
        budget = Budget(request.tenant, request.period, request.soft_ucr, request.hard_ucr)
        await asyncio.to_thread(self.writer.set_budget, budget)
        await self.enforcer.look(None, self.now_us())
        return await asyncio.to_thread(self._state, budget)

    async def on_check_budget(self, request: CheckBudgetRequest) -> CheckBudgetReply:
        """Check whether a tenant has credits left for another session."""
        return await asyncio.to_thread(self._check_budget, request.tenant)

    def _check_budget(self, tenant: str) -> CheckBudgetReply:
        for budget in self.reader.budgets(tenant):
            spent = self.reader.spent(budget, self.now_us())
            if budget.held(spent):
                return CheckBudgetReply(refusal=refusal_reason(budget, spent))
        return CheckBudgetReply()

    async def on_add_plan(self, request: AddPlanRequest) -> PricePlan:
        """Add a price plan."""
        try:
            return await asyncio.to_thread(self.writer.add_plan, request.plan)
        except MeteringError as e:
            raise RefusedError(e.code, str(e)) from e

    async def on_plans(self, request: PlansRequest) -> PlansReply:
        """All price plans."""
        return PlansReply(plans=tuple(await asyncio.to_thread(self.reader.plans)))

    async def on_entries(self, request: EntriesRequest) -> EntriesReply:
        """Entries of the ledger."""
        found, more = await asyncio.to_thread(self.reader.entries, request)
        return EntriesReply(entries=tuple(found), more=more)

    async def on_correct_entry(self, request: CorrectEntryRequest) -> LedgerEntry:
        """Take back credits with a counter-entry."""
        try:
            number = await asyncio.to_thread(
                self.writer.correct,
                request.request_id,
                request.entry,
                request.core_ucr,
                request.vram_ucr,
                request.reason,
                self.now_us(),
            )
        except MeteringError as e:
            raise RefusedError(e.code, str(e)) from e
        found, _ = await asyncio.to_thread(self.reader.entries, EntriesRequest(after=number - 1, limit=1))
        await self.enforcer.look(frozenset([found[0].tenant]), self.now_us())
        return found[0]

    async def on_make_statement(self, request: MakeStatementRequest) -> Statement:
        """Make a statement of all usage that no statement covers."""
        try:
            made, new = await asyncio.to_thread(self.writer.make_statement, request.tenant, self.now_us())
        except MeteringError as e:
            raise RefusedError(e.code, str(e)) from e
        if new:
            event = StatementMade(
                tenant=made.tenant,
                number=made.number,
                core_ucr=made.core_ucr,
                vram_ucr=made.vram_ucr,
                digest=made.digest,
            )
            await self._app.publish(contracts.METERING_STATEMENT_MADE, event)
        return made

    async def on_statements(self, request: StatementsRequest) -> StatementsReply:
        """A tenant's statements."""
        found, more = await asyncio.to_thread(self.reader.statements, request.tenant, request.after)
        return StatementsReply(statements=tuple(found), more=more)

    async def on_quarantine(self, request: QuarantineRequest) -> QuarantineReply:
        """Usage that could not be booked."""
        found, more = await asyncio.to_thread(self.reader.quarantined, request)
        return QuarantineReply(found=tuple(found), more=more)
