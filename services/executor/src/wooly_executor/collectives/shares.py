"""Divides the collectives of a group among the executors that have its ranks. Pure: no clock, no I/O, no buffers.

Each executor carries a *share* of a collective. A share is a smaller collective of all ranks, in a group of its own (`share_of`).
The executor of a rank carries the part that this rank gets (`reduce_scatter`, `all_to_all`, `scatter`, `gather`, receives) or
gives to all others (`all_gather`). Parts that all ranks get (`all_reduce`, `reduce`, `broadcast`) are cut into one slice per
executor. So no byte passes an executor that neither has it nor needs it, except in the slices.

Each executor divides the frames of its own ranks. It looks only at what is equal in the frames of all ranks, such as the kind and
the size, so all executors divide a collective in the same way.

Small collectives are not divided: their first executor carries them, in one exchange of messages. It takes part in every divided
collective, if only with empty ranges, because there the ranks' frames are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wooly_wis.collectives import MAX_RANKS, MAX_SHARES, Collective, Range, What, share_of

#: Boundary, in bytes, between two slices of a range.
_ALIGN = 64
_SLICED = frozenset((What.ALL_REDUCE, What.REDUCE, What.BROADCAST))
#: Ranges of other ranks may have any sizes, so a rank cannot tell from its own how large the collective is.
_UNEQUAL = frozenset((What.ALL_TO_ALL, What.GATHER, What.SCATTER))


@dataclass(frozen=True, slots=True)
class Division:
    """How a group is divided.

    Attributes:
        carriers: for each rank, the number of its executor among those that carry shares.
        least: minimum bytes of a share. Collectives that would be divided into smaller ones are not divided.
    """

    carriers: tuple[int, ...]
    least: int

    @property
    def count(self) -> int:
        """Number of shares."""
        return max(self.carriers) + 1

    def problem(self) -> str:
        """What is wrong with it; empty: nothing."""
        if not 1 < len(self.carriers) <= MAX_RANKS:
            return f"it has {len(self.carriers)} ranks; 2 to {MAX_RANKS} are allowed"
        if set(self.carriers) != set(range(self.count)) or not 1 < self.count <= MAX_SHARES:
            return f"its ranks must be at 2 to {MAX_SHARES} executors with the numbers from 0 on"
        return ""


def divide(call: Collective, division: Division) -> dict[int, Collective]:
    """The shares of one rank's frame, by the number of the executor that carries them.

    Args:
        call: the frame. Its group has as many ranks as the division.
        division: how its group is divided.
    """
    what, carriers = call.what, division.carriers
    if what is What.LEAVE or (what is What.BARRIER and call.sequence == 1):  # all executors learn who is in the group
        return {k: _share(call, k) for k in range(division.count)}
    if what is What.EXCHANGE:
        return _exchanges(call, carriers)
    if not _is_large(call, division):
        return {0: replace(call, share=True)}
    if what in _SLICED:
        return {k: _share(call, k, _slicer(call, k, division.count)) for k in range(division.count)}
    if what in (What.GATHER, What.SCATTER):
        at = carriers[call.root]
        return {0: _share(call, 0, _empty), at: _share(call, at)}
    own = carriers[call.rank]
    found = {}
    for k in range(division.count):
        mine = _whole if own == k else _empty
        parts: list[_Cut] = [_whole if carrier == k else _empty for carrier in carriers]
        if what is What.ALL_GATHER:
            found[k] = _share(call, k, mine, parts)
        else:  # a part goes to its receiver's executor, where the receiver writes all that it gets
            found[k] = _share(call, k, parts, mine)
    return found


def _is_large(call: Collective, division: Division) -> bool:
    """Whether a collective is divided. All ranks come to the same answer."""
    if call.what in _UNEQUAL:
        return True
    size = call.dtype.itemsize
    nbytes = max([sum([r.elements for r in ranges]) * size for ranges in (call.reads, call.writes)])
    return nbytes >= division.least * division.count


_Cut = Callable[[Range], Range]


def _whole(r: Range) -> Range:
    return r


def _empty(r: Range) -> Range:
    return r._replace(elements=0)


def _slicer(call: Collective, index: int, count: int) -> _Cut:
    """Cuts slice `index` of `count` from a range."""
    size = call.dtype.itemsize
    step = max(_ALIGN // size, 1)

    def cut(r: Range) -> Range:
        blocks = -(-r.elements // step)
        begin, end = [min(blocks * k // count * step, r.elements) for k in (index, index + 1)]
        return r._replace(offset=r.offset + begin * size, elements=end - begin)

    return cut


def _share(
    call: Collective,
    index: int,
    reads: _Cut | Sequence[_Cut] = _whole,
    writes: _Cut | Sequence[_Cut] | None = None,
) -> Collective:
    """A frame's share. The functions cut its ranges; one function is for all of them."""
    writes = reads if writes is None else writes

    def cut(ranges: tuple[Range, ...], how: _Cut | Sequence[_Cut]) -> tuple[Range, ...]:
        each = [how] * len(ranges) if callable(how) else how
        return tuple([f(r) for f, r in zip(each, ranges, strict=True)])

    return replace(
        call,
        group=share_of(call.group, index),
        reads=cut(call.reads, reads),
        writes=cut(call.writes, writes),
        share=True,
    )


def _exchanges(call: Collective, carriers: tuple[int, ...]) -> dict[int, Collective]:
    """Each transfer is carried by its receiver's executor."""
    own, found = carriers[call.rank], {}
    for k in sorted({carriers[r.peer] for r in call.reads} | ({own} if call.writes else set())):
        reads = tuple([r for r in call.reads if carriers[r.peer] == k])
        writes = call.writes if k == own else ()
        found[k] = replace(call, group=share_of(call.group, k), reads=reads, writes=writes, share=True)
    return found
