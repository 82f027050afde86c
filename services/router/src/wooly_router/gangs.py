"""The ranks of programs of several processes. Each rank is a session, and all ranks are one task.

The first rank that asks for a device gets devices for all: the other ranks are stored as pending sessions with their devices,
which are *reserved* for them until they ask. A rank that never asks is cancelled when the last of the others has ended.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession
from wooly_wis.messages import GangPlace
from wooly_wis.messages.sessions import GANG_ID_CHARS

from wooly_router.core.tasks import ENDED
from wooly_router.state.tasks import Lease, PartRecord, TaskRecord, rank_id
from wooly_router.state.world import World

#: Maximum number of starts of a program that are told apart although its launcher gives them the same id.
STARTS = 64
#: Seconds for which a device is reserved for a rank that has not asked for it, after any rank has last asked for one. While ranks
#: run, it stays reserved.
RESERVED_S = 120.0


class Gangs:
    """The gangs of all tenants.

    Args:
        world: the state that all routers share.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    async def enlist(self, s: AsyncSession, task: TaskRecord, place: GangPlace) -> tuple[TaskRecord, bool]:
        """Make a new session a rank of its gang.

        A process that a rank has started has the rank's variables, too. If the rank has its session already, this session is one
        of its own. A process that asks again while its session waits got no answer, so it gets the same session.

        Args:
            s: a session of `Database.deciding`.
            task: the new session.
            place: what the client says.

        Returns:
            The session with the id and the terms of the rank, and whether it is stored already.
        """
        for start in range(STARTS):
            known = await self._world.tasks.gang(_id_of(task.tenant, place.gang_id, start), s)
            if not known or not all(r.state in ENDED for r in known):
                break
        else:
            return task, False
        name = _id_of(task.tenant, place.gang_id, start)
        size, devices = (known[0].gang.size, known[0].gang.devices) if known else (place.size, place.devices)
        mine = next((r for r in known if r.rank == place.rank), None)
        if place.rank >= size or (mine is not None and not is_reserved(mine) and not _same_process(mine, task)):
            return task, False
        gang = {"task": name, "rank": place.rank, "size": size, "devices": devices}
        if mine is None:
            return replace(task, id=rank_id(name, place.rank), wants=task.wants | {"gang": gang}), False
        # The terms of the first rank hold for all: their devices were chosen with them.
        taken = replace(mine, name=task.name, client_host=task.client_host, wants=mine.wants | _unreserved(mine, task))
        await self._world.tasks.take_over(s, taken)
        return taken, True

    async def reserve(self, s: AsyncSession, task: TaskRecord, parts: Sequence[PartRecord], now: float) -> None:
        """Reserve the devices of the other ranks: `parts` has the device of each rank."""
        gang = task.gang
        known = {r.rank: r for r in await self._world.tasks.gang(gang.task_id, s)}
        for rank, part in enumerate(parts):
            on = {"on": part.executor_id}
            other = known.get(rank)
            if rank == task.rank:
                continue
            if other is None:
                wants: dict[str, Any] = task.wants | {
                    "gang": task.wants["gang"] | {"rank": rank, "reserved": True} | on
                }
                reason = f"a device is reserved for rank {rank} of {gang.size}, which has not asked for it"
                other = replace(
                    task, id=rank_id(gang.task_id, rank), wants=wants, reason=reason, parts=(part,), created_at=now
                )
                await self._world.tasks.add(s, other)
                await self._world.tasks.set_lease(s, Lease(other.id, secrets.token_urlsafe(32), now + RESERVED_S))
            elif other.state == "pending":
                await self._world.tasks.take_devices(s, other.id, (part,), retry_at=None)
                await self._world.tasks.change_wants(s, other.id, gang=other.wants["gang"] | on)

    async def others(self, record: TaskRecord) -> list[TaskRecord]:
        """The ranks of a session's gang that have not ended, without the session."""
        if not record.gang.task_id:
            return []
        known = await self._world.tasks.gang(record.gang.task_id)
        return [r for r in known if r.id != record.id and r.state not in ENDED]


def is_reserved(record: TaskRecord) -> bool:
    """Whether a session is that of a rank which has not asked for its device."""
    return record.state == "pending" and bool((record.wants.get("gang") or {}).get("reserved"))


def reserved_for(record: TaskRecord) -> str:
    """The executor that was chosen for a rank together with those of the other ranks; empty: none, or the rank has lost it."""
    return "" if record.attempt else str((record.wants.get("gang") or {}).get("on", ""))


def _same_process(waiting: TaskRecord, task: TaskRecord) -> bool:
    """Whether a rank that waits for its first device is of the process that asks for one."""
    process = [(t.client_host, t.wants.get("pid")) for t in (waiting, task)]
    return waiting.state == "pending" and not waiting.attempt and process[0] == process[1]


def _unreserved(record: TaskRecord, task: TaskRecord) -> dict[str, Any]:
    return {"gang": record.wants["gang"] | {"reserved": False}, "pid": task.wants.get("pid")}


def _id_of(tenant: str, gang_id: str, start: int) -> str:
    text = "\0".join([tenant, gang_id, str(start)])
    return hashlib.sha256(text.encode()).hexdigest()[:GANG_ID_CHARS]
