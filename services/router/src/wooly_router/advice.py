"""Asks other services before a session or job starts: metering about the tenant's budget, the scheduler about admission."""

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
#: Timeout of the scheduler's answer, in seconds. Without an answer, sessions open as they request.
SCHEDULER_TIMEOUT_S = 0.5
#: Timeout of metering's answer, in seconds. Without an answer, the budget is not checked.
METERING_TIMEOUT_S = 0.5


class Advice:
    """Asks other services, and continues without an answer.

    Args:
        app: the connection to NATS.
    """

    def __init__(self, app: ServiceApp) -> None:
        self._app = app

    async def over_budget(self, tenant: str) -> str:
        """Explain why a tenant may start nothing: it has reached the hard limit of its budget. Empty: it may.

        Without an answer from metering, the tenant may start: metering holds its sessions as soon as it runs again.
        """
        ask = CheckBudgetRequest(tenant=tenant)
        try:
            reply = await self._app.request(contracts.METERING_BUDGET_CHECK, ask, timeout=METERING_TIMEOUT_S)
        except BusError as e:
            if not isinstance(e, NoResponderError):
                log.warning("the budget of tenant %s is not checked, because metering does not answer: %s", tenant, e)
            return ""
        return reply.refusal

    async def admit(self, ask: AdmitSessionRequest) -> AdmitSessionReply:
        """Ask the scheduler for admission. Without an answer, the session is admitted with the limits that it declares."""
        try:
            return await self._app.request(contracts.SCHEDULER_SESSION_ADMIT, ask, timeout=SCHEDULER_TIMEOUT_S)
        except BusError as e:
            if not isinstance(e, NoResponderError):
                log.warning("session %s is opened without the scheduler: %s", ask.session_id, e)
            policy = declared(ask.priority, ask.weight, ask.service_ns, ask.objective_ns, ask.interval_ns)
            return AdmitSessionReply(admitted=True, policy=SessionPolicy(**asdict(policy)))
