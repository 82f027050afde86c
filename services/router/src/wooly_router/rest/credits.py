"""Credits, which metering reports over NATS. Metering's own REST has the rest (prices, corrections, quarantine)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.contract_types import Q, R, Rpc
from wooly_bus.errors import NoResponderError, RefusedError
from wooly_wis.credits import (
    BudgetState,
    CreditsReply,
    CreditsRequest,
    PlansReply,
    PlansRequest,
    SetBudgetRequest,
    StatementsReply,
    StatementsRequest,
)

from wooly_router.gate import Caller
from wooly_router.rest.access import Access, needs
from wooly_router.rest.models import BudgetBody, PathName

router = APIRouter(prefix="/credits")
Of = Annotated[str, Query(max_length=128, pattern=r"^[^\x00]*$")]
Moment = Annotated[int, Query(ge=0, lt=1 << 62)]
Reader = Annotated[Caller, Depends(needs("credits", "read"))]
#: Timeout of metering's answer, in seconds.
TIMEOUT_S = 5.0


async def _ask(request: Request, rpc: Rpc[Q, R], message: Q) -> R:
    bus: ServiceApp = request.app.state.bus
    try:
        return await bus.request(rpc, message, timeout=TIMEOUT_S)
    except NoResponderError as e:
        raise RefusedError("router.no_metering", "no metering service answers; start metering", retryable=True) from e


def _tenant(caller: Caller, asked: str) -> str:
    if caller.tenant is not None and asked not in ("", caller.tenant):
        raise RefusedError(
            "router.forbidden", f"this token can only read the credits of its own tenant, {caller.tenant}"
        )
    return caller.tenant or asked


@router.get("")
async def credits(
    request: Request,
    caller: Reader,
    tenant: Of = "",
    by: Literal["run", "model", "hour"] = "run",
    since_us: Moment = 0,
    until_us: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> CreditsReply:
    """Sums by run, model or hour, newest first; totals and budgets. Amounts in micro-credits, times in microseconds."""
    ask = CreditsRequest(
        tenant=_tenant(caller, tenant), by=by, since_us=since_us, until_us=until_us, offset=offset, limit=limit
    )
    return await _ask(request, contracts.METERING_CREDITS_SHOW, ask)


@router.get("/plans")
async def plans(request: Request, caller: Reader) -> PlansReply:
    """All price plans, oldest first."""
    return await _ask(request, contracts.METERING_PLAN_LIST, PlansRequest())


@router.get("/statements/{tenant}")
async def statements(request: Request, caller: Reader, tenant: PathName, after: Moment = 0) -> StatementsReply:
    """A tenant's statements with numbers above `after`."""
    ask = StatementsRequest(tenant=_tenant(caller, tenant), after=after)
    return await _ask(request, contracts.METERING_STATEMENT_LIST, ask)


@router.put("/budgets/{tenant}")
async def set_budget(
    request: Request,
    tenant: PathName,
    body: BudgetBody,
    caller: Annotated[Caller, Depends(needs("credits", "write"))],
) -> BudgetState:
    """Set a tenant's budget."""
    access: Access = request.app.state.access
    ask = SetBudgetRequest(tenant=_tenant(caller, tenant), **body.model_dump())
    state = await _ask(request, contracts.METERING_BUDGET_SET, ask)
    await access.log(caller, "budget.set", tenant, **body.model_dump())
    return state
