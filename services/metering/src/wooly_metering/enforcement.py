"""Suspends (holds) the sessions of tenants at their hard limit, and resumes them when the limit is raised.

A hold is independent of a suspension by an operator, which remains. Executors keep the state of a held session. The session's
waiting client gets the reason; a repeated request is answered when the session is resumed.
"""

from __future__ import annotations

import asyncio
import logging

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, NoResponderError, RefusedError
from wooly_wis.credits import BudgetReached, BudgetState
from wooly_wis.messages import SteerSessionRequest

from wooly_metering.core.budgets import Budget
from wooly_metering.core.rating import text
from wooly_metering.ledger.reader import Reader
from wooly_metering.ledger.writer import BookedRun

log = logging.getLogger("wooly.metering")
EXECUTOR_TIMEOUT_S = 2.0


def why(budget: Budget, spent_ucr: int) -> str:
    """The message to the client of a held session."""
    return (
        f"{_used_up(budget, spent_ucr)}. The session is suspended and keeps its memory and its queue; "
        f"raise the limit (`wooly credits budget {budget.tenant} --hard N`), then try again"
    )


def refusal_reason(budget: Budget, spent_ucr: int) -> str:
    """Why a tenant cannot open a session or start a job."""
    return f"{_used_up(budget, spent_ucr)}, its hard limit; raise it (`wooly credits budget {budget.tenant} --hard N`)"


def _used_up(budget: Budget, spent_ucr: int) -> str:
    limit = text(budget.hard_ucr or 0)
    when = {"total": "", "month": " this month", "day": " today"}[budget.period]
    return f"the credits of tenant {budget.tenant} are used up: {text(spent_ucr)} of {limit} were spent{when}"


class Enforcer:
    """Knows which tenants are held, and where their sessions run."""

    def __init__(self, app: ServiceApp, reader: Reader) -> None:
        self._app, self._reader = app, reader
        self._turn = asyncio.Lock()
        #: tenant -> open (session, executor) pairs -> time of their last booked usage
        self._open: dict[str, dict[tuple[str, str], int]] = {}
        self._told: dict[str, str] = {}
        self._held: dict[str, set[tuple[str, str]]] = {}
        self._budgeted: set[str] = set()

    def held(self, tenant: str) -> bool:
        """Whether the tenant's sessions are held."""
        return self._told.get(tenant) == "hard"

    async def begin(self, now_us: int) -> None:
        """Load the open runs from the ledger, and steer all sessions again.

        A session that another process held may have to be resumed, because a day or month began, or the limit was raised, since
        that process ended.
        """
        for session, executor, tenant, until_us in await asyncio.to_thread(self._reader.open_runs):
            self._open.setdefault(tenant, {})[session, executor] = until_us
        await self.look(None, now_us)
        for tenant in sorted(self._budgeted & self._open.keys()):
            if not self.held(tenant):
                await self._tell(tenant, set(self._open[tenant]), "")

    def note_runs(self, runs: tuple[BookedRun, ...]) -> None:
        """Note the runs for which usage was booked.

        The end of a run may be booked after the session has come back to the executor: it goes on then.
        """
        for session, executor, tenant, until_us, ended in runs:
            known = self._open.setdefault(tenant, {})
            if not ended:
                known[session, executor] = max(until_us, known.get((session, executor), 0))
            elif known.get((session, executor), 0) <= until_us:
                known.pop((session, executor), None)
                self._held.get(tenant, set()).discard((session, executor))
            if not known:
                del self._open[tenant]

    async def look(self, tenants: frozenset[str] | None, now_us: int) -> None:
        """Check the budgets of these tenants, or of all tenants (None), and hold or resume their sessions."""
        if tenants is not None and not tenants & self._budgeted:
            return
        async with self._turn:
            budgets = await asyncio.to_thread(self._reader.budgets)
            self._budgeted = {b.tenant for b in budgets}
            for budget in budgets:
                if tenants is None or budget.tenant in tenants:
                    await self._judge(budget, await asyncio.to_thread(self._reader.spent, budget, now_us))
            for tenant in [t for t in self._told if t not in self._budgeted]:
                await self._tell(tenant, set(self._held.get(tenant, ())), "")
                del self._told[tenant]

    async def _judge(self, budget: Budget, spent: int) -> None:
        tenant, reached = budget.tenant, budget.reached(spent)
        if reached and reached != self._told.get(tenant):
            log.warning("tenant %s has reached its %s limit: %s credits are spent", tenant, reached, text(spent))
            state = BudgetState(
                tenant=tenant,
                period=budget.period,  # type: ignore[arg-type]  # the database holds what the model allowed
                soft_ucr=budget.soft_ucr,
                hard_ucr=budget.hard_ucr,
                spent_ucr=spent,
                held=reached == "hard",
            )
            event = BudgetReached(budget=state, limit="hard" if reached == "hard" else "soft")
            await self._app.publish(contracts.METERING_BUDGET_REACHED, event)
        self._told[tenant] = reached
        if reached == "hard":
            wanted = self._open.get(tenant, {}).keys() - self._held.get(tenant, set())
            await self._tell(tenant, set(wanted), why(budget, spent))
        else:
            await self._tell(tenant, set(self._held.get(tenant, ())), "")

    async def _tell(self, tenant: str, sessions: set[tuple[str, str]], hold: str) -> None:
        """Hold sessions, or resume them. A session whose executor does not answer is tried again at the next check."""
        answers = await asyncio.gather(*[self._steer(s, e, hold) for s, e in sorted(sessions)])
        for key, done in zip(sorted(sessions), answers, strict=True):
            if done and hold:
                self._held.setdefault(tenant, set()).add(key)
            elif done:
                self._held.get(tenant, set()).discard(key)

    async def _steer(self, session: str, executor: str, hold: str) -> bool:
        request = SteerSessionRequest(session_id=session, hold=hold)
        rpc = contracts.EXECUTOR_SESSION_STEER.at(executor)
        try:
            await self._app.request(rpc, request, timeout=EXECUTOR_TIMEOUT_S)
        except RefusedError as e:
            log.info("session %s on %s: %s", session, executor, e)  # the session has ended
        except NoResponderError:
            return False
        except BusError as e:
            log.warning("session %s on %s could not be %s: %s", session, executor, "held" if hold else "resumed", e)
            return False
        return True
