"""What other services say before something is started: metering of the tenant's budget, the scheduler of admission."""

from __future__ import annotations

import logging
from dataclasses import asdict

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, NoResponderError
from wooly_dispatch.policing import declared
from wooly_wis.credits import CheckBudgetRequest
from wooly_wis.messages import AdmitSessionReply, AdmitSessionRequest, SessionPolicy

log = logging.getLogger("wooly.router")
#: Seconds that the scheduler has for an answer; without it sessions are opened as they ask to be.
SCHEDULER_TIMEOUT_S = 0.5
#: Seconds that metering has for one; without it nobody's budget is looked at.
METERING_TIMEOUT_S = 0.5


class Advice:
    """Asks, and goes on where nobody answers.

    Args:
        app: the connection to NATS.
    """

    def __init__(self, app: ServiceApp) -> None:
        self._app = app

    async def over_budget(self, tenant: str) -> str:
        """Why a tenant may start nothing: it has spent its hard limit. Empty: it may.

        Without an answer it may, too: metering holds its sessions as soon as it can.
        """
        ask = CheckBudgetRequest(tenant=tenant)
        try:
            reply = await self._app.request(contracts.METERING_BUDGET_CHECK, ask, timeout=METERING_TIMEOUT_S)
        except BusError as e:
            if not isinstance(e, NoResponderError):
                log.warning("nobody says whether %s has credits left: %s", tenant, e)
            return ""
        return reply.refusal

    async def admit(self, ask: AdmitSessionRequest) -> AdmitSessionReply:
        """What the scheduler says; where there is none, everything is admitted, and held to what it declares."""
        try:
            return await self._app.request(contracts.SCHEDULER_SESSION_ADMIT, ask, timeout=SCHEDULER_TIMEOUT_S)
        except BusError as e:
            if not isinstance(e, NoResponderError):
                log.warning("session %s is opened without the scheduler: %s", ask.session_id, e)
            policy = declared(ask.priority, ask.weight, ask.service_ns, ask.objective_ns, ask.interval_ns)
            return AdmitSessionReply(admitted=True, policy=SessionPolicy(**asdict(policy)))
