"""The queue of jobs and sessions that do not fit on any device yet: by class, then by age. Pure.

A later task may overtake an earlier task that does not fit, but not without end. When a task has waited for `patience_s`, the
queue *holds* devices for it: as many as the task needs, of those that could take it when empty, the least promised first. No
task behind it in the queue is placed there. Each `aging_s` of waiting raises a task by one class in this queue (not on the
device), so that a stream of tasks of higher classes cannot block it. The ranks of a gang take one turn together. So the waiting
time is limited by patience, aging and the tasks that already run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from wooly_router.core.gangs import ALONE, Gang, place_gang, shapes
from wooly_router.core.placement import IDLE, Claim, DeviceRequest, Placement, Pool, fits
from wooly_router.core.tasks import is_due


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task in the queue. Times in seconds.

    Attributes:
        since: time at which the task was submitted.
        not_before: earliest time of its next attempt.
        gang: the ranks of its program. They are placed together, when the turn of any of them comes.
    """

    task_id: str
    priority: int
    since: float
    want: DeviceRequest
    not_before: float = 0.0
    gang: Gang = ALONE

    def place(self, pool: Pool, held: Collection[str]) -> Placement:
        """Choose its devices; those of a gang, one per rank."""
        if self.gang.task_id:
            return place_gang(self.gang, self.want, pool, held)
        return pool.place(self.want, held)


@dataclass(frozen=True, slots=True)
class Patience:
    """When devices are held for a waiting task, and how long the task takes to rise by one class. Seconds."""

    patience_s: float = 30.0
    aging_s: float = 600.0


def claims_of(want: DeviceRequest, executor_ids: Iterable[str]) -> list[Claim]:
    """Return the claims of a task on its devices."""
    return [Claim(e, want.asked or None, want.exclusive, want.swappable) for e in executor_ids]


def in_order(queue: Iterable[Waiting], now: float, patience: Patience) -> list[Waiting]:
    """Sort the queue: the next task comes first."""
    return sorted(queue, key=lambda w: (_rank(w, now, patience), w.since, w.task_id))


def _rank(waiting: Waiting, now: float, patience: Patience) -> int:
    return max(0, waiting.priority - int(max(0.0, now - waiting.since) // patience.aging_s))


def plan(
    queue: Iterable[Waiting], pool: Pool, now: float, patience: Patience = Patience()
) -> list[tuple[Waiting, Placement]]:
    """Decide where each task of the queue starts now, or why it waits; in the queue's order.

    Afterwards the pool has the new claims.

    Args:
        queue: tasks in any order. Tasks whose `not_before` is in the future are skipped, and no device is held for them.
        pool: the devices.
        now: seconds.
        patience: how long later tasks may overtake a task.
    """
    return _plan(queue, pool, now, patience)[0]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a task gets if it is examined now.

    Attributes:
        placement: its devices, or why it waits.
        held: the devices that are held for tasks before it.
    """

    placement: Placement
    held: frozenset[str]


def turn_of(task: Waiting, queue: Iterable[Waiting], pool: Pool, now: float, patience: Patience = Patience()) -> Turn:
    """Decide whether one task starts now: the tasks before it in the queue get their devices first.

    Afterwards the pool has the claims of the tasks before it. `queue` may contain the task itself.
    """
    gang = task.gang.task_id
    others = [w for w in queue if w.task_id != task.task_id and not (gang and w.gang.task_id == gang)]
    ahead = in_order([*others, task], now, patience)
    _, held = _plan(ahead[: ahead.index(task)], pool, now, patience)
    return Turn(task.place(pool, held), held)


def _plan(
    queue: Iterable[Waiting], pool: Pool, now: float, patience: Patience
) -> tuple[list[tuple[Waiting, Placement]], frozenset[str]]:
    decisions: list[tuple[Waiting, Placement]] = []
    held: set[str] = set()
    # Claims and holds only grow here, so a request that was refused once stays refused.
    refused: dict[tuple[DeviceRequest, Gang], Placement] = {}
    gangs: set[str] = set()
    for waiting in in_order(queue, now, patience):
        if not is_due(waiting.not_before, now) or waiting.gang.task_id in gangs:
            continue
        if waiting.gang.task_id:  # its other ranks get their devices with this one
            gangs.add(waiting.gang.task_id)
        key = waiting.want, waiting.gang
        placement = refused.get(key) or waiting.place(pool, held)
        decisions.append((waiting, placement))
        if placement.gpus:
            for claim in claims_of(waiting.want, [g.executor_id for g in placement.gpus]):
                pool.claim(claim)
            continue
        refused[key] = placement
        if now - waiting.since >= patience.patience_s:
            wants = shapes(waiting.gang, waiting.want) if waiting.gang.task_id else [waiting.want]
            held.update(next((found for want in wants if (found := _hold(want, pool, held))), []))
    return decisions, frozenset(held)


def _hold(want: DeviceRequest, pool: Pool, held: set[str]) -> list[str]:
    """Hold devices for a task until it fits. Empty if the task could not run even on an empty cluster."""
    able = [g for g in pool.gpus() if g.executor_id not in held and fits(want, g, IDLE)]
    if len(able) < want.gpu_count:
        return []

    def promised(executor_id: str) -> tuple[int, int, str]:
        load = pool.load(executor_id)
        return load.fixed + load.movable, load.sessions, executor_id

    return sorted([g.executor_id for g in able], key=promised)[: want.gpu_count]
