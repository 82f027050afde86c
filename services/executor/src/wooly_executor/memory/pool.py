"""Allocates blocks at offsets of a device: one pool per device, with one account per session.

Blocks of up to 4 KiB come from *slabs*, which are runs of equal slots, so that a small tensor with a long life does not split the
room of a large one. For other blocks, the pool takes the *best fit* among the free extents; among equal ones, the one with the
lowest address. The rest of an extent stays free, and neighbouring free extents are merged at once. Free extents are in sorted
bins, eight per power of two. An integer has one bit per non-empty bin, so a search covers at most one bin.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wooly_executor.errors import AdmissionError, BindingError, OutOfMemoryError

#: Alignment of blocks, in bytes, as on a GPU.
ALIGNMENT = 256
#: Size classes of small blocks: 1 to this many units of the alignment.
SMALL_CLASSES = 16
#: Maximum size of a slab, in units of the alignment: 64 KiB at the usual alignment.
SLAB_UNITS = 256
#: Empty slabs that a size class keeps for later blocks.
SPARE_SLABS = 1
_SHIFT = 48  # a sorted key is bytes << 48 | offset
_LOW = (1 << _SHIFT) - 1


def room_of(sizes: Iterable[int]) -> int:
    """Most bytes that blocks of these sizes take, at the usual alignment. Small blocks may need one new slab."""
    rounded = [-(-n // ALIGNMENT) * ALIGNMENT for n in sizes if n]
    small = min(sum(n for n in rounded if n <= SMALL_CLASSES * ALIGNMENT), 1)
    return sum(rounded) + small * SLAB_UNITS * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Holding:
    """The memory of one account.

    Attributes:
        account: name of the account.
        tenant: tenant of the account.
        requested: requested bytes.
        held: bytes of its blocks, each rounded up to the alignment.
        blocks: number of its blocks.
        quota: most bytes that it may hold.
    """

    account: str
    tenant: str
    requested: int
    held: int
    blocks: int
    quota: int


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Where every byte of the pool is: `held + slots + free = capacity`.

    Attributes:
        capacity: bytes of the pool.
        requested: requested bytes; `held - requested` is lost to rounding.
        held: bytes of blocks.
        slots: bytes of slabs that are in no block; only small blocks can use them.
        free: bytes of free extents.
        largest: bytes of the largest free extent.
        high: highest end of an extent that was ever in use, which is the smallest capacity that this history needs.
    """

    capacity: int
    requested: int
    held: int
    slots: int
    free: int
    largest: int
    high: int

    @property
    def scattered(self) -> float:
        """Share of the free bytes that are not in the largest extent (external fragmentation)."""
        return 1 - self.largest / self.free if self.free else 0.0

    def lost(self, wanted: int) -> float:
        """Share of the capacity that is lost to rounding, slots and holes if a block of `wanted` bytes does not fit now."""
        return max(0, self.capacity - self.requested - wanted) / self.capacity


class _Slab:
    """A run of `slots` slots of `size` bytes at `offset`. Bit i of `free` is set if slot i is free."""

    __slots__ = ("free", "full", "offset", "size", "slots")

    def __init__(self, offset: int, size: int, slots: int) -> None:
        self.offset, self.size, self.slots = offset, size, slots
        self.free = self.full = (1 << slots) - 1


class _Account:
    __slots__ = ("blocks", "held", "name", "quota", "requested", "tenant")

    def __init__(self, name: str, tenant: str, quota: int) -> None:
        self.name, self.tenant, self.quota = name, tenant, quota
        self.requested = self.held = 0
        self.blocks: dict[int, tuple[int, int, _Slab | None]] = {}  # by offset: requested bytes, held bytes, slab


class Pool:
    """Bytes 0 to `capacity` of a device. Offsets are multiples of `alignment`. One thread owns it.

    Args:
        capacity: bytes; it is rounded down to a multiple of `alignment`.
        alignment: bytes, a power of two.
        name: name of the device in messages.
    """

    def __init__(self, capacity: int, *, alignment: int = ALIGNMENT, name: str = "GPU 0") -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"the alignment must be a power of two, not {alignment}")
        if capacity < alignment:
            raise ValueError(f"a pool of {capacity} bytes is smaller than its alignment of {alignment} bytes")
        self.alignment, self.name = alignment, name
        self.capacity = capacity - capacity % alignment
        self._mask = alignment - 1
        self._unit = alignment.bit_length() - 1
        self._small = SMALL_CLASSES * alignment
        self._accounts: dict[str, _Account] = {}
        self._owners: dict[int, _Account] = {}  # by offset of a block
        self._bins: list[list[int]] = [[] for _ in range(8 * ((self.capacity >> self._unit).bit_length() + 1))]
        self._filled = 0  # one bit per non-empty bin
        self._free: dict[int, int] = {}  # free extents: offset -> bytes
        self._ends: dict[int, int] = {}  # the same extents by their end: end -> offset
        self._partial: list[dict[int, _Slab]] = [
            {} for _ in range(SMALL_CLASSES + 1)
        ]  # slabs with a free slot, by offset
        self._held = self._requested = self._slabs = self._in_slots = self._high = 0
        self._insert(0, self.capacity)

    # -- accounts ----------------------------------------------------------------------------------------------------

    def open(self, account: str, *, quota: int | None = None, tenant: str = "") -> None:
        """Open an account that may hold `quota` bytes of rounded blocks; None: the whole pool.

        Raises:
            AdmissionError: the name is in use, or the quota exceeds the pool.
        """
        if account in self._accounts:
            raise AdmissionError(f"account {account} is open already")
        if quota is not None and quota > self.capacity:
            raise AdmissionError(f"the session asks for {quota} bytes, and the device has {self.capacity}")
        self._accounts[account] = _Account(account, tenant, self.capacity if quota is None else quota)

    def close(self, account: str) -> int:
        """Close an account and free its blocks. Returns the bytes that it held; 0 if the name is unknown."""
        known = self._accounts.get(account)
        if known is None:
            return 0
        held = known.held
        for offset in list(known.blocks):
            self.free(offset)
        del self._accounts[account]
        return held

    # -- blocks ------------------------------------------------------------------------------------------------------

    def allocate(self, account: str, nbytes: int) -> int:
        """The offset of a new block of at least `nbytes` bytes. A block of 0 bytes also has its own offset.

        Raises:
            OutOfMemoryError: the account's quota is exceeded, or no free extent is large enough. The message says which session
                holds how much.
            BindingError: the account is unknown, or the size is negative.
        """
        owner = self._accounts.get(account)
        if owner is None or nbytes < 0:
            raise BindingError(
                f"cannot allocate {nbytes} bytes for account {account!r}: {'negative size' if owner else 'it is not open'}"
            )
        size = (nbytes + self._mask) & ~self._mask or self.alignment  # `rounded`, without the call
        if owner.held + size > owner.quota:
            raise OutOfMemoryError(self._over_quota(owner, nbytes))
        slab = None
        if size <= self._small:
            slab = self._slab_for(size)
            if slab is None:
                raise OutOfMemoryError(self._no_room(owner, nbytes))
            bit = slab.free & -slab.free
            slab.free ^= bit
            if not slab.free:
                del self._partial[size >> self._unit][slab.offset]
            offset = slab.offset + size * (bit.bit_length() - 1)
            self._in_slots += size
        else:
            offset = self._take(size)
            if offset < 0 and self._reclaim():
                offset = self._take(size)
            if offset < 0:
                raise OutOfMemoryError(self._no_room(owner, nbytes))
        owner.blocks[offset] = (nbytes, size, slab)
        self._owners[offset] = owner
        owner.requested += nbytes
        owner.held += size
        self._requested += nbytes
        self._held += size
        return offset

    def free(self, offset: int) -> None:
        """Free a block.

        Raises:
            BindingError: no block begins at this offset.
        """
        owner = self._owners.pop(offset, None)
        if owner is None:
            raise BindingError(f"no block begins at byte {offset}")
        nbytes, size, slab = owner.blocks.pop(offset)
        owner.requested -= nbytes
        owner.held -= size
        self._requested -= nbytes
        self._held -= size
        if slab is None:
            self._give(offset, size)
            return
        self._in_slots -= size
        partial = self._partial[size >> self._unit]
        if not slab.free:
            partial[slab.offset] = slab
        slab.free |= 1 << (offset - slab.offset) // size
        if slab.free == slab.full and len(partial) > SPARE_SLABS:
            self._dissolve(slab)

    def move(self, offset: int, account: str) -> None:
        """Move a block to another account, whatever the quota of that account.

        Raises:
            BindingError: no block begins at this offset, or the account is unknown.
        """
        before, after = self._owners.get(offset), self._accounts.get(account)
        if before is None or after is None:
            raise BindingError(f"no block begins at byte {offset}, or account {account!r} is not open")
        found = after.blocks[offset] = before.blocks.pop(offset)
        self._owners[offset] = after
        for owner, sign in ((before, -1), (after, 1)):
            owner.requested += sign * found[0]
            owner.held += sign * found[1]

    def compact(self) -> dict[int, int]:
        """Move all blocks to the start, in their order, so that the free bytes are one extent.

        Returns:
            The new offset of each moved block, by its old offset. No bytes are copied: for a runtime whose blocks have memory of
                their own, or that maps pages, an offset is only a name.
        """
        self._reclaim()
        slabs = {slab.offset: slab for partial in self._partial for slab in partial.values()}
        slabs |= {s.offset: s for a in self._accounts.values() for _, _, s in a.blocks.values() if s is not None}
        large = [(o, n) for a in self._accounts.values() for o, (_, n, s) in a.blocks.items() if s is None]
        extents = sorted(large + [(s.offset, s.size * s.slots) for s in slabs.values()])
        shifts: list[tuple[int, int]] = []  # (start of an extent, bytes by which it moves down), in order
        end = 0
        for offset, size in extents:
            shifts.append((offset, offset - end))
            end += size
        moved: dict[int, int] = {}
        for account in self._accounts.values():
            blocks = {}
            for offset, block in account.blocks.items():
                to = offset - shifts[bisect_left(shifts, (offset + 1,)) - 1][1]
                blocks[to] = block
                if to != offset:
                    moved[offset] = to
            account.blocks = blocks
        self._owners = {offset: a for a in self._accounts.values() for offset in a.blocks}
        for old, slab in slabs.items():
            slab.offset = old - shifts[bisect_left(shifts, (old + 1,)) - 1][1]
        self._partial = [{slab.offset: slab for slab in partial.values()} for partial in self._partial]
        self._bins = [[] for _ in self._bins]
        self._filled = 0
        self._free, self._ends = {}, {}
        if end < self.capacity:
            self._insert(end, self.capacity - end)
        return moved

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes of free extents."""
        return self.capacity - self._held + self._in_slots - self._slabs

    def size(self, offset: int) -> int:
        """Bytes held by the block at `offset`."""
        return self._owners[offset].blocks[offset][1]

    def requested(self, offset: int) -> int:
        """Requested bytes of the block at `offset`."""
        return self._owners[offset].blocks[offset][0]

    def rounded(self, nbytes: int) -> int:
        """Bytes that a block of `nbytes` takes."""
        return (nbytes + self._mask) & ~self._mask or self.alignment

    def held(self, account: str) -> int:
        """Bytes held by an account's blocks."""
        return self._accounts[account].held

    def facts(self) -> PoolFacts:
        """Where every byte is now."""
        slots = self._slabs - self._in_slots
        return PoolFacts(
            self.capacity, self._requested, self._held, slots, self.free_bytes, self._largest(), self._high
        )

    def holdings(self) -> list[Holding]:
        """All accounts, the largest first."""
        found = [
            Holding(a.name, a.tenant, a.requested, a.held, len(a.blocks), a.quota) for a in self._accounts.values()
        ]
        return sorted(found, key=lambda h: (-h.held, h.account))

    def holding(self, account: str) -> Holding:
        """One account.

        Raises:
            BindingError: the name is unknown.
        """
        a = self._accounts.get(account)
        if a is None:
            raise BindingError(f"account {account!r} is not open")
        return Holding(a.name, a.tenant, a.requested, a.held, len(a.blocks), a.quota)

    def blocks(self, account: str) -> Iterator[tuple[int, int]]:
        """(offset, bytes held) of an account's blocks, in the order of their allocation."""
        return ((offset, size) for offset, (_, size, _) in self._accounts[account].blocks.items())

    def extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the free extents, by offset."""
        return sorted(self._free.items())

    # -- messages ----------------------------------------------------------------------------------------------------

    def _over_quota(self, owner: _Account, nbytes: int) -> str:
        return (
            f"CUDA out of memory. Tried to allocate {_size(nbytes)}. The session's quota is {_size(owner.quota)} of which "
            f"{_size(owner.quota - owner.held)} is free."
        )

    def _no_room(self, owner: _Account, nbytes: int) -> str:
        """The message for a pool without room. It names sessions of the same tenant only; sessions of other tenants are summed
        up, so that a tenant does not learn which sessions exist.
        """
        facts = self.facts()
        said = [
            f"CUDA out of memory. Tried to allocate {_size(nbytes)}. {self.name} has a total capacity of "
            f"{_size(self.capacity)} of which {_size(facts.free)} is free, {_size(facts.largest)} of it in one piece."
        ]
        strangers = [h for h in self.holdings() if h.tenant != owner.tenant]
        for h in self.holdings():
            if h.tenant == owner.tenant and (h.held or h.account == owner.name):
                whose = "This session" if h.account == owner.name else f"Session {h.account}"
                said.append(f"{whose} holds {_size(h.held)} in {h.blocks} blocks.")
        held = sum(h.held for h in strangers)
        if held:
            said.append(f"Sessions of other tenants hold {_size(held)}.")
        return " ".join(said)

    # -- slabs -------------------------------------------------------------------------------------------------------

    def _slab_for(self, size: int) -> _Slab | None:
        """A slab with a free slot of `size` bytes. If there is no such slab, a new one, as large as possible."""
        units = size >> self._unit
        partial = self._partial[units]
        for slab in partial.values():
            return slab
        slots = SLAB_UNITS // units
        offset = self._take(size * slots)
        if offset < 0 and self._reclaim():
            offset = self._take(size * slots)
        while offset < 0:
            if slots == 1:
                return None
            slots //= 2
            offset = self._take(size * slots)
        slab = partial[offset] = _Slab(offset, size, slots)
        self._slabs += size * slots
        return slab

    def _reclaim(self) -> bool:
        """Dissolve the empty slabs that are kept for later. Returns whether there were any."""
        spare = [slab for partial in self._partial for slab in partial.values() if slab.free == slab.full]
        for slab in spare:
            self._dissolve(slab)
        return bool(spare)

    def _dissolve(self, slab: _Slab) -> None:
        del self._partial[slab.size >> self._unit][slab.offset]
        self._slabs -= slab.size * slab.slots
        self._give(slab.offset, slab.size * slab.slots)

    # -- free extents ------------------------------------------------------------------------------------------------

    def _bin(self, size: int) -> int:
        """The bin for extents of `size` bytes. There are eight bins per power of two, in order of size."""
        units = size >> self._unit
        power = units.bit_length()
        return units if power <= 3 else (power - 3 << 3) + (units >> power - 4)

    def _take(self, size: int) -> int:
        """Take `size` bytes from the smallest sufficient free extent, at the lowest address among equals. Returns -1 if no extent
        is sufficient.
        """
        number = self._bin(size)
        content = self._bins[number]
        at = bisect_left(content, size << _SHIFT)
        if at == len(content):
            above = self._filled >> number + 1
            if not above:
                return -1
            number += (above & -above).bit_length()
            content, at = self._bins[number], 0
        key = content.pop(at)
        if not content:
            self._filled ^= 1 << number
        found, offset = key >> _SHIFT, key & _LOW
        del self._free[offset], self._ends[offset + found]
        end = offset + size
        if found > size:
            self._insert(end, found - size)
        if end > self._high:
            self._high = end
        return offset

    def _give(self, offset: int, size: int) -> None:
        """Add a free extent, and merge it with its free neighbours."""
        before = self._ends.get(offset)
        after = self._free.get(offset + size)
        if before is not None:
            size += offset - before
            offset = before
            self._remove(before, self._free[before])
        if after is not None:
            self._remove(offset + size, after)
            size += after
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        number = self._bin(size)
        insort(self._bins[number], size << _SHIFT | offset)
        self._filled |= 1 << number
        self._free[offset] = size
        self._ends[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        number = self._bin(size)
        content = self._bins[number]
        del content[bisect_left(content, size << _SHIFT | offset)]
        if not content:
            self._filled ^= 1 << number
        del self._free[offset], self._ends[offset + size]

    def _largest(self) -> int:
        return self._bins[self._filled.bit_length() - 1][-1] >> _SHIFT if self._filled else 0


def _size(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB" if n >= 1 << 30 else f"{n / (1 << 20):.2f} MiB"
