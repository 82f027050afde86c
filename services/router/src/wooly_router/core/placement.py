"""Chooses devices for a task: filter, then score.

Pure: the same pool and the same request always give the same choice and the same reasons.

**Filter.** A device can take a task if all of these hold: the device is active (not lost, cordoned or draining); it is in one
of the requested groups (or in no group, if the task requests none), and on the requested node; it can read the checkpoint from
which the task goes on; it has the requested vendor and architecture; no other task uses it exclusively, and it has no sessions
if the task wants it exclusively; it has enough memory.
The memory rule is the executor's admission rule: all promised memory fits into the capacity plus overcommit, and a running task
fits next to all memory that cannot be swapped out; a task that cannot be swapped out fits, with all promised memory, into the
capacity alone. A task that declares no size counts with the default claim or with what it uses, whichever is more.

**Score.** The device with the lowest cost wins. The cost in points is: 500 per session, utilization and starvation in permille,
and half a point per permille of promised memory. It is 1,000 points lower if all weights of the task are already on the device.
(Executors report the contents of their memory. The expected weights of a session are the contents that the last session of the
same tenant and model shared.) A device that the task prefers wins if it fits: the session of a child process prefers the device
of its parent, because processes can share memory on one device. Devices of equal cost are ordered by id. A task with several
devices goes to the node whose most expensive chosen device is cheapest. If no node has enough devices, the task goes to as few
nodes as possible.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from wooly_dispatch.overcommit import counted

POINTS_PER_SESSION = 500
RESIDENT_POINTS = 1000
#: More than any device costs.
NEAR_POINTS = 1_000_000
EMPTY: frozenset[str] = frozenset()
#: Maximum number of devices in an answer that explains why each device was rejected.
MAX_REASONS = 64


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that placement may choose. Memory in bytes, shares in permille.

    Attributes:
        groups: the groups of its node. A device in a group takes only tasks that request the group.
        overcommit: percentage of its memory that may be promised beyond its capacity.
        state: "active", or the reason why it takes no new task: "lost", "cordoned", "draining".
        weights: contents in its memory that a task could share, as names with their sharing domain
            (`wooly_bus.contents.shared_name`).
        stores: identities of the places from which its executor restores checkpoints.
    """

    executor_id: str
    node: str
    total: int
    vendor: str = ""
    arch: str = ""
    groups: frozenset[str] = EMPTY
    overcommit: int = 0
    state: str = "active"
    utilization: int = 0
    starvation: int = 0
    weights: frozenset[str] = EMPTY
    stores: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The devices that a task requests. `required_vram`: bytes on each device; None: no fixed amount.

    Attributes:
        claim: bytes on each device with which a task without a fixed amount counts.
        node: node of the devices, or the only executor to choose; empty: any.
        near: the executor that a task with one device prefers; empty: none.
        weights: contents that the task will probably share, named as in `Gpu.weights`.
        barred: devices that must not be chosen, because this task was lost there or they refused it.
        store: place of the checkpoints from which the task goes on; empty: it needs none.
    """

    gpu_count: int = 1
    required_vram: int | None = None
    exclusive: bool = False
    swappable: bool = True
    groups: tuple[str, ...] = ()
    node: str = ""
    near: str = ""
    vendor: str = ""
    arch: str = ""
    weights: tuple[str, ...] = ()
    barred: frozenset[str] = EMPTY
    claim: int = 0
    store: str = ""

    @property
    def asked(self) -> int:
        """Bytes that the task needs on each device, as far as it is known; 0: any device has enough."""
        return counted(self.required_vram, self.claim, 0)


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of one device that a running or starting task uses. Memory in bytes."""

    executor_id: str
    required_vram: int | None = None
    exclusive: bool = False
    swappable: bool = True


@dataclass(slots=True)
class Load:
    """The sum of all claims on one device. `movable` memory can be swapped out; `fixed` memory cannot."""

    sessions: int = 0
    exclusive: int = 0
    fixed: int = 0
    movable: int = 0

    def add(self, claim: Claim) -> None:
        """Add the claim of a task."""
        size = claim.required_vram or 0
        self.sessions += 1
        self.exclusive += claim.exclusive
        if claim.swappable:
            self.movable += size
        else:
            self.fixed += size

    def remove(self, claim: Claim) -> None:
        """Remove the claim of a task."""
        size = claim.required_vram or 0
        self.sessions -= 1
        self.exclusive -= claim.exclusive
        if claim.swappable:
            self.movable -= size
        else:
            self.fixed -= size


IDLE = Load()


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of a placement: all requested devices, or no device.

    Attributes:
        here: the cost of each chosen device, by component.
        next_best: the next cheapest device and its cost, if one was examined.
        waits: if no device was chosen, the reason for each rejected device: the first `MAX_REASONS` of them, by id.
        fitting: if too few devices fit, how many did.
    """

    gpus: tuple[Gpu, ...] = ()
    here: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    next_best: tuple[str, int] | None = None
    waits: Mapping[str, str] = field(default_factory=dict)
    fitting: int = 0


def fits(want: DeviceRequest, gpu: Gpu, load: Load) -> bool:
    """Tell whether the device can take one part of the task. `unfit` gives the reason in words."""
    if gpu.state != "active" or load.exclusive or (want.exclusive and load.sessions):
        return False
    if gpu.executor_id in want.barred or not _fits_groups(want, gpu) or not _fits_kind(want, gpu):
        return False
    if not _fits_node(want, gpu) or (want.store and want.store not in gpu.stores):
        return False
    asked = want.asked
    return not asked or asked <= room_for(gpu, load, swappable=want.swappable)


@dataclass(frozen=True, slots=True)
class Room:
    """What one more task may ask for on a device, by the rules of `fits`. Memory in bytes.

    Attributes:
        takes: it takes tasks of its groups and kind that ask for no memory.
        takes_exclusive: it takes such tasks also if they want it exclusively.
        swappable: the most memory for a task that can be swapped out; 0 if there is no room.
        fixed: the same for a task that cannot be swapped out.
    """

    takes: bool
    takes_exclusive: bool
    swappable: int
    fixed: int


def room_on(gpu: Gpu, load: Load) -> Room:
    """Return what one more task may ask for on a device next to its load."""
    if gpu.state != "active" or load.exclusive:
        return Room(False, False, 0, 0)
    swappable, fixed = (max(room_for(gpu, load, swappable=s), 0) for s in (True, False))
    return Room(True, not load.sessions, swappable, fixed)


def room_for(gpu: Gpu, load: Load, *, swappable: bool) -> int:
    """Return the largest number of bytes that a task may ask for on a device next to its load. It may be negative."""
    promised = load.fixed + load.movable
    if not swappable:
        return gpu.total - promised
    return min(gpu.total - load.fixed, gpu.total + gpu.total * gpu.overcommit // 100 - promised)


def _fits_groups(want: DeviceRequest, gpu: Gpu) -> bool:
    return not gpu.groups if not want.groups else not gpu.groups.isdisjoint(want.groups)


def _fits_node(want: DeviceRequest, gpu: Gpu) -> bool:
    return want.node in ("", gpu.node, gpu.executor_id)


def _fits_kind(want: DeviceRequest, gpu: Gpu) -> bool:
    return (not want.vendor or want.vendor == gpu.vendor) and (not want.arch or want.arch == gpu.arch)


def unfit(want: DeviceRequest, gpu: Gpu, load: Load) -> str:
    """Explain in words why the device cannot take one part of the task; empty if it can."""
    if fits(want, gpu, load):
        return ""
    if gpu.state != "active":
        return f"is {gpu.state}"
    if gpu.executor_id in want.barred:
        return "did not take the task in an earlier attempt"
    if not _fits_groups(want, gpu):
        if want.groups:
            return f"is not in any of the groups {', '.join(want.groups)}"
        return f"is reserved for the group{'s' * (len(gpu.groups) > 1)} {', '.join(sorted(gpu.groups))}"
    if not _fits_node(want, gpu):
        return f"is on node {gpu.node}, but the task requests {want.node}"
    if want.store and want.store not in gpu.stores:
        return "does not have the session's checkpoint, which is in another folder (WOOLY_EXECUTOR_CHECKPOINTS)"
    if not _fits_kind(want, gpu):
        return (
            f"is {gpu.vendor} {gpu.arch}".rstrip() + f", but the task requests {f'{want.vendor} {want.arch}'.strip()}"
        )
    if load.exclusive:
        return "is held exclusively by another session"
    if want.exclusive and load.sessions:
        return "has sessions, but the task requests an exclusive device"
    asked, promised = want.asked, load.fixed + load.movable
    limit = gpu.total + gpu.total * gpu.overcommit // 100
    if promised + asked > limit:
        of = f" ({gpu.total} overcommitted by {gpu.overcommit} %)" if gpu.overcommit else ""
        return f"has {max(limit - promised, 0)} bytes unreserved{of}, but the task requests {asked}"
    if load.fixed + asked > gpu.total:
        return f"has {gpu.total - load.fixed} bytes next to the memory that cannot be swapped out, but the task requests {asked}"
    return (
        f"has {max(gpu.total - promised, 0)} bytes of physical memory that are not promised, but the task requests {asked} bytes "
        "that cannot be swapped out"
    )


def cost_of(gpu: Gpu, load: Load) -> int:
    """Return the cost of a device in points, without the part that depends on the task."""
    promised = min(1000, 1000 * (load.fixed + load.movable) // max(gpu.total, 1))
    return POINTS_PER_SESSION * load.sessions + gpu.utilization + gpu.starvation + promised // 2


def _saved(want: DeviceRequest, gpu: Gpu) -> int:
    if not want.weights or not gpu.weights:
        return 0
    return RESIDENT_POINTS * sum(w in gpu.weights for w in want.weights) // len(want.weights)


def _preferred(want: DeviceRequest, gpu: Gpu) -> int:
    return NEAR_POINTS if want.near == gpu.executor_id and want.gpu_count == 1 else 0


class Pool:
    """Devices in the order of their cost, with the claims on them. Only `claim` and `release` change a pool.

    Args:
        gpus: all devices; ids are unique.
        claims: the claims of all tasks; claims on unknown devices are ignored.
    """

    def __init__(self, gpus: Iterable[Gpu], claims: Iterable[Claim] = ()) -> None:
        self._gpus = {g.executor_id: g for g in gpus}
        self._by_id = [g for _, g in sorted(self._gpus.items())]
        self._loads: dict[str, Load] = {}
        for claim in claims:
            if claim.executor_id in self._gpus:
                self._loads.setdefault(claim.executor_id, Load()).add(claim)
        #: Active devices by cost. There is one list per vendor, architecture, groups and "idle", because a task can reject a
        #: whole list.
        self._orders: dict[tuple[str, str, frozenset[str], bool], list[tuple[int, str]]] = {}
        self._holders: dict[str, set[str]] = {}
        for gpu in self._gpus.values():
            if gpu.state == "active":
                self._order(gpu).append((self._cost(gpu), gpu.executor_id))
            for digest in gpu.weights:
                self._holders.setdefault(digest, set()).add(gpu.executor_id)
        for order in self._orders.values():
            order.sort()
        self._refused: dict[DeviceRequest, Placement] = {}

    def __len__(self) -> int:
        return len(self._gpus)

    def load(self, executor_id: str) -> Load:
        """Return the claims on a device. The caller must not change them."""
        return self._loads.get(executor_id, IDLE)

    def gpus(self) -> Sequence[Gpu]:
        """All devices, by id."""
        return self._by_id

    def claim(self, claim: Claim) -> None:
        """Add the claim of a task on a device."""
        self._change(claim, Load.add)

    def release(self, claim: Claim) -> None:
        """Remove the claim of a task that has left a device."""
        self._change(claim, Load.remove)
        self._refused.clear()

    def _change(self, claim: Claim, change: Callable[[Load, Claim], None]) -> None:
        gpu = self._gpus[claim.executor_id]
        load = self._loads.setdefault(gpu.executor_id, Load())
        if gpu.state != "active":
            change(load, claim)
            return
        order = self._order(gpu)
        del order[bisect_left(order, (self._cost(gpu), gpu.executor_id))]
        change(load, claim)
        insort(self._order(gpu), (self._cost(gpu), gpu.executor_id))

    def _order(self, gpu: Gpu) -> list[tuple[int, str]]:
        idle = not self.load(gpu.executor_id).sessions
        return self._orders.setdefault((gpu.vendor, gpu.arch, gpu.groups, idle), [])

    def _cost(self, gpu: Gpu) -> int:
        return cost_of(gpu, self.load(gpu.executor_id))

    def place(self, want: DeviceRequest, held: Collection[str] = EMPTY) -> Placement:
        """Choose devices for one task. It claims nothing.

        Args:
            want: the request of the task.
            held: devices that are held for tasks before it in the queue.
        """
        known = self._refused.get(want) if not held else None
        if known is not None:
            return known
        fitting, after = 0, None
        if want.gpu_count == 1:
            chosen, after = self._cheapest(want, held)
        else:
            chosen, fitting = self._together(want, held)
        if chosen:
            here = {g.executor_id: self._explain(want, g) for g in chosen}
            return Placement(tuple(chosen), here, next_best=after)
        placement = Placement(waits=self._rejections(want, held), fitting=fitting)
        if not held:
            self._refused[want] = placement
        return placement

    def _fitting(self, want: DeviceRequest, held: Collection[str]) -> Iterator[tuple[int, Gpu]]:
        """Yield the devices that fit, cheapest first, without regard to weights."""
        orders = [
            order
            for (vendor, arch, groups, idle), order in self._orders.items()
            if (idle or not want.exclusive)
            and (not want.vendor or want.vendor == vendor)
            and (not want.arch or want.arch == arch)
            and (not groups if not want.groups else not groups.isdisjoint(want.groups))
        ]
        gpus, loads = self._gpus, self._loads
        for cost, executor_id in orders[0] if len(orders) == 1 else heapq.merge(*orders):
            gpu = gpus[executor_id]
            if executor_id not in held and fits(want, gpu, loads.get(executor_id, IDLE)):
                yield cost, gpu

    def _ranked(self, want: DeviceRequest, held: Collection[str]) -> Iterator[tuple[int, str]]:
        """Yield the devices that fit, cheapest for this task first, with regard to weights."""
        holders = {e for w in want.weights for e in self._holders.get(w, ())}
        if want.near in self._gpus:
            holders.add(want.near)
        near = [self._gpus[e] for e in holders if e not in held and fits(want, self._gpus[e], self.load(e))]
        first = sorted([(self._cost(g) - _saved(want, g) - _preferred(want, g), g.executor_id) for g in near])
        rest = ((c, g.executor_id) for c, g in self._fitting(want, holders.union(held) if holders else held))
        return heapq.merge(first, rest) if first else rest

    def _cheapest(self, want: DeviceRequest, held: Collection[str]) -> tuple[list[Gpu], tuple[str, int] | None]:
        ranked = list(islice(self._ranked(want, held), 2))
        return [self._gpus[e] for _, e in ranked[:1]], (ranked[1][1], ranked[1][0]) if len(ranked) > 1 else None

    def _together(self, want: DeviceRequest, held: Collection[str]) -> tuple[list[Gpu], int]:
        count = want.gpu_count
        nodes: dict[str, list[Gpu]] = {}
        costs: dict[str, int] = {}
        for cost, executor_id in self._ranked(want, held):
            gpu = self._gpus[executor_id]
            costs[executor_id] = cost
            on_node = nodes.setdefault(gpu.node, [])
            on_node.append(gpu)
            if len(on_node) == count:
                return on_node, count
        chosen: list[Gpu] = []
        while nodes and len(chosen) < count:
            missing = count - len(chosen)

            def worth(node: str, missing: int = missing) -> tuple[int, list[tuple[int, str]]]:
                best = nodes[node][:missing]
                return -len(best), sorted([(costs[g.executor_id], g.executor_id) for g in best], reverse=True)

            chosen += nodes.pop(min(nodes, key=worth))[:missing]
        return (chosen, count) if len(chosen) == count else ([], len(costs))

    def _explain(self, want: DeviceRequest, gpu: Gpu) -> dict[str, int]:
        load = self.load(gpu.executor_id)
        promised = min(1000, 1000 * (load.fixed + load.movable) // max(gpu.total, 1))
        parts = {
            "sessions": POINTS_PER_SESSION * load.sessions,
            "utilization": gpu.utilization,
            "starvation": gpu.starvation,
            "promised": promised // 2,
            "resident": -_saved(want, gpu),
            "near": -_preferred(want, gpu),
        }
        return {k: v for k, v in parts.items() if v} | {"cost": sum(parts.values())}

    def _rejections(self, want: DeviceRequest, held: Collection[str]) -> dict[str, str]:
        reasons = {}
        for gpu in self._by_id:
            why = unfit(want, gpu, self.load(gpu.executor_id))
            if not why and gpu.executor_id in held:
                why = "is held for a task that has waited longer"
            if why:
                reasons[gpu.executor_id] = why
                if len(reasons) == MAX_REASONS:
                    break
        return reasons


def summary(waits: Mapping[str, str], shown: int = 8) -> str:
    """Explain in one line why no device fits, with numbers; at most `shown` devices are named."""
    reasons = [f"{name} {why}" for name, why in waits.items()]
    return "; ".join(reasons[:shown]) + (f"; and {len(reasons) - shown} more" if len(reasons) > shown else "")


def as_record(want: DeviceRequest, placement: Placement) -> dict[str, object]:
    """Return the part of a placement that is stored with its task: "why here", or "why waiting"."""
    if placement.gpus:
        record: dict[str, object] = {"why": "here", "here": {k: dict(v) for k, v in placement.here.items()}}
        if placement.next_best is not None:
            record["next_best"] = {"executor_id": placement.next_best[0], "cost": placement.next_best[1]}
        return record
    shown: Sequence[tuple[str, str]] = list(placement.waits.items())[:32]
    return {"why": "waiting", "waits": dict(shown), "fitting": placement.fitting}
