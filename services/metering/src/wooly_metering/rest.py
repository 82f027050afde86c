"""REST under `/api/v1/credits`, and `/metrics`: the same messages as over NATS."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from wooly_bus.errors import RefusedError
from wooly_wis.credits import (
    AddPlanRequest,
    BudgetState,
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
    StatementsReply,
    StatementsRequest,
)

from wooly_metering.actor import MeteringActor

PREFIX = "/api/v1/credits"
_STATUS = {"metering.plan": 409, "metering.correction": 409, "metering.statement": 404}


def create_rest(actor: MeteringActor, registry: CollectorRegistry) -> FastAPI:
    """The application."""
    api = FastAPI(title="Wooly Credits", version="1")

    @api.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        content = {"code": error.code, "message": str(error), "retryable": error.retryable}
        return JSONResponse(content, _STATUS.get(error.code, 409))

    @api.get(PREFIX)
    async def credits(
        tenant: str = "",
        by: Literal["run", "model", "hour"] = "run",
        since_us: int = 0,
        until_us: int | None = None,
        offset: int = 0,
        limit: int = 100,
    ) -> CreditsReply:
        """Sums by run, model or hour, totals and budgets."""
        request = CreditsRequest(tenant=tenant, by=by, since_us=since_us, until_us=until_us, offset=offset, limit=limit)
        return await actor.on_credits(request)

    @api.get(PREFIX + "/runs/{session_id}")
    async def run(session_id: str, settled: bool = False) -> CreditsReply:
        """One run."""
        return await actor.on_credits(CreditsRequest(session_id=session_id, settled=settled))

    @api.put(PREFIX + "/budgets/{tenant}")
    async def budget(tenant: str, body: SetBudgetRequest) -> BudgetState:
        """A tenant's budget from now on."""
        return await actor.on_set_budget(body.model_copy(update={"tenant": tenant}))

    @api.get(PREFIX + "/plans")
    async def plans() -> PlansReply:
        """All price plans."""
        return await actor.on_plans(PlansRequest())

    @api.post(PREFIX + "/plans", status_code=201)
    async def add_plan(body: PricePlan) -> PricePlan:
        """A further price plan."""
        return await actor.on_add_plan(AddPlanRequest(plan=body))

    @api.get(PREFIX + "/entries")
    async def entries(
        tenant: str = "", session_id: str | None = None, after: int = 0, limit: int = 100
    ) -> EntriesReply:
        """Entries of the ledger, in their order."""
        return await actor.on_entries(EntriesRequest(tenant=tenant, session_id=session_id, after=after, limit=limit))

    @api.post(PREFIX + "/corrections", status_code=201)
    async def correct(body: CorrectEntryRequest) -> LedgerEntry:
        """Take credits back by a counter-entry."""
        return await actor.on_correct_entry(body)

    @api.get(PREFIX + "/statements/{tenant}")
    async def statements(tenant: str, after: int = 0) -> StatementsReply:
        """A tenant's statements."""
        return await actor.on_statements(StatementsRequest(tenant=tenant, after=after))

    @api.post(PREFIX + "/statements/{tenant}")
    async def make_statement(tenant: str) -> Statement:
        """Bill what has no statement yet."""
        return await actor.on_make_statement(MakeStatementRequest(tenant=tenant))

    @api.get(PREFIX + "/quarantine")
    async def quarantine(after: int = 0, limit: int = 100) -> QuarantineReply:
        """What could not be booked, and why."""
        return await actor.on_quarantine(QuarantineRequest(after=after, limit=limit))

    @api.get("/healthz")
    async def healthz() -> dict[str, int]:
        """That it lives, and what it booked since its start."""
        return {"entries": actor.entries, "quarantined": actor.quarantined}

    @api.get("/metrics")
    def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return api
