"""Places the ranks of one program together: all of them, or none. Pure.

A *gang* is the ranks of one program of several processes. Each rank is a session with one device. Ranks may share a device: the
program says on how many devices it wants to be at least. Fewer devices are better than more, and one node is better than several,
so the order is: one device, several devices of one node, devices of several nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from wooly_router.core.placement import EMPTY, DeviceRequest, Placement, Pool


@dataclass(frozen=True, slots=True)
class Gang:
    """The ranks of one program.

    Attributes:
        task_id: id of the task that users see; empty: the task is no part of a gang.
        size: number of ranks.
        devices: least number of devices on which the ranks must be.
    """

    task_id: str = ""
    size: int = 1
    devices: int = 1


ALONE = Gang()


def shapes(gang: Gang, want: DeviceRequest) -> Iterator[DeviceRequest]:
    """Yield what the gang may ask for: numbers of devices, fewest first, each with the memory of the ranks that share a device.

    Args:
        gang: the gang.
        want: the request of one rank.
    """
    least = gang.size if want.exclusive else min(gang.devices, gang.size)
    before = 0
    for count in range(least, gang.size + 1):
        share = -(-gang.size // count)
        if share == before:
            continue  # more devices would not leave more room on any of them
        before = share
        required = None if want.required_vram is None else want.required_vram * share
        yield replace(want, gpu_count=count, required_vram=required, claim=want.claim * share)
        if not want.asked:
            return


def place_gang(gang: Gang, want: DeviceRequest, pool: Pool, held: Collection[str] = EMPTY) -> Placement:
    """Choose a device for each rank. It claims nothing.

    Neighbouring ranks get the same device or the same node.

    Args:
        gang: the gang.
        want: the request of one rank.
        pool: the devices.
        held: devices that are held for tasks before it in the queue.

    Returns:
        The placement. If it has devices, it has one per rank, in the order of the ranks.
    """
    several: Placement | None = None
    refused = Placement()
    for shape in shapes(gang, want):
        found = pool.place(shape, held)
        if not found.gpus:
            refused = found
        elif len({gpu.node for gpu in found.gpus}) == 1:
            return _spread(gang, found)
        else:
            several = several or found
    return refused if several is None else _spread(gang, several)


def _spread(gang: Gang, found: Placement) -> Placement:
    gpus = sorted(found.gpus, key=lambda g: (g.node, g.executor_id))
    return replace(found, gpus=tuple([gpus[rank * len(gpus) // gang.size] for rank in range(gang.size)]))


def state_of(ranks: Iterable[tuple[str, bool]]) -> str:
    """The state of a gang.

    Args:
        ranks: of each rank, its state and whether it has ever started. A rank that never used a device does not count.
    """
    known = list(ranks)
    counted = {state for state, began in known if began} or {state for state, _ in known}
    return next(s for s in ("started", "failed", "cancelled", "pending", "hibernated", "completed") if s in counted)
