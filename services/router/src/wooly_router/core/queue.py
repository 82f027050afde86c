"""The queue of tasks that fit nowhere yet: by class, then by age. Pure.

Who comes later may go first where it fits and the one before does not, but not for ever. A task that has waited for `patience_s`
has devices *held*: as many as it needs, those that could take it when empty and are the least promised now; nothing behind it in
the queue is placed there. Each `aging_s` of waiting raises a task by a class in this queue (not on the device), so that a stream
of higher classes does not keep it out either. Thus it waits no longer than its patience, its ageing, and what already runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wooly_router.core.placement import IDLE, Claim, Placement, Pool, Want, fits
from wooly_router.core.tasks import is_due


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task in the queue. Times in seconds.

    Attributes:
        since: when it was submitted.
        not_before: earliest time of its next attempt.
    """

    task_id: str
    priority: int
    since: float
    want: Want
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Patience:
    """When a waiting task has devices held for it, and how long it takes to rise by a class. Seconds."""

    patience_s: float = 30.0
    aging_s: float = 600.0


def claims_of(want: Want, executor_ids: Iterable[str]) -> list[Claim]:
    """What a task takes of its devices."""
    return [Claim(e, want.required_vram, want.exclusive, want.swappable) for e in executor_ids]


def in_order(queue: Iterable[Waiting], now: float, patience: Patience) -> list[Waiting]:
    """The queue, first come first."""
    return sorted(queue, key=lambda w: (_rank(w, now, patience), w.since, w.task_id))


def _rank(waiting: Waiting, now: float, patience: Patience) -> int:
    return max(0, waiting.priority - int(max(0.0, now - waiting.since) // patience.aging_s))


def plan(
    queue: Iterable[Waiting], pool: Pool, now: float, patience: Patience = Patience()
) -> list[tuple[Waiting, Placement]]:
    """Where each task of the queue goes now, or why it waits, in the queue's order. The pool has the claims afterwards.

    Args:
        queue: tasks, in any order; those whose `not_before` is to come are passed over, and nothing is held for them.
        pool: the devices.
        now: seconds.
        patience: how long a task is overtaken.
    """
    return _plan(queue, pool, now, patience)[0]


def held_devices(queue: Iterable[Waiting], pool: Pool, now: float, patience: Patience = Patience()) -> frozenset[str]:
    """The devices that nothing new may be placed on, for the sake of tasks that wait. The pool has the others' claims."""
    patient = [w for w in queue if now - w.since >= patience.patience_s]  # nothing is held for the others
    return _plan(patient, pool, now, patience)[1]


def _plan(
    queue: Iterable[Waiting], pool: Pool, now: float, patience: Patience
) -> tuple[list[tuple[Waiting, Placement]], frozenset[str]]:
    decisions: list[tuple[Waiting, Placement]] = []
    held: set[str] = set()
    refused: dict[Want, Placement] = {}  # claims and holds only grow here: what was refused once stays so
    for waiting in in_order(queue, now, patience):
        if not is_due(waiting.not_before, now):
            continue
        placement = refused.get(waiting.want) or pool.place(waiting.want, held)
        decisions.append((waiting, placement))
        if placement.gpus:
            for claim in claims_of(waiting.want, [g.executor_id for g in placement.gpus]):
                pool.claim(claim)
            continue
        refused[waiting.want] = placement
        if now - waiting.since >= patience.patience_s:
            held.update(_hold(waiting.want, pool, held))
    return decisions, frozenset(held)


def _hold(want: Want, pool: Pool, held: set[str]) -> list[str]:
    """Devices for a task, to be kept until it fits; none if it could not run on an empty cluster."""
    able = [g for g in pool.gpus() if g.executor_id not in held and fits(want, g, IDLE)]
    if len(able) < want.gpu_count:
        return []

    def promised(executor_id: str) -> tuple[int, int, str]:
        load = pool.load(executor_id)
        return load.fixed + load.movable, load.sessions, executor_id

    return sorted([g.executor_id for g in able], key=promised)[: want.gpu_count]
