"""Who must leave the device so that an allocation fits, and who may come at all. Functions of what they are told.

The policy (`choose`): a large allocation leaves the reserve free, if sessions can leave for it. *Eligible* is a session that is
resident, may be swapped, has been idle long enough, and whose leaving frees memory that there is room for elsewhere. Those of P0
go only when no other eligible one is left. Within each of these two groups whoever was chosen longest ago goes first (those
never chosen before all others), so that none goes twice while another eligible one did not go in between. Only bytes that become
free count: content of a session that stays, stays. What has a copy elsewhere already is dropped; all else goes to pinned host
memory while its budget lasts, then to disk.

The law of admission (`admit`): every session that is let in can be resident beside all those that cannot be swapped.
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


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator may set.

    Attributes:
        reserve: bytes that a large allocation leaves free.
        large: an allocation of this many bytes is a large one. Smaller ones may use the reserve: it is there for them.
        idle_ns: how long a session must have been idle before it may be swapped out.
    """

    reserve: int = 2 * GIB
    large: int = 16 << 20
    idle_ns: int = 5 * MINUTE_NS


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes on the device, held by one session or shared by several.

    Attributes:
        clean: an equal copy is in host memory or on disk already.
    """

    nbytes: int
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Resident:
    """A session whose memory is on the device.

    Attributes:
        priority: 0 (highest) to 4.
        idle_since: when it last had work queued or running, ns; None while it has, or is the one that allocates.
        contents: what it holds, by key into the contents.
        swappable: it may be swapped out at all.
        chosen: the number of the choice at which it was last a victim, 0 if it never was.
    """

    session: str
    priority: int
    idle_since: int | None
    contents: tuple[int, ...]
    swappable: bool = True
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes free on the device, and what is left of the budgets for pinned host memory and disk."""

    device: int
    host: int
    disk: int


class Place(Enum):
    """Where content goes that leaves the device."""

    HOST = "host"
    DISK = "disk"
    NOWHERE = "nowhere"  # a clean copy exists


@dataclass(frozen=True, slots=True)
class Move:
    """One content leaves, with its last holder."""

    content: int
    nbytes: int
    to: Place


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """What to do before an allocation.

    Attributes:
        victims: sessions to swap out, in this order.
        moves: the contents that leave with them. What a victim shares with a session that stays is not among them.
        freed: bytes that become free.
        short: bytes by which the allocation will not fit whatever is done; nobody is swapped out then.
        reserve_short: bytes by which the reserve cannot be kept.
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
) -> SwapPlan:
    """Who leaves before `nbytes` are allocated at the time `now` (ns).

    `residents` are all sessions on the device, also the one that allocates: what a session that is not listed holds would count
    as nobody's.
    """
    residents = list(residents)
    wanted = nbytes + (policy.reserve if nbytes >= policy.large else 0) - room.device
    if wanted <= 0:
        return SwapPlan()
    holders = Counter(key for r in residents for key in set(r.contents))
    leaving: list[Resident] = []
    moves: list[Move] = []
    freed, host, disk = 0, room.host, room.disk
    for r in _in_order(residents, now, policy):
        mine = sorted(key for key in set(r.contents) if holders[key] == 1 and contents[key].nbytes)
        placed, host_then, disk_then = _place(mine, contents, host, disk)
        if placed is None:
            continue  # there is no room for what it would leave behind: it stays, and so does what others share with it
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


def _in_order(residents: Iterable[Resident], now: int, policy: Policy) -> list[Resident]:
    """Who may go, in the order in which they go: P0 last, then by turns, then the least urgent, then the longest idle."""
    may = [
        (r.priority == 0, r.chosen, -r.priority, r.idle_since, r.session, r)
        for r in residents
        if r.swappable and r.idle_since is not None and now - r.idle_since >= policy.idle_ns
    ]
    return [key[-1] for key in sorted(may, key=lambda key: key[:-1])]


def _place(
    keys: Iterable[int], contents: Mapping[int, Content], host: int, disk: int
) -> tuple[list[Move] | None, int, int]:
    """Where each content goes, and what is left of the budgets; None if there is no room for one of them."""
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
    """Whether a session may come to a device of `capacity` bytes that is overcommitted by `percent` (20: up to 120 % of it).

    Raises:
        AdmissionError: it may not; the message has the numbers.
        ValueError: the percentage is not one from 0 to 1000.
    """
    why = refusal(asked.nbytes, asked.swappable, promises(granted), capacity, percent)
    if why:
        raise AdmissionError(why)
