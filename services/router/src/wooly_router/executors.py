"""What the router asks of executors about a session: to take its part of it, and to let it go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from wooly_bus import contracts
from wooly_bus.app import ServiceApp
from wooly_bus.errors import BusError
from wooly_wis.messages import (
    CloseSessionRequest,
    HostSessionReply,
    HostSessionRequest,
    RenewSessionReply,
    RenewSessionRequest,
)

log = logging.getLogger("wooly.router")
#: Seconds that one executor has for an answer.
EXECUTOR_TIMEOUT_S = 2.0


class Executors:
    """Speaks to executors, to all of a session's at once.

    Args:
        app: the connection to NATS.
    """

    def __init__(self, app: ServiceApp) -> None:
        self._app = app

    async def host(
        self, requests: Sequence[tuple[str, HostSessionRequest]], timeout_s: float
    ) -> list[HostSessionReply | BaseException]:
        """Have executors take a session. Per executor, its answer or what went wrong."""
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
        """Prolong a session's lease on executors. Per executor, its answer or what went wrong."""
        return await asyncio.gather(
            *[
                self._app.request(contracts.EXECUTOR_SESSION_RENEW.at(name), request, timeout=EXECUTOR_TIMEOUT_S)
                for name in names
            ],
            return_exceptions=True,
        )

    async def close(self, executor_ids: list[str], session_id: str, reason: str) -> dict[str, float]:
        """Have executors let a session go. One that does not answer is left to the session's lease there.

        Returns:
            Executors on whose device an operator of it still runs, and for how many seconds by now.
        """

        async def close_one(executor_id: str) -> float:
            try:
                reply = await self._app.request(
                    contracts.EXECUTOR_SESSION_CLOSE.at(executor_id),
                    CloseSessionRequest(session_id=session_id, reason=reason),
                    timeout=EXECUTOR_TIMEOUT_S,
                )
            except BusError as e:
                # Its own lease ends the session there if the executor still lives.
                log.warning("executor %s was not told that %s ended: %s", executor_id, session_id, e)
                return 0.0
            return reply.running_s

        running = await asyncio.gather(*[close_one(executor_id) for executor_id in executor_ids])
        return {name: seconds for name, seconds in zip(executor_ids, running, strict=True) if seconds}
