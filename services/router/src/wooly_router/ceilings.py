"""Enforces tenants' ceilings: before a session or job gets a class or a weight, and when an administrator lowers a ceiling.

Only this module knows how tenant, caller and the installation's defaults determine the ceilings. The rule itself is in
`core.ceilings`. Ceilings do not bind administrators with a token: an administrator could raise the ceilings as well.
"""

from __future__ import annotations

import asyncio
import logging

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, RefusedError
from wooly_wis.messages import (
    CheckCeilingReply,
    CheckCeilingRequest,
    SteerSessionReply,
    SteerSessionRequest,
)

from wooly_router.core.ceilings import UNLIMITED, Ceilings, Grant, Refusal, Wish, grant, overridden
from wooly_router.executors import EXECUTOR_TIMEOUT_S
from wooly_router.gate import Caller, Gate
from wooly_router.state.tasks import session_of
from wooly_router.state.tenants import TenantRecord
from wooly_router.state.world import World

log = logging.getLogger("wooly.router")
#: The error code of every refusal because of a ceiling.
ABOVE_CEILING_CODE = "router.above_ceiling"


class CeilingActor:
    """Applies the ceilings of tenants.

    Args:
        app: the connection to NATS.
        world: tenants and tasks.
        gate: tells administrators from other callers.
        defaults: the ceilings of a tenant without own values.
    """

    def __init__(self, app: ServiceApp, world: World, gate: Gate, defaults: Ceilings) -> None:
        self._app, self._world, self._gate, self._defaults = app, world, gate, defaults
        app.serve(contracts.ROUTER_CEILING_CHECK, self.on_check_ceiling)

    async def of(self, tenant: str) -> Ceilings:
        """Return a tenant's ceilings; the defaults for a tenant without a record."""
        found = await self._world.tenants.get(tenant)
        return self._defaults if found is None else self.of_record(found)

    def of_record(self, tenant: TenantRecord) -> Ceilings:
        """Return a tenant's ceilings: its own values, and the defaults where it has no own value."""
        return overridden(self._defaults, tenant.class_ceiling, tenant.weight_ceiling, tenant.exclusive)

    async def granted(self, tenant: str, wish: Wish, caller: Caller | None = None) -> Grant:
        """Decide what a tenant gets. `caller`: the caller that asks; an administrator gets everything that it asks for.

        Raises:
            RefusedError: the wish is above a ceiling of the tenant; code `router.above_ceiling`.
        """
        unbound = caller is not None and self._gate.is_administrator(caller)
        known = caller.record if caller is not None else None
        if unbound:
            ceilings = UNLIMITED
        elif known is not None and known.name == tenant:
            ceilings = self.of_record(known)
        else:
            ceilings = await self.of(tenant)
        found = grant(tenant, ceilings, wish)
        if isinstance(found, Refusal):
            raise RefusedError(ABOVE_CEILING_CODE, found.message)
        return found

    async def on_check_ceiling(self, request: CheckCeilingRequest) -> CheckCeilingReply:
        """Answer another service that asks whether it may change a session's class or weight."""
        found = grant(request.tenant, await self.of(request.tenant), Wish(request.priority, request.weight))
        return CheckCeilingReply(refusal=found.message if isinstance(found, Refusal) else "")

    # -- lowering ----------------------------------------------------------------------------------------------------

    async def enforce(self, tenant: str) -> None:
        """Lower a tenant's tasks to its ceilings: waiting tasks in the queue, running tasks on their executors.

        The router asks the executors directly, so that this works without a scheduler. A session that has a device to itself
        keeps it until the session ends.
        """
        ceilings = await self.of(tenant)
        await self._world.tasks.bring_down(tenant, ceilings.priority, ceilings.weight, exclusive=ceilings.exclusive)
        running = [t for t in await self._world.tasks.in_states("started") if t.tenant == tenant]
        parts = [(session_of(task), part.executor_id) for task in running for part in task.parts]
        await asyncio.gather(*[self._bring_down(*part, ceilings) for part in parts])

    async def _bring_down(self, session_id: str, executor_id: str, ceilings: Ceilings) -> None:
        as_it_is = SteerSessionRequest(session_id=session_id)
        try:
            policy = (await self._steer(executor_id, as_it_is)).policy
            priority, weight = max(policy.priority, ceilings.priority), min(policy.weight, ceilings.weight)
            if (priority, weight) != (policy.priority, policy.weight):
                await self._steer(executor_id, as_it_is.model_copy(update={"priority": priority, "weight": weight}))
        except BusError as e:
            log.warning("session %s on executor %s may exceed its tenant's ceilings: %s", session_id, executor_id, e)

    async def _steer(self, executor_id: str, request: SteerSessionRequest) -> SteerSessionReply:
        rpc = contracts.EXECUTOR_SESSION_STEER.at(executor_id)
        return await self._app.request(rpc, request, timeout=EXECUTOR_TIMEOUT_S)
