"""REST under `/api/v1/credits`, and `/metrics`. REST has the same messages as NATS, for callers that `access` admits.

`/metrics` and `/healthz` require the scraper's token if one is set, and otherwise no token.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.http_front import Front, Rule
from wooly_bus.http_listener import HttpSettings
from wooly_bus.limited_log import LimitedLog, first_line
from wooly_bus.web import shows
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
from wooly_wis.messages import CheckTokenReply

from wooly_metering.access import Access, needs, tenant_of
from wooly_metering.actor import MeteringActor
from wooly_metering.ledger.database import DATABASE_AWAY, DATABASE_AWAY_TEXT, UNREACHABLE

log = logging.getLogger("wooly.metering")
PREFIX = "/api/v1/credits"
#: Seconds after which a client may try again what failed because it asked too often (429), or because another part does not
#: answer (503).
RETRY_S = 1
#: HTTP status of a refusal, by error code. Other codes have the status 409 (conflict).
_STATUS = {
    "router.unauthorized": 401,
    "router.forbidden": 403,
    "metering.statement": 404,
    "metering.too_large": 413,
    "metering.too_many": 429,
    "metering.limit": 429,
    "metering.no_router": 503,
}
Reader = Annotated[CheckTokenReply, Depends(needs("read"))]
Overseer = Annotated[CheckTokenReply, Depends(needs("read", everybody=True))]
Writer = Annotated[CheckTokenReply, Depends(needs("write"))]
Of = Annotated[str, Query(max_length=128, pattern=r"^[^\x00]*$")]
Moment = Annotated[int, Query(ge=0, lt=1 << 62)]
Count = Annotated[int, Query(ge=1, le=1000)]


def create_rest(actor: MeteringActor, registry: CollectorRegistry, access: Access, scraper: str = "") -> FastAPI:
    """The application. `scraper`: the token that `/metrics` and `/healthz` require; empty: no token."""

    async def scraping(request: Request) -> None:
        if scraper and not shows(request.headers.get("authorization", ""), scraper):
            raise RefusedError(
                "router.unauthorized", "a valid bearer token is required; see WOOLY_METERING_METRICS_TOKEN"
            )

    api = FastAPI(title="Wooly Credits", version="1", docs_url=None, redoc_url=None)
    api.state.access = access
    _errors(api)

    @api.get(PREFIX)
    async def credits(
        caller: Reader,
        tenant: Of = "",
        by: Literal["run", "model", "hour"] = "run",
        since_us: Moment = 0,
        until_us: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
        offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
        limit: Count = 100,
    ) -> CreditsReply:
        """Sums by run, model or hour, totals and budgets."""
        tenant = tenant_of(caller, tenant)
        request = CreditsRequest(tenant=tenant, by=by, since_us=since_us, until_us=until_us, offset=offset, limit=limit)
        return await actor.on_credits(request)

    @api.get(PREFIX + "/runs/{session_id}")
    async def run(caller: Reader, session_id: str, settled: bool = False) -> CreditsReply:
        """One run."""
        ask = CreditsRequest(tenant=tenant_of(caller, ""), session_id=session_id, settled=settled)
        return await actor.on_credits(ask)

    @api.put(PREFIX + "/budgets/{tenant}")
    async def budget(caller: Writer, tenant: str, body: SetBudgetRequest) -> BudgetState:
        """Set a tenant's budget."""
        return await actor.on_set_budget(body.model_copy(update={"tenant": tenant_of(caller, tenant)}))

    @api.get(PREFIX + "/plans")
    async def plans(caller: Reader) -> PlansReply:
        """All price plans."""
        return await actor.on_plans(PlansRequest())

    @api.post(PREFIX + "/plans", status_code=201)
    async def add_plan(caller: Writer, body: PricePlan) -> PricePlan:
        """Add a price plan."""
        return await actor.on_add_plan(AddPlanRequest(plan=body))

    @api.get(PREFIX + "/entries")
    async def entries(
        caller: Reader, tenant: Of = "", session_id: Of | None = None, after: Moment = 0, limit: Count = 100
    ) -> EntriesReply:
        """Entries of the ledger, ordered by number."""
        tenant = tenant_of(caller, tenant)
        return await actor.on_entries(EntriesRequest(tenant=tenant, session_id=session_id, after=after, limit=limit))

    @api.post(PREFIX + "/corrections", status_code=201)
    async def correct(caller: Writer, body: CorrectEntryRequest) -> LedgerEntry:
        """Take back credits with a counter-entry."""
        return await actor.on_correct_entry(body)

    @api.get(PREFIX + "/statements/{tenant}")
    async def statements(caller: Reader, tenant: str, after: Moment = 0) -> StatementsReply:
        """A tenant's statements."""
        return await actor.on_statements(StatementsRequest(tenant=tenant_of(caller, tenant), after=after))

    @api.post(PREFIX + "/statements/{tenant}")
    async def make_statement(caller: Writer, tenant: str) -> Statement:
        """Make a statement of all usage that no statement covers."""
        return await actor.on_make_statement(MakeStatementRequest(tenant=tenant_of(caller, tenant)))

    @api.get(PREFIX + "/quarantine")
    async def quarantine(
        caller: Overseer, after: Moment = 0, limit: Annotated[int, Query(ge=1, le=200)] = 100
    ) -> QuarantineReply:
        """Usage that could not be booked, and why."""
        return await actor.on_quarantine(QuarantineRequest(after=after, limit=limit))

    @api.get("/healthz", dependencies=[Depends(scraping)])
    async def healthz() -> dict[str, int]:
        """Health check: what the process booked since its start."""
        return {"entries": actor.entries, "quarantined": actor.quarantined}

    @api.get("/metrics", dependencies=[Depends(scraping)])
    def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    guarded, free = Rule(token=True, body=HttpSettings().body_bytes), Rule(token=False, body=0)

    def rule(method: str, path: str) -> Rule:
        return guarded if path.startswith("/api/") else free

    api.add_middleware(Front, service="metering", rule=rule, admit=access.admit, refuse=refusal)
    return api


def refusal(error: BusError) -> JSONResponse:
    """The HTTP response to a refused request."""
    status = _STATUS.get(error.code, 409) if isinstance(error, RefusedError) else 503
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_S)}}.get(status)
    return _error(status, error.code, str(error), headers, retryable=error.retryable)


def _errors(api: FastAPI) -> None:
    """Give all errors the same form as the router's errors."""
    away = LimitedLog(log, "requests failed, too,", lines=1)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, f"http.{error.status_code}", str(error.detail), error.headers)

    @api.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        return _error(422, "http.invalid", "; ".join(parts)[:4096])

    @api.exception_handler(ValidationError)
    async def bad_name(request: Request, error: ValidationError) -> JSONResponse:
        parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        return _error(422, "http.invalid", "; ".join(parts)[:4096])

    @api.exception_handler(BusError)
    async def refused(request: Request, error: BusError) -> JSONResponse:
        return refusal(error)

    @api.exception_handler(SQLAlchemyError)
    async def database_away(request: Request, error: SQLAlchemyError) -> JSONResponse:
        if isinstance(error, UNREACHABLE):
            away.warning(f"REST {request.url.path} fails: the ledger's database does not answer: {first_line(error)}")
        else:
            log.exception("REST %s", request.url.path)
        return _error(503, DATABASE_AWAY, DATABASE_AWAY_TEXT)

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.exception("REST %s", request.url.path)
        return _error(500, "internal", f"unexpected error {type(error).__name__}; see metering's log")


def _error(status: int, code: str, message: str, headers: Any = None, *, retryable: bool | None = None) -> JSONResponse:
    content = {"code": code, "message": message, "retryable": status >= 500 if retryable is None else retryable}
    if status == 503:
        headers = {"Retry-After": str(RETRY_S)} | dict(headers or {})
    return JSONResponse(content, status, headers)
