"""Lets the executor of one session work with the executor of another session of the same tenant.

The first executor becomes a client of the second one, in a session of its own there: a *peer session*. So the second executor
limits, accounts and bills it like any client. It ends with the session that needs it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from wooly_bus.channel.token import channel_token, peer_ticket
from wooly_bus.errors import BusError, RefusedError
from wooly_bus.keys import MAX_TOKEN, Key
from wooly_wis.messages import HostSessionRequest, PeerSessionReply, PeerSessionRequest
from wooly_wis.messages.sessions import PEER_MARK

from wooly_router.executors import Executors
from wooly_router.state.tasks import TaskRecord
from wooly_router.state.world import World

#: Seconds to wait for the executor.
HOST_S = 5.0
#: Length of the lease of a peer session, in seconds. It needs no renewal: it ends with its connection, or with its session.
LEASE_S = 30 * 86400.0


class Peers:
    """Opens and closes peer sessions.

    Args:
        key: signs tokens for data channels.
        world: the state that all routers share.
        executors: asks executors to host sessions.
        clock: returns seconds since the epoch.
    """

    def __init__(self, key: Key, world: World, executors: Executors, clock: Callable[[], float]) -> None:
        self._key, self._world, self._executors, self._clock = key, world, executors, clock

    async def open(self, record: TaskRecord, request: PeerSessionRequest) -> PeerSessionReply:
        """Open the peer session of a session at another executor.

        Raises:
            RefusedError: a session does not run there or belongs to another tenant, or the executor refuses.
        """
        other = await self._world.tasks.get(request.peer)
        if other is None or other.tenant != record.tenant:
            raise RefusedError("router.no_session", f"session {request.peer} is not open")
        for task, executor_id in ((record, request.executor_id), (other, request.peer_executor_id)):
            if task.state != "started" or executor_id not in [p.executor_id for p in task.parts]:
                raise RefusedError("router.no_session", f"session {task.id} does not run on executor {executor_id}")
        name = f"{record.id}{PEER_MARK}{[p.executor_id for p in record.parts].index(request.executor_id)}"
        now = self._clock()
        async with self._world.database.writing() as s:  # before it is hosted, so that it is closed in any case
            current = await self._world.tasks.locked(s, record.id) or record  # others may be opened at the same time
            peers = [p for p in current.wants.get("peers", []) if p != [request.peer_executor_id, name]]
            kept = [*peers, [request.peer_executor_id, name]]
            if not await self._world.tasks.change_wants(s, record.id, state="started", peers=kept):
                raise RefusedError("router.no_session", f"session {record.id} has ended")
        # The last peer session there, if there was one, belongs to a connection that has ended.
        await self._executors.close([request.peer_executor_id], name, "it is opened again")
        ask = HostSessionRequest(
            session_id=name,
            token=secrets.token_urlsafe(32),
            tenant=record.tenant,
            priority=record.priority,
            model=record.name.replace("\\", "/").rpartition("/")[2][:256],
            lease_s=LEASE_S,
            channel_key=self._key.public,
            at=now,
        )
        (answer,) = await self._executors.host([(request.peer_executor_id, ask)], HOST_S)
        if isinstance(answer, BusError):
            raise RefusedError(
                "router.no_peer",
                f"executor {request.peer_executor_id} does not take the session by which executor {request.executor_id} would "
                f"work with it: {answer}",
                retryable=True,
            ) from answer
        if isinstance(answer, BaseException):
            raise answer
        token = channel_token(
            self._key, session_id=name, tenant=record.tenant, executor_id=request.peer_executor_id, now=now
        )
        peer = {
            "executor_id": request.peer_executor_id,
            "endpoints": [e for e in answer.endpoints if not e.startswith("nats:")],
            "session_id": name,
            "token": token,
        }
        whose = {"session_id": record.id, "tenant": record.tenant, "executor_id": request.executor_id}
        ticket = peer_ticket(self._key, peer, now=now, **whose)
        if len(ticket) > MAX_TOKEN:
            raise RefusedError(
                "router.no_peer", f"executor {request.peer_executor_id} has too many endpoints; let it listen at fewer"
            )
        return PeerSessionReply(ticket=ticket)

    async def close(self, record: TaskRecord, reason: str) -> None:
        """Close the peer sessions of a session that has ended."""
        for executor_id, name in record.wants.get("peers", []):
            await self._executors.close([executor_id], name, reason)
