"""Lazy clones (`torch._lazy_clone`): storages that read the buffer of their source until one of both is written.

A lazy clone has a storage and a buffer id of its own, but no memory. While lazy clones exist, the recorder replaces their ids by
the id of the buffer that holds the bytes. Before an instruction writes to one of the storages, the clone gets its memory, and the
recorder records the copy. The executor knows nothing about it: it sees an `alloc` and a `copy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from wooly_wis.dtypes import DType
from wooly_wis.program import Form, Operand, Role, View

from wooly.storage import ID_MASK, Keeper, Layout

if TYPE_CHECKING:
    from wooly.origins import Origin
    from wooly.recorder import Recorder

#: An entry of `Heap.dead` has the storage's bytes above its id.
_BYTES_SHIFT = ID_MASK.bit_length()


class _Group:
    """Storages with the same bytes.

    Attributes:
        holder: id of the buffer that has the bytes. Its storage may be freed.
        members: ids of the live storages, in the order in which they joined.
        nbytes: bytes of each storage.
        keeper: keeps the holder while the group has members. So `Heap.kept` has entries as long as there are lazy clones, and the
            recorder asks `died` about each storage that is freed.
    """

    __slots__ = ("holder", "keeper", "members", "nbytes")

    def __init__(self, holder: int, nbytes: int) -> None:
        self.holder = holder
        self.members: dict[int, None] = {}
        self.nbytes = nbytes
        self.keeper: Keeper | None = None


class LazyClones:
    """The lazy clones of one device and their sources. The caller of each method holds the recorder's lock.

    Args:
        recorder: recorder of the device.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._group_of: dict[int, _Group] = {}

    def __bool__(self) -> bool:
        """Whether there are lazy clones, or sources that nothing has written since they were cloned."""
        return bool(self._group_of)

    def __contains__(self, buffer: int) -> bool:
        return buffer in self._group_of

    def holder(self, buffer: int) -> int:
        """The buffer that has the bytes of a storage."""
        group = self._group_of.get(buffer)
        return buffer if group is None else group.holder

    def clone(self, buffer: int, nbytes: int) -> torch.Tensor:
        """Make a lazy clone of a storage.

        Args:
            buffer: id of the storage.
            nbytes: its size.

        Returns:
            The clone, as uint8[nbytes].

        Raises:
            RuntimeError: the device has no free buffer id.
        """
        heap = self._recorder.heap
        made = heap.reserve_id()
        heap.live_bytes -= nbytes  # the clone has no memory yet
        heap.held_bytes -= nbytes
        t, _ = Layout(torch.uint8, (nbytes,), (1,)).new(heap, made)
        group = self._group_of.get(buffer)
        if group is None:
            group = self._group_of[buffer] = _Group(buffer, nbytes)
            group.members[buffer] = None
        self._group_of[made] = group
        group.members[made] = None
        self._keep(group)
        return t

    def separate(self, buffer: int, where: Origin) -> None:
        """Give a storage memory that no other storage reads, because it will be written.

        Args:
            buffer: id of the storage.
            where: Python line that writes.

        Raises:
            torch.OutOfMemoryError: the executor has no memory for the copy. Then nothing has changed.
        """
        group = self._group_of.get(buffer)
        if group is None:
            return
        others = [member for member in group.members if member != buffer]
        if buffer != group.holder:
            self._materialise(group, buffer, where)
        elif others:
            self._materialise(group, others[0], where)
            group.holder = others[0]
        self._leave(group, buffer)

    def separate_all(self, where: Origin) -> None:
        """Give each storage its own memory.

        Raises:
            torch.OutOfMemoryError: the executor has no memory for the copies.
        """
        while self._group_of:
            self.separate(next(reversed(self._group_of)), where)

    def died(self, freed: int) -> bool:
        """Process an entry of `Heap.dead`. Returns True if the storage had no memory, so there is nothing to free.

        Args:
            freed: the entry.
        """
        buffer = freed & ID_MASK
        group = self._group_of.get(buffer)
        if group is None:
            return False
        lazy = buffer != group.holder
        self._leave(group, buffer)
        if lazy:
            heap = self._recorder.heap
            # The end of any storage subtracts its bytes. Those of a clone without memory were not in the sum.
            heap.live_bytes += freed >> _BYTES_SHIFT
            heap.recycle([buffer])
        return lazy

    def _materialise(self, group: _Group, member: int, where: Origin) -> None:
        recorder, nbytes = self._recorder, group.nbytes
        heap, forms = recorder.heap, recorder.forms
        if heap.held_bytes + nbytes > heap.granted:
            heap.make_room(nbytes)
        heap.held_bytes += nbytes
        heap.live_bytes += nbytes
        heap.note_peak()
        alloc = forms.alloc(nbytes)
        recorder.record(alloc, [member], where)
        if nbytes:
            view = View(DType.U8, (nbytes,), (1,), 0)
            copy = forms.intern(Form("copy", (Operand(Role.IN, view), Operand(Role.OUT, view))))
            recorder.record(copy, [group.holder, member], where)

    def _leave(self, group: _Group, buffer: int) -> None:
        del group.members[buffer], self._group_of[buffer]
        self._keep(group)
        if not self._group_of:
            self._recorder.watch_lazy_clones()

    def _keep(self, group: _Group) -> None:
        if not group.members:
            group.keeper = None
        elif group.keeper is None or group.keeper.ids != [group.holder]:
            group.keeper = Keeper(self._recorder.heap, [group.holder])
