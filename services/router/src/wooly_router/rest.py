"""REST for people and probes: nodes, sessions, health. One error shape."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from wooly_wis.messages import NodesReply, NodesRequest

from wooly_router.actor import RouterActor


class PartInfo(BaseModel):
    """Who serves one device of a session."""

    executor_id: str
    node: str


class SessionInfo(BaseModel):
    """One open session, without its token; `parts` are its devices, in order. Times are seconds since the epoch."""

    session_id: str
    parts: list[PartInfo]
    tenant: str
    priority: int
    program: str
    client_host: str
    opened_at: float
    lease_until: float


class SessionList(BaseModel):
    """All open sessions."""

    sessions: list[SessionInfo]


class Health(BaseModel):
    """Whether the router serves, and how many executors are alive."""

    status: str
    executors: int


def create_api(actor: RouterActor) -> FastAPI:
    """The application."""
    api = FastAPI(title="Wooly router", version="0.1.0")

    @api.get("/healthz")
    async def healthz() -> Health:
        return Health(status="ok", executors=len(actor.registry.alive(actor.clock())))

    @api.get("/api/v1/nodes")
    async def nodes() -> NodesReply:
        return await actor.on_nodes(NodesRequest())

    @api.get("/api/v1/sessions")
    async def sessions() -> SessionList:
        found = []
        for task in await actor.world.tasks.in_states("started", kind="session"):
            lease = await actor.world.tasks.lease(task.id)
            if lease is not None:
                parts = [PartInfo(executor_id=p.executor_id, node=p.node) for p in task.parts]
                found.append(
                    SessionInfo(
                        session_id=task.id,
                        parts=parts,
                        tenant=task.tenant,
                        priority=task.priority,
                        program=task.name,
                        client_host=task.client_host,
                        opened_at=task.started_at or task.created_at,
                        lease_until=lease.lease_until,
                    )
                )
        return SessionList(sessions=found)

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, f"http.{error.status_code}", str(error.detail))

    @api.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        return _error(422, "http.invalid", "; ".join(str(e["msg"]) for e in error.errors()))

    @api.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return _error(500, "internal", f"{type(error).__name__}: {error}")

    return api


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"code": code, "message": message, "retryable": status >= 500}, status)
