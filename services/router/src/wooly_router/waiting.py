"""Sessions that wait for devices: their places in the queue, and the requests of clients that ask for their turn.

A waiting session is a pending task with a lease, so all routers see the same queue. The client asks again and again, and each
question renews the lease. A session whose client stops asking leaves the queue when its lease ends.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping

from sqlalchemy.ext.asyncio import AsyncSession
from wooly_bus.errors import RefusedError
from wooly_wis.messages import OpenSessionReply, OpenSessionRequest, QueuePlace, SessionWait

from wooly_router.core.queue import in_order
from wooly_router.state.database import UNREACHABLE
from wooly_router.state.tasks import Lease, TaskRecord
from wooly_router.state.world import World

#: Seconds between two questions of the next session in the queue, and at most. A session further back asks less often, so that
#: a long queue costs little: the session at place n asks every n times `ASK_S`.
ASK_S, MAX_ASK_S = 0.5, 30.0
#: Minimum seconds between an answer and the next question of the same session. An earlier question is refused before it takes
#: part in placement, so a client that asks without a pause does not delay others. A session asks one question at a time, and
#: the sessions of a tenant are limited, so its questions are limited, too.
SOONEST_S = ASK_S / 2
#: What is stored of the placement of a session that waits.
WAITING: dict[str, object] = {"why": "waiting", "waits": {}, "fitting": 0}
#: Seconds by which a place's lease is longer than three questions, or than the opening by a router: one answer may take long.
LEASE_MARGIN_S = 6.0
#: The same for a session that goes on after the loss of its executor. If its place lapses, it fails, while a new one asks anew. A
#: router or NATS may be started again while it answers: its client waits for 20 s for the lost answer, and asks again.
LATE_MARGIN_S = 25.0


class SessionQueue:
    """The sessions that wait.

    Args:
        world: the state that all routers share.
        clock: returns seconds since the epoch.
    """

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world, self._clock = world, clock
        self._asking: set[str] = set()
        self._answered: dict[str, float] = {}

    async def join(self, s: AsyncSession, task: TaskRecord, token: str) -> None:
        """Give a new session its place: the lease by which its client may ask again."""
        await self._world.tasks.set_lease(s, Lease(task.id, token, self._clock() + 3 * _pause_s(1) + LEASE_MARGIN_S))

    async def keep(self, s: AsyncSession, task: TaskRecord, until: float) -> None:
        """Keep a session's place until a time, and for the question of its client after that time."""
        await self._world.tasks.keep_lease(s, task.id, until + _margin_s(task))

    async def put_back(self, session_id: str) -> None:
        """Free the devices of a session whose opening the database interrupted, if the database answers again.

        Otherwise the session keeps them until another router may open it.
        """
        with contextlib.suppress(*UNREACHABLE):
            async with self._world.database.deciding() as s:
                known = await self._world.tasks.get(session_id, s)
                if known is not None and known.state == "pending":
                    await self._world.tasks.take_devices(s, session_id, (), retry_at=None)

    async def enter(self, place: QueuePlace, tenant: str, known: TaskRecord | None = None) -> TaskRecord:
        """Return the session whose client asks for its turn. `leave` must follow.

        It is started if its client did not get the answer that opened it.

        Args:
            place: its place.
            tenant: its tenant.
            known: the session, if it was read just now, and belongs to this client.

        Raises:
            RefusedError: the session does not wait, another router examines it now, or its client asks too early.
        """
        task = known or await self._waiting(place, tenant)
        opens = task.state == "pending" and bool(task.parts) and (task.retry_at or 0.0) > self._clock()
        if task.id in self._asking or opens:
            raise RefusedError("router.opening", f"session {task.id} is being opened already", retryable=True)
        if 0 <= self._clock() - self._answered.get(task.id, float("-inf")) < SOONEST_S:
            raise RefusedError(
                "router.asked_early",
                f"session {task.id} asked less than {SOONEST_S:g} s after the last answer; wait for as long as the answer says",
                retryable=True,
            )
        self._asking.add(task.id)
        if task.wants.get("away"):
            async with self._world.database.writing() as s:
                await self._world.tasks.returned(s, task, self._clock())
            return await self._world.tasks.get(task.id) or task
        return task

    async def _waiting(self, place: QueuePlace, tenant: str) -> TaskRecord:
        """Return the session of a place.

        Raises:
            RefusedError: it does not wait, or belongs to another client.
        """
        lease, task = await self._world.tasks.leased(place.session_id)
        mine = lease is None or secrets.compare_digest(lease.token.encode(), place.token.encode())
        if task is None or task.kind != "session" or task.tenant != tenant or not mine:
            raise RefusedError("router.no_session", f"session {place.session_id} does not wait in the queue")
        if task.state == "failed":
            raise RefusedError(
                "router.place_lost", f"session {task.id} left the queue: {task.reason}; ask anew", retryable=True
            )
        if lease is None or task.state not in ("pending", "hibernated", "started"):
            why = f" ({task.reason})" if task.reason else ""
            raise RefusedError(
                "router.no_session", f"session {task.id} does not wait in the queue: it is {task.state}{why}"
            )
        return task

    def leave(self, session_id: str) -> None:
        """The answer to the client is ready."""
        self._asking.discard(session_id)
        now = self._clock()
        self._answered = {k: t for k, t in self._answered.items() if 0 <= now - t < SOONEST_S} | {session_id: now}

    async def wait(
        self, task: TaskRecord, token: str, why: str, would_fit: str, record: Mapping[str, object]
    ) -> OpenSessionReply:
        """Keep a session in the queue. Returns the answer to its client.

        Args:
            task: the session.
            token: its client's token.
            why: why it waits.
            would_fit: smaller requests that would start now, in words.
            record: why each device rejects it, as `placement.as_record` says; empty if no device was examined.

        Raises:
            RefusedError: the session was cancelled meanwhile.
        """
        now = self._clock()
        config, _ = await self._world.settings()
        async with self._world.database.deciding() as s:
            known = await self._world.tasks.get(task.id, s)
            if known is None or known.state != "pending":
                raise RefusedError("router.cancelled", f"session {task.id} was cancelled while it waited")
            await self._world.tasks.take_devices(s, task.id, (), retry_at=None)
            queue = [t.waiting() for t in await self._world.tasks.queue(s)]
            ids = [w.task_id for w in in_order(queue, now, config.patience())]
            place = ids.index(task.id) + 1
            reason = f"waits: place {place} of {len(ids)}: {why}"
            if known.reason != reason[:4096]:
                tell_at = None if known.reason.startswith("waits: ") else now
                await self._world.tasks.note_waiting(s, task.id, WAITING | dict(record), reason, tell_at)
            lease_s = 3 * _pause_s(place) + _margin_s(task)
            await self._world.tasks.set_lease(s, Lease(task.id, token, now + lease_s))
        return OpenSessionReply(
            session_id=task.id,
            token=token,
            lease_s=lease_s,
            wait=SessionWait(
                place=place,
                length=len(ids),
                reason=why[:4096],
                would_fit=would_fit[:1024],
                ask_again_s=_pause_s(place),
            ),
        )


def bound(request: OpenSessionRequest, task: TaskRecord) -> OpenSessionRequest:
    """Return the request of a session that waits, with the terms with which it waits: its client may not change them, and an
    administrator may have.
    """
    want = task.want()
    terms = {
        "priority": task.priority,
        "required_vram": task.required_vram,
        "gpu_count": want.gpu_count,
        "gpu_mode": task.gpu_mode,
        "swap": not task.noswap,
    }
    return request.model_copy(update=terms)


def _margin_s(task: TaskRecord) -> float:
    return LATE_MARGIN_S if task.attempt else LEASE_MARGIN_S


def _pause_s(place: int) -> float:
    return min(place * ASK_S, MAX_ASK_S)
