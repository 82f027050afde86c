"""Recorded allocations of two real trainings, for one session or many. bench/record_allocations.py records them."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

TRACE = Path(__file__).parent / "data" / "training_trace.zz"


def recorded() -> list[tuple[int, int | None]]:
    """The recorded events in order: (number of the allocation, its bytes), or (number, None) when it is freed."""
    data = zlib.decompress(TRACE.read_bytes())
    found: list[tuple[int, int | None]] = []
    count = 0
    for n in struct.unpack(f"<{len(data) // 8}q", data):
        if n >= 0:
            found.append((count, n))
            count += 1
        else:
            found.append((count + n, None))
    return found


def tenants(sessions: int, allocations: int, seed: int = 0) -> Iterator[tuple[int, tuple[int, int, int], int | None]]:
    """Yield the trace as many sessions would run it: repeatedly, from different starting points, in bursts.

    Each round of each session has another batch size, so that the sizes differ. The trace ends after `allocations` allocations;
    the remaining ones are not freed.

    Args:
        sessions: number of sessions.
        allocations: number of allocations.
        seed: seed of the random numbers.

    Yields:
        Session, name of the allocation, and its bytes; None: the allocation is freed.
    """
    trace, chance = recorded(), random.Random(seed)
    where = [chance.randrange(len(trace)) for _ in range(sessions)]
    rounds, scale = [0] * sessions, [1.0] * sessions
    live: list[set[tuple[int, int, int]]] = [set() for _ in range(sessions)]
    while True:
        s = chance.randrange(sessions)
        for _ in range(chance.randrange(1, 200)):
            if where[s] == len(trace):
                where[s], rounds[s], scale[s] = 0, rounds[s] + 1, chance.uniform(0.5, 2)
            number, nbytes = trace[where[s]]
            where[s] += 1
            name = (s, rounds[s], number)
            if nbytes is not None:
                if not allocations:
                    return
                allocations -= 1
                live[s].add(name)
                yield s, name, int(nbytes * scale[s])
            elif name in live[s]:  # skip allocations from before the starting point of the session
                live[s].remove(name)
                yield s, name, None
