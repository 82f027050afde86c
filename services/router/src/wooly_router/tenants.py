"""Tenants for administrators: list, create, change. It answers over NATS, and REST calls it, too."""

from __future__ import annotations

from dataclasses import asdict

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import RefusedError
from wooly_wis.messages import SetTenantRequest, TenantInfo, TenantsReply, TenantsRequest

from wooly_router.ceilings import CeilingActor
from wooly_router.gate import Caller, Gate
from wooly_router.state.config import AuditRecord
from wooly_router.state.tenants import TenantChange, TenantRecord
from wooly_router.state.world import World


class TenantActor:
    """Manages tenants for administrators.

    Args:
        app: the connection to NATS.
        world: tenants, and the audit log.
        gate: authorizes callers.
        ceilings: the limits in force.
    """

    def __init__(self, app: ServiceApp, world: World, gate: Gate, ceilings: CeilingActor) -> None:
        self._world, self._gate, self._ceilings = world, gate, ceilings
        app.serve(contracts.ROUTER_TENANT_LIST, self.on_tenants)
        app.serve(contracts.ROUTER_TENANT_SET, self.on_set_tenant)

    async def on_tenants(self, request: TenantsRequest) -> TenantsReply:
        """Return all tenants."""
        await self._gate.over_nats(request.credential, None, "tenants:read")
        return TenantsReply(tenants=tuple(await self.all()))

    async def on_set_tenant(self, request: SetTenantRequest) -> TenantInfo:
        """Create or change a tenant."""
        caller = await self._gate.over_nats(request.credential, None, "tenants:write")
        if any(c == "/" or ord(c) < 32 or ord(c) == 127 for c in request.tenant):
            raise RefusedError(
                "router.bad_value", f"the tenant name {request.tenant!r} contains a slash or a control character"
            )
        changes = request.model_dump(exclude={"schema_version", "tenant", "credential"})
        return await self.put(caller, request.tenant, TenantChange(**changes))

    async def all(self) -> list[TenantInfo]:
        """Return all tenants, by name."""
        return [self._info(t) for t in await self._world.tenants.all()]

    async def put(self, caller: Caller, name: str, change: TenantChange) -> TenantInfo:
        """Create or change a tenant. If a ceiling is lowered, running sessions and jobs above it are lowered to it."""
        made = await self._world.tenants.put(name, self._gate.clock(), change)
        if any(limit is not None for limit in (change.class_ceiling, change.weight_ceiling, change.exclusive)):
            await self._ceilings.enforce(name)
        given = {field: value for field, value in asdict(change).items() if value is not None}
        detail = given | {"disabled": made.disabled, "opaque_kernels": made.opaque_kernels}
        detail.pop("description", None)
        await self._world.audit.add(
            AuditRecord(self._gate.clock(), caller.actor, caller.own, "tenant.put", name[:255], detail)
        )
        return self._info(made)

    def _info(self, record: TenantRecord) -> TenantInfo:
        ceilings = self._ceilings.of_record(record)
        return TenantInfo(
            name=record.name,
            description=record.description,
            disabled=record.disabled,
            opaque_kernels=record.opaque_kernels,
            class_ceiling=ceilings.priority,
            weight_ceiling=ceilings.weight,
            exclusive=ceilings.exclusive,
            created_at=record.created_at,
        )
