"""Tenants and their tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from wooly_bus.errors import RefusedError
from wooly_wis.messages import TenantInfo

from wooly_router.gate import Caller
from wooly_router.rest.access import Access, needs
from wooly_router.rest.models import (
    NewToken,
    PathName,
    Tenant,
    TenantBody,
    TenantList,
    Token,
    TokenBody,
    TokenList,
)
from wooly_router.state.tenants import TenantChange, TenantRecord, TenantStore, TokenRecord, new_token
from wooly_router.tenants import TenantActor

router = APIRouter()


def _store(request: Request) -> TenantStore:
    store: TenantStore = request.app.state.actor.world.tenants
    return store


def _desk(request: Request) -> TenantActor:
    desk: TenantActor = request.app.state.actor.tenants
    return desk


def _tenant(info: TenantInfo) -> Tenant:
    return Tenant.model_validate(info.model_dump(exclude={"schema_version"}))


def _token(record: TokenRecord) -> Token:
    return Token.model_validate(
        {f: getattr(record, f) for f in TokenRecord.__slots__} | {"scopes": list(record.scopes)}
    )


async def _must(request: Request, name: str) -> TenantRecord:
    found = await _store(request).get(name)
    if found is None:
        raise RefusedError("router.no_tenant", f"tenant {name} does not exist")
    return found


@router.get("/tenants")
async def list_tenants(request: Request, caller: Annotated[Caller, Depends(needs("tenants", "read"))]) -> TenantList:
    """All tenants."""
    return TenantList(tenants=[_tenant(t) for t in await _desk(request).all()])


@router.put("/tenants/{name}")
async def put_tenant(
    request: Request, name: PathName, body: TenantBody, caller: Annotated[Caller, Depends(needs("tenants", "write"))]
) -> Tenant:
    """Create or change a tenant; missing fields do not change.

    Running sessions and jobs above a new ceiling are lowered to it.
    """
    return _tenant(await _desk(request).put(caller, name, TenantChange(**body.model_dump())))


@router.get("/tenants/{name}/tokens")
async def list_tokens(
    request: Request, name: PathName, caller: Annotated[Caller, Depends(needs("tenants", "read"))]
) -> TokenList:
    """A tenant's tokens, without their secrets."""
    await _must(request, name)
    return TokenList(tokens=[_token(t) for t in await _store(request).tokens(name)])


@router.post("/tenants/{name}/tokens", status_code=201)
async def create_token(
    request: Request, name: PathName, body: TokenBody, caller: Annotated[Caller, Depends(needs("tenants", "write"))]
) -> NewToken:
    """Create a token. Its secret is shown only here."""
    access: Access = request.app.state.access
    await _must(request, name)
    now = request.app.state.actor.clock()
    ends = None if body.expires_in_s is None else now + body.expires_in_s
    scopes = tuple(dict.fromkeys(body.scopes))
    token, secret = new_token(name, body.name[:128], body.role, now, scopes, ends)
    await _store(request).add_token(token, secret)
    await access.log(caller, "token.create", token.id, tenant=name, role=body.role, scopes=list(scopes))
    return NewToken(secret=secret, **_token(token).model_dump())


@router.delete("/tenants/{name}/tokens/{token_id}", status_code=204)
async def revoke_token(
    request: Request, name: PathName, token_id: PathName, caller: Annotated[Caller, Depends(needs("tenants", "write"))]
) -> Response:
    """Revoke a token at once."""
    access: Access = request.app.state.access
    if not await _store(request).revoke(name, token_id, request.app.state.actor.clock()):
        raise RefusedError("router.no_token", f"tenant {name} has no valid token {token_id}")
    await access.log(caller, "token.revoke", token_id, tenant=name)
    return Response(status_code=204)
