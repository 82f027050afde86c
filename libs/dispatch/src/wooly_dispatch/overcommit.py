"""The rule of overcommit: whether a session fits on a device whose memory is promised more than once.

A device of C bytes with an overcommit of p percent may promise C + C p / 100 bytes in total. Memory of sessions that cannot be
swapped out is *fixed*. Such a session gets physical memory only, no part of the overcommit: when it is admitted, it and all that
is promised so far, fixed or movable, must fit into C. A session that can be swapped out must fit beside the fixed memory, or it
could never run. A session that declares no size gets no promise and uses free memory. It counts with the default claim that an
administrator sets, or with what it uses, whichever is more (`counted`).

Placement, admission and hosting of sessions use this rule. It is pure: integers in bytes, percent in whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PERCENT = 1000
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Commitment:
    """A promise of `nbytes` of device memory to a session, or a request for one."""

    session: str
    nbytes: int
    swappable: bool = True


@dataclass(frozen=True, slots=True)
class Promises:
    """The sums of a device's promises, in bytes.

    Attributes:
        fixed: promised to sessions that cannot be swapped out.
        movable: promised to sessions that can be swapped out.
    """

    fixed: int = 0
    movable: int = 0

    def plus(self, nbytes: int, swappable: bool) -> Promises:
        """The sums with one more session."""
        if swappable:
            return Promises(self.fixed, self.movable + nbytes)
        return Promises(self.fixed + nbytes, self.movable)


def promises(granted: Iterable[Commitment]) -> Promises:
    """The sums over sessions."""
    found = Promises()
    for commitment in granted:
        found = found.plus(commitment.nbytes, commitment.swappable)
    return found


def counted(declared: int | None, claim: int, used: int) -> int:
    """The bytes with which a session counts against a device's promises.

    Args:
        declared: bytes that the session declared; None: no declaration.
        claim: bytes that a session without a declaration counts at least.
        used: bytes that the session has, on the device or swapped out.
    """
    return max(claim, used) if declared is None else declared


def limit(capacity: int, percent: int) -> int:
    """Maximum number of bytes that the device may promise.

    Raises:
        ValueError: `percent` is not in 0 to 1000.
    """
    if not 0 <= percent <= MAX_PERCENT:
        raise ValueError(f"the overcommit must be 0 to {MAX_PERCENT} percent, but is {percent}")
    return capacity + capacity * percent // 100


def headroom(promised: Promises, capacity: int, percent: int, swappable: bool) -> int:
    """Maximum promise, in bytes, to one more session; 0 or less if there is no room."""
    if not swappable:
        return capacity - promised.fixed - promised.movable
    return min(capacity - promised.fixed, limit(capacity, percent) - promised.fixed - promised.movable)


def refusal(nbytes: int, swappable: bool, promised: Promises, capacity: int, percent: int) -> str:
    """Why a session of `nbytes` does not fit, with the numbers; "" if the session fits. Without a size, it always fits."""
    if not nbytes:
        return ""
    most = limit(capacity, percent)
    room = f"the session asks for {size(nbytes)} of device memory"
    if promised.fixed + nbytes > capacity:
        return (
            f"{room}, but only {size(capacity - promised.fixed)} of {size(capacity)} are left: {size(promised.fixed)} belong to "
            f"sessions that cannot be swapped out"
        )
    if not swappable and promised.fixed + promised.movable + nbytes > capacity:
        return (
            f"{room} that is not swapped out, so it gets physical memory only, but {size(promised.fixed + promised.movable)} of "
            f"{size(capacity)} are promised already. Allow the session to be swapped out, or ask for at most "
            f"{size(max(0, capacity - promised.fixed - promised.movable))}"
        )
    if promised.fixed + promised.movable + nbytes > most:
        return (
            f"{room}, but {size(promised.fixed + promised.movable)} of {size(most)} are promised already "
            f"({size(capacity)} overcommitted by {percent} %)"
        )
    return ""


def size(n: int) -> str:
    """A number of bytes as text for people."""
    unit, name = (GIB, "GiB") if n >= GIB else (1 << 20, "MiB")
    hundredths = (n * 100 + unit // 2) // unit
    return f"{hundredths // 100}.{hundredths % 100:02} {name}"
