"""Login of browsers: an API token becomes a cookie that scripts of pages cannot read, because `EventSource` sends no headers."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request, Response
from wooly_bus.errors import RefusedError

from wooly_router.gate import Caller
from wooly_router.owner import CODE_S
from wooly_router.rest.access import COOKIE, Access, admitted
from wooly_router.rest.models import LoginBody, LoginCode, Me

router = APIRouter()


def _me(caller: Caller, auth: Literal["open", "tokens"]) -> Me:
    return Me(auth=auth, actor=caller.actor, tenant=caller.tenant, own=caller.own, may=sorted(caller.may))


@router.get("/me")
async def me(request: Request, caller: Annotated[Caller, Depends(admitted)]) -> Me:
    """Return the caller and the caller's scopes."""
    access: Access = request.app.state.access
    return _me(caller, access.auth)


@router.post("/login")
async def login(request: Request, response: Response, body: LoginBody) -> Me:
    """Log a browser in: its requests carry the token in a cookie until the browser closes, logs out, or the token ends."""
    access: Access = request.app.state.access
    access.refuse_other_origins(request)
    access.take_login(request)
    of_browser = access.owner.log_in(body.token) if access.owner is not None else None
    secret = of_browser or body.token
    caller = await access.proved(secret, request.client.host if request.client else "")
    if access.auth == "tokens":
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, secret, path="/api/v1", httponly=True, samesite="strict", secure=secure)
        await access.log(caller, "login", caller.actor)
    return _me(caller, access.auth)


@router.post("/login/code", status_code=201)
async def login_code(request: Request, caller: Annotated[Caller, Depends(admitted)]) -> LoginCode:
    """Make a code for one login of a browser by the owner of a local stack. `wooly status` prints an address with such a code."""
    access: Access = request.app.state.access
    if access.owner is None or caller.actor != "owner":
        raise RefusedError(
            "router.forbidden", "only the owner of a local stack can get a login code: use the owner's token"
        )
    return LoginCode(code=access.owner.code(), expires_in_s=CODE_S)


@router.delete("/login", status_code=204)
async def logout(request: Request, caller: Annotated[Caller, Depends(admitted)]) -> Response:
    """Log a browser out: its cookie is deleted. An API token stays valid; a secret that a login made ends."""
    access: Access = request.app.state.access
    if access.owner is not None:
        access.owner.log_out(request.cookies.get(COOKIE, ""))
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, path="/api/v1", httponly=True, samesite="strict")
    return response
