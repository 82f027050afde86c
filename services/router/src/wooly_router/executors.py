"""The router's requests to executors about a session: to host it, to renew its lease, to close it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError, BusTimeoutError, NoResponderError
from wooly_wis.messages import (
    CloseSessionRequest,
    HostSessionReply,
    HostSessionRequest,
    RenewSessionReply,
    RenewSessionRequest,
    SessionClosed,
    SteerSessionRequest,
)

log = logging.getLogger("wooly.router")
#: Timeout of one executor's answer, in seconds.
EXECUTOR_TIMEOUT_S = 2.0


class Executors:
    """Sends requests to all executors of a session at the same time.

    Args:
        app: the connection to NATS.
    """

    def __init__(self, app: ServiceApp) -> None:
        self._app = app

    async def host(
        self, requests: Sequence[tuple[str, HostSessionRequest]], timeout_s: float
    ) -> list[HostSessionReply | BaseException]:
        """Ask executors to host a session. Returns the answer or the error of each executor."""
        timeout = max(0.2, min(EXECUTOR_TIMEOUT_S, timeout_s))
        return await asyncio.gather(
            *[
                self._app.request(contracts.EXECUTOR_SESSION_OPEN.at(name), request, timeout=timeout)
                for name, request in requests
            ],
            return_exceptions=True,
        )

    async def renew(
        self, names: Sequence[str], request: RenewSessionRequest
    ) -> list[RenewSessionReply | BaseException]:
        """Renew a session's lease on executors. Returns the answer or the error of each executor."""
        return await asyncio.gather(
            *[
                self._app.request(contracts.EXECUTOR_SESSION_RENEW.at(name), request, timeout=EXECUTOR_TIMEOUT_S)
                for name in names
            ],
            return_exceptions=True,
        )

    async def steer(self, names: Sequence[str], session_id: str, priority: int) -> None:
        """Change a session's class on executors. An executor that does not answer keeps the session in its old class."""
        request = SteerSessionRequest(session_id=session_id, priority=priority)
        contract = contracts.EXECUTOR_SESSION_STEER
        asking = [self._app.request(contract.at(name), request, timeout=EXECUTOR_TIMEOUT_S) for name in names]
        for name, answer in zip(names, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if isinstance(answer, BusError):
                log.warning("session %s keeps its old class on executor %s: %s", session_id, name, answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def close(
        self, executor_ids: list[str], session_id: str, reason: str, *, passing: bool = False
    ) -> dict[str, float]:
        """Ask executors to close a session. If an executor does not answer, the end of the lease closes the session there.

        Args:
            executor_ids: the executors.
            session_id: id of the session.
            reason: why it ends.
            passing: it may go on in another executor.

        Returns:
            By executor, the seconds for which an operator of the session still runs there. Executors without such an operator
            are missing.
        """
        running = await self._close_all(
            executor_ids, CloseSessionRequest(session_id=session_id, reason=reason, passing=passing)
        )
        return {name: seconds for name, seconds in running.items() if seconds}

    async def leave(self, executor_ids: list[str], session_id: str, reason: str) -> set[str]:
        """Ask executors to close a session that goes on elsewhere. Returns the executors that do not answer."""
        running = await self._close_all(
            executor_ids, CloseSessionRequest(session_id=session_id, reason=reason, passing=True)
        )
        return {name for name, seconds in running.items() if seconds is None}

    async def how_ended(self, executor_id: str, session_id: str) -> SessionClosed | None:
        """Ask an executor that no longer lists a session how the session ended there, because its event may have been lost.

        Returns None if the executor does not know it, or does not answer.
        """
        request = CloseSessionRequest(session_id=session_id, reason="its executor did not list it", passing=True)
        try:
            contract = contracts.EXECUTOR_SESSION_CLOSE.at(executor_id)
            return (await self._app.request(contract, request, timeout=EXECUTOR_TIMEOUT_S)).ended
        except BusError as e:
            log.warning("executor %s could not be asked how session %s ended: %s", executor_id, session_id, e)
            return None

    async def _close_all(self, executor_ids: list[str], request: CloseSessionRequest) -> dict[str, float | None]:
        """By executor, the seconds for which an operator of the session still runs there; None: the executor does not answer."""

        async def close_one(executor_id: str) -> float | None:
            contract = contracts.EXECUTOR_SESSION_CLOSE.at(executor_id)
            try:
                return (await self._app.request(contract, request, timeout=EXECUTOR_TIMEOUT_S)).running_s
            except BusError as e:
                # The end of the lease closes the session on this executor, if the executor still lives.
                log.warning(
                    "executor %s could not be told that session %s ended: %s", executor_id, request.session_id, e
                )
                return None if isinstance(e, (NoResponderError, BusTimeoutError)) else 0.0

        running = await asyncio.gather(*[close_one(executor_id) for executor_id in executor_ids])
        return dict(zip(executor_ids, running, strict=True))
