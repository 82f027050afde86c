"""Says which smaller request would start now, for the client of a session that waits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from wooly_router.core.placement import EMPTY, DeviceRequest, Pool, fits, room_for


def would_fit(want: DeviceRequest, pool: Pool, held: Collection[str] = EMPTY) -> str:
    """Return the requests that would start now and differ from `want` in one setting, in words; empty if there are none.

    Args:
        want: the request of the session that waits.
        pool: the devices, with the claims of the tasks before it.
        held: the devices that are held for tasks before it.
    """
    found = [words for smaller, words in _smaller(want, pool, held) if pool.place(smaller, held).gpus]
    return ", or ".join(found)


def _smaller(want: DeviceRequest, pool: Pool, held: Collection[str]) -> Iterator[tuple[DeviceRequest, str]]:
    if want.asked:
        least = replace(want, required_vram=1)
        rooms = sorted(
            [
                room_for(g, pool.load(g.executor_id), swappable=want.swappable)
                for g in pool.gpus()
                if g.executor_id not in held and fits(least, g, pool.load(g.executor_id))
            ],
            reverse=True,
        )
        if len(rooms) >= want.gpu_count:
            room = min(rooms[want.gpu_count - 1], want.asked)
            yield replace(want, required_vram=room), f"{room} bytes on each device (WOOLYAI_REQUIRED_VRAM)"
    for count in range(want.gpu_count - 1, 0, -1):
        fewer = replace(want, gpu_count=count)
        if pool.place(fewer, held).gpus:
            yield fewer, f"{count} device{'s' * (count > 1)} (WOOLYAI_GPU_COUNT)"
            break
    if want.exclusive:
        yield replace(want, exclusive=False), "a shared device (WOOLYAI_GPU_MODE=shared)"
    if not want.swappable:
        yield replace(want, swappable=True), "memory that may be swapped out (WOOLYAI_SWAP_FROM_VRAM=1)"
