"""What two real trainings allocate and free, alone and many at once: bench/record_allocations.py."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

TRACE = Path(__file__).parent / "data" / "training_trace.zz"


def recorded() -> list[tuple[int, int | None]]:
    """Allocation `number` of so many bytes, or its end (None), in the order in which they happened."""
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
    """The trace as many sessions run it again and again, from different points and in bursts: (session, name, bytes or None).

    Each round of each session has another size of batch, so that no two ask for quite the same sizes. Ends after
    `allocations` allocations; what is not freed by then stays.
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
            elif name in live[s]:  # not what was allocated before the point at which the session began
                live[s].remove(name)
                yield s, name, None
