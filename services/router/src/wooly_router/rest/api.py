"""The REST application: routes, documentation, and one format for every error."""

from __future__ import annotations

import logging
import math
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from wooly_bus.blobs import BlobMissingError
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.http_front import Front, Rule
from wooly_bus.http_listener import HttpSettings

from wooly_router import ui
from wooly_router.actor import RouterActor
from wooly_router.exporter import ModuleCollector, SpanCollector
from wooly_router.limits import LimitError
from wooly_router.rest import cluster, credentials, credits, events, login, metrics, tasks, tenants, traces
from wooly_router.rest.access import Access, secret_of
from wooly_router.rest.models import Health, Problem
from wooly_router.state.database import DATABASE_AWAY, DATABASE_AWAY_TEXT, UNREACHABLE, log_away
from wooly_router.tasks import TaskActor
from wooly_router.traces import TraceActor

log = logging.getLogger("wooly.router")
#: The HTTP status of a refusal, by its code. Other codes mean a conflict with the current state (409).
STATUS = {
    "router.unauthorized": 401,
    "router.forbidden": 403,
    "router.above_ceiling": 403,
    "router.no_task": 404,
    "router.no_node": 404,
    "router.no_group": 404,
    "router.no_tenant": 404,
    "router.no_token": 404,
    "router.no_metering": 404,
    "router.no_scheduler": 404,
    "router.no_trace": 404,
    "router.bad_cursor": 422,
    "router.bad_value": 422,
    "router.too_large": 413,
    "router.too_many": 429,
    "router.limit": 429,
    "router.database": 503,
}
#: Seconds after which a client may try again what failed because another part does not answer (503).
RETRY_S = 1
#: Maximum size, in bytes, of the body of a request without a token.
LOGIN_BYTES = 4096
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 404, 405, 409, 413, 422, 429, 500, 503)
}

#: The routes under /api/v1, included once per process: FastAPI builds the models of all routes again for each inclusion.
_VERSION_1 = APIRouter(responses=_PROBLEMS)
for _module in (cluster, credentials, credits, events, login, metrics, tasks, tenants, traces):
    _VERSION_1.include_router(_module.router, prefix="/api/v1")
# FastAPI makes these models when it first looks for a route. Here, the processes of a stack share them: they are forks of a
# process that has loaded this module. The first request of each router takes a third of a second less.
for _route in _VERSION_1.routes:
    _route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})


def create_api(actor: RouterActor, desk: TaskActor, access: Access, tracing: TraceActor) -> FastAPI:
    """Make the application."""
    api = FastAPI(
        title="Wooly controller", version=version("wooly-router"), responses=_PROBLEMS, docs_url=None, redoc_url=None
    )
    api.state.bus, api.state.hub = actor.bus, events.Hub(actor)
    api.state.actor, api.state.desk, api.state.access, api.state.traces = actor, desk, access, tracing

    @api.get("/healthz")
    async def healthz() -> Health:
        return Health(status="ok", executors=len(actor.registry.alive(actor.clock())))

    api.router.routes.extend(_VERSION_1.routes)
    ui.serve(api)
    free, named = CollectorRegistry(auto_describe=False), CollectorRegistry(auto_describe=False)
    for registry in (free, named):
        registry.register(SpanCollector(tracing))
    named.register(ModuleCollector(desk.jobs.modules))

    @api.get("/metrics", include_in_schema=False)
    async def figures(request: Request) -> Response:
        try:  # only callers that may read metrics see tenants' names
            caller = await access.still(secret_of(request), request.client.host if request.client else "")
            registry = named if "metrics:read" in caller.may else free
        except RefusedError:
            registry = free
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    _answer_errors(api)
    body_bytes = HttpSettings().body_bytes
    rules = {
        ("POST", "/api/v1/login"): Rule(token=False, body=LOGIN_BYTES),
        ("POST", "/api/v1/blobs"): Rule(token=True, body=tasks.BLOB_BYTES, streamed=True),
    }

    def rule(method: str, path: str) -> Rule:
        if path.startswith("/api/"):
            return rules.get((method, path.rstrip("/"))) or Rule(token=True, body=body_bytes)
        return Rule(token=False, body=0)

    api.add_middleware(Front, service="router", rule=rule, admit=access.admit, refuse=refusal)
    return api


def refusal(error: BusError) -> JSONResponse:
    """Make the response to a refused request."""
    if isinstance(error, RefusedError):
        status = STATUS.get(error.code, 409)
    else:
        status = 404 if isinstance(error, BlobMissingError) else 503
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, LimitError) and error.retry_s:
        headers["Retry-After"] = str(math.ceil(error.retry_s))
    return _error(status, error.code, str(error), headers or None, retryable=error.retryable)


def _answer_errors(api: FastAPI) -> None:
    """Give every error the same format, and a status."""

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, f"http.{error.status_code}", str(error.detail), error.headers)

    @api.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        return _error(422, "http.invalid", "; ".join(parts)[:4096])

    @api.exception_handler(BusError)
    async def refused(request: Request, error: BusError) -> JSONResponse:
        return refusal(error)

    @api.exception_handler(SQLAlchemyError)
    async def database_away(request: Request, error: SQLAlchemyError) -> JSONResponse:
        if isinstance(error, UNREACHABLE):
            log_away(f"REST {request.url.path} fails", error)
        else:
            log.exception("REST %s", request.url.path)
        return _error(503, DATABASE_AWAY, DATABASE_AWAY_TEXT)

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.exception("REST %s", request.url.path)
        return _error(500, "internal", f"{type(error).__name__}; see the router's log")


def _error(status: int, code: str, message: str, headers: Any = None, *, retryable: bool | None = None) -> JSONResponse:
    content = {"code": code, "message": message, "retryable": status >= 500 if retryable is None else retryable}
    if status == 503:
        headers = {"Retry-After": str(RETRY_S)} | dict(headers or {})
    return JSONResponse(content, status, headers)
