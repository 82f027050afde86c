"""Decides which sessions leave the device for an allocation, and which sessions are admitted. Pure functions.

The eviction policy (`choose`): a large allocation leaves the reserve free, if sessions can be swapped out for it. A session is
*eligible* if it is resident and swappable, has been idle long enough, and there is space elsewhere for the memory that it frees.
P0 sessions are victims only of P0 sessions, and only if no other session is eligible. Within these two groups, the session that
was least recently a victim goes first, and sessions that never were go before all others. So no session is a victim twice before
every other eligible session was one.

A session of class P0 or P1 may also preempt: take the memory of a session of a lower class that is between two programs, however
short it has been idle. The lowest class goes first, and nobody is preempted for the reserve.

Only bytes that become free count: content that a remaining session shares stays. Content
with a clean copy elsewhere is dropped. Other content goes to pinned host memory up to its budget, then to disk.

The law of admission (`admit`): each admitted session can be resident together with all sessions that cannot be swapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from wooly_dispatch.overcommit import Commitment, promises, refusal

from wooly_executor.errors import AdmissionError

GIB = 1 << 30
MINUTE_NS = 60 * 1_000_000_000
#: Lowest class that may preempt.
PREEMPTING = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy, as an operator sets it.

    Attributes:
        reserve: bytes that a large allocation leaves free.
        large: minimum bytes of a large allocation. Smaller allocations may use the reserve.
        idle_ns: minimum idle time before a session may be swapped out, in ns.
        preempt: sessions of class P0 and P1 may take memory of lower classes between two programs.
    """

    reserve: int = 2 * GIB
    large: int = 16 << 20
    idle_ns: int = 5 * MINUTE_NS
    preempt: bool = True


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes on the device that one session holds, or several sessions share.

    Attributes:
        nbytes: size.
        clean: an equal copy is in host memory or on disk.
    """

    nbytes: int
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Resident:
    """A session whose memory is on the device.

    Attributes:
        session: session id.
        priority: class, 0 (highest) to 4.
        idle_since: when it last had work, in ns; None: it has work, or is the session that allocates.
        contents: keys of its contents.
        swappable: it may be swapped out.
        chosen: number of the last decision that made it a victim; 0: it never was one.
        between: it is between two programs, so its memory may be taken now, although it has work.
    """

    session: str
    priority: int
    idle_since: int | None
    contents: tuple[int, ...]
    swappable: bool = True
    chosen: int = 0
    between: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes of the device, and of the budgets of pinned host memory and disk."""

    device: int
    host: int
    disk: int


class Place(Enum):
    """The place to which content moves when it leaves the device."""

    HOST = "host"
    DISK = "disk"
    NOWHERE = "nowhere"  # a clean copy exists, so the bytes are dropped


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one content, with its last holder."""

    content: int
    nbytes: int
    to: Place


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What to do before an allocation.

    Attributes:
        victims: sessions to swap out, in this order.
        moves: contents that leave with the victims. Content that a remaining session shares stays.
        freed: bytes that become free.
        short: bytes that are missing even after all possible evictions; then no session is swapped out.
        reserve_short: bytes that are missing to keep the reserve.
    """

    victims: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    freed: int = 0
    short: int = 0
    reserve_short: int = 0


def choose(
    nbytes: int,
    now: int,
    room: Room,
    residents: Iterable[Resident],
    contents: Mapping[int, Content],
    policy: Policy = Policy(),
    *,
    priority: int,
    preempting: bool = False,
) -> SwapPlan:
    """Choose the victims for an allocation of `nbytes` at the time `now` (ns), by a session of class `priority`.

    With `preempting`, sessions that `may_preempt` names are eligible between two programs, and the reserve may be used.

    `residents` must list all sessions on the device, also the session that allocates. Otherwise shared content would count as
    free when one of its sessions leaves.
    """
    residents = list(residents)
    wanted = nbytes + (policy.reserve if nbytes >= policy.large and not preempting else 0) - room.device
    if wanted <= 0:
        return SwapPlan()
    holders = Counter(key for r in residents for key in set(r.contents))
    leaving: list[Resident] = []
    moves: list[Move] = []
    freed, host, disk = 0, room.host, room.disk
    taken = priority if preempting else None
    for r in _in_order([r for r in residents if may_take(priority, r.priority)], now, policy, taken):
        mine = sorted(key for key in set(r.contents) if holders[key] == 1 and contents[key].nbytes)
        placed, host_then, disk_then = _place(mine, contents, host, disk)
        if placed is None:
            continue  # no space elsewhere: the session stays, and so does the content that it shares
        host, disk = host_then, disk_then
        moves += placed
        freed += sum(move.nbytes for move in placed)
        leaving.append(r)
        holders.subtract(set(r.contents))
        if freed >= wanted:
            break
    short = max(0, nbytes - room.device - freed)
    if short:
        return SwapPlan(short=short)
    gone = {move.content for move in moves}
    victims = tuple(r.session for r in leaving if not gone.isdisjoint(r.contents))
    return SwapPlan(victims, tuple(moves), freed, 0, max(0, wanted - freed))


def may_take(priority: int, other: int) -> bool:
    """Whether a session of class `priority` may have a session of class `other` swapped out."""
    return other != 0 or priority == 0


def may_preempt(priority: int, other: int) -> bool:
    """Whether a session of class `priority` may take the memory of a session of class `other` that has work."""
    return priority <= PREEMPTING and other > priority


def _in_order(residents: Iterable[Resident], now: int, policy: Policy, preempting: int | None) -> list[Resident]:
    """The eligible sessions in the order of eviction.

    First those that were idle long enough: P0 last, then least recently a victim, then lowest class, then longest idle. Then
    those that a session of class `preempting` may preempt: lowest class first, then least recently a victim.
    """
    idle, between = [], []
    for r in residents:
        if not r.swappable:
            continue
        if r.idle_since is not None and now - r.idle_since >= policy.idle_ns:
            idle.append(((r.priority == 0, r.chosen, -r.priority, r.idle_since, r.session), r))
        elif r.between and preempting is not None and may_preempt(preempting, r.priority):
            between.append(((-r.priority, r.chosen, r.session), r))
    first = [r for _, r in sorted(idle, key=lambda known: known[0])]
    return first + [r for _, r in sorted(between, key=lambda known: known[0])]


def _place(
    keys: Iterable[int], contents: Mapping[int, Content], host: int, disk: int
) -> tuple[list[Move] | None, int, int]:
    """The place of each content, and the remaining budgets. None instead of the moves if a content has no place."""
    moves = []
    for key in keys:
        content = contents[key]
        if content.clean:
            to = Place.NOWHERE
        elif content.nbytes <= host:
            to, host = Place.HOST, host - content.nbytes
        elif content.nbytes <= disk:
            to, disk = Place.DISK, disk - content.nbytes
        else:
            return None, host, disk
        moves.append(Move(key, content.nbytes, to))
    return moves, host, disk


# -- admission -------------------------------------------------------------------------------------------------------


def admit(asked: Commitment, granted: Iterable[Commitment], capacity: int, percent: int) -> None:
    """Check that a session may be admitted to a device of `capacity` bytes, overcommitted by `percent` (20: up to 120 % of it).

    Raises:
        AdmissionError: the session is refused. The message has the numbers.
        ValueError: the percentage is not between 0 and 1000.
    """
    why = refusal(asked.nbytes, asked.swappable, promises(granted), capacity, percent)
    if why:
        raise AdmissionError(why)
