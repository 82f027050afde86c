"""May a session come to a device whose memory is promised more than once? Whoever places, admits or hosts one asks here.

A device of C bytes, overcommitted by p percent, may promise C + C p / 100 in all. What cannot be swapped out is *fixed* and must
fit in the physical memory; beside it, the largest session that can be swapped out must still be able to be resident, or it could
never run. A session that declares no size is promised nothing: it takes what is free.

Pure: integers in bytes, percent in whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PERCENT = 1000
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a session was promised, or asks for: `nbytes` of device memory."""

    session: str
    nbytes: int
    swappable: bool = True


@dataclass(frozen=True, slots=True)
class Promises:
    """What a device has promised.

    Attributes:
        fixed: to sessions that cannot be swapped out.
        movable: to all others.
        largest: to the largest of these.
    """

    fixed: int = 0
    movable: int = 0
    largest: int = 0

    def plus(self, nbytes: int, swappable: bool) -> Promises:
        """With one more session."""
        if swappable:
            return Promises(self.fixed, self.movable + nbytes, max(self.largest, nbytes))
        return Promises(self.fixed + nbytes, self.movable, self.largest)


def promises(granted: Iterable[Commitment]) -> Promises:
    """The sums over sessions."""
    found = Promises()
    for commitment in granted:
        found = found.plus(commitment.nbytes, commitment.swappable)
    return found


def limit(capacity: int, percent: int) -> int:
    """What may be promised in all.

    Raises:
        ValueError: the percentage is not one from 0 to 1000.
    """
    if not 0 <= percent <= MAX_PERCENT:
        raise ValueError(f"the overcommit must be 0 to {MAX_PERCENT} percent, not {percent}")
    return capacity + capacity * percent // 100


def headroom(promised: Promises, capacity: int, percent: int, swappable: bool) -> int:
    """The most that one more session may ask for; 0 or less: nothing."""
    physical = capacity - promised.fixed - (0 if swappable else promised.largest)
    return min(physical, limit(capacity, percent) - promised.fixed - promised.movable)


def refusal(nbytes: int, swappable: bool, promised: Promises, capacity: int, percent: int) -> str:
    """Why a session of `nbytes` may not come, with the numbers; "" if it may."""
    most = limit(capacity, percent)
    room = f"{size(nbytes)} of device memory asked for"
    if promised.fixed + nbytes > capacity:
        return (
            f"{room}: of {size(capacity)}, {size(promised.fixed)} belong to sessions that cannot be swapped out, "
            f"{size(capacity - promised.fixed)} are left"
        )
    if not swappable and promised.fixed + nbytes + promised.largest > capacity:
        return (
            f"{room} for a session that cannot be swapped out: of {size(capacity)}, {size(promised.fixed)} belong to such "
            f"sessions, and {size(promised.largest)} are needed whenever the largest of the others runs. Allow it to be swapped, "
            f"or ask for at most {size(max(0, capacity - promised.fixed - promised.largest))}"
        )
    if promised.fixed + promised.movable + nbytes > most:
        return (
            f"{room}: {size(promised.fixed + promised.movable)} are promised already, of {size(most)} "
            f"({size(capacity)} overcommitted by {percent} %)"
        )
    return ""


def size(n: int) -> str:
    """Bytes for people."""
    unit, name = (GIB, "GiB") if n >= GIB else (1 << 20, "MiB")
    hundredths = (n * 100 + unit // 2) // unit
    return f"{hundredths // 100}.{hundredths % 100:02} {name}"
