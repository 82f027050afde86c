"""Issues short-lived NATS credentials to the holder of an API token: for the token's tenant, with the token's rights."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from wooly_bus.errors import RefusedError

from wooly_router.actor import RouterActor
from wooly_router.gate import ROLES, Caller
from wooly_router.rest.access import Access, admitted
from wooly_router.rest.models import CredentialsBody, NatsCredentials

router = APIRouter()


@router.post("/credentials", status_code=201)
async def create_credentials(
    request: Request, body: CredentialsBody, caller: Annotated[Caller, Depends(admitted)]
) -> NatsCredentials:
    """Issue credentials for NATS. Request new ones before they expire."""
    actor: RouterActor = request.app.state.actor
    access: Access = request.app.state.access
    if actor.issuer is None:
        raise RefusedError(
            "router.no_credentials",
            "this router issues no NATS credentials, because WOOLY_ROUTER_SIGNING_KEY is not set",
        )
    # Without required tokens every caller is an administrator, but did not prove it, and does not get access to JetStream.
    proved = access.auth == "tokens" and caller.tenant is None and caller.may == ROLES["admin"]
    tenant = body.tenant or caller.own
    if tenant != caller.own and not caller.acts_for_all:
        raise RefusedError("router.forbidden", f"this token can only get credentials of its own tenant, {caller.own}")
    if body.role == "admin" and not proved:
        raise RefusedError("router.forbidden", "administrator credentials require an administrator's token")
    role = body.role or ("admin" if proved and body.tenant is None else "user")
    now = actor.clock()
    ends = min(
        now + (body.expires_in_s or actor.credentials_s),
        now + actor.credentials_s,
        now + actor.credentials_s if caller.until is None else caller.until,
    )
    lasting = {"ttl_s": ends - now, "now": now}
    if role == "admin":
        made = actor.issuer.administrator(**lasting)
    else:
        made = actor.issuer.client(tenant, caller.may & ROLES["user"], **lasting)
    await access.log(caller, "credentials.create", made.user_id, tenant=tenant, role=role)
    return NatsCredentials(
        credentials=made.text(),
        nats_url=actor.client_nats_url,
        inbox=made.inbox,
        role=role,
        tenant=tenant,
        expires_at=made.expires_at or ends,
    )
