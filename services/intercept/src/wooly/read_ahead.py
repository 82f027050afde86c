"""Learns in which order tensors are uploaded and read, so that one wait brings many small ones.

`{name: t.cpu() for name, t in model.state_dict().items()}` and `model.cpu()` read one tensor after the other. On a GPU beside the
process, each read costs microseconds; here, it is a round trip. The order is that in which the tensors came to the device, or in
which they were read before. If a read follows this order, the next ones probably do, too, as for the blocks of a file.

This module only learns and predicts. It knows neither the link nor the recorder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wooly.torch_private import storage_of

if TYPE_CHECKING:
    from wooly.link import ViewKey

#: Maximum size, in bytes, of a tensor that is read ahead, and maximum number and total size of those that one wait brings.
SMALL, TOGETHER, MOST_BYTES = 16 << 10, 24, 128 << 10
#: Maximum number of known tensors.
_REMEMBERED = 8192


class Known(NamedTuple):
    """A tensor that was uploaded or read.

    Attributes:
        storage: its storage, which may be freed.
        view: what was uploaded or read of its buffer.
        nbytes: its size.
    """

    storage: StorageWeakRef
    view: ViewKey
    nbytes: int


class ReadAhead:
    """The order of the tensors of one device."""

    def __init__(self) -> None:
        self._next: dict[StorageWeakRef, Known] = {}
        self._uploaded: StorageWeakRef | None = None
        self._read: StorageWeakRef | None = None
        #: The last tensor that was read ahead with the next read, and whether `_read` is such a tensor.
        self._last_follower: StorageWeakRef | None = None
        self._is_expected = False

    def uploaded(self, t: torch.Tensor, view: ViewKey, nbytes: int) -> None:
        """Note that a tensor was uploaded."""
        self._uploaded = self._note(self._uploaded, StorageWeakRef(t.untyped_storage()), view, nbytes)

    def read(self, t: torch.Tensor, view: ViewKey, nbytes: int) -> None:
        """Note that the script waits for a tensor, with what `followers` returned for it. It will probably read these next."""
        own = StorageWeakRef(t.untyped_storage())
        before = None if self._is_expected and not self._is_next(own) else self._read
        self._read = self._note(before, own, view, nbytes)
        self._is_expected = self._last_follower is not None
        if self._is_expected:
            self._read, self._last_follower = self._last_follower, None

    def _note(self, last: StorageWeakRef | None, own: StorageWeakRef, view: ViewKey, nbytes: int) -> StorageWeakRef:
        if last is not None and last != own and not last.expired():
            if len(self._next) >= _REMEMBERED:
                self._forget()
            self._next[last] = Known(own, view, nbytes)
        return own

    def _forget(self) -> None:
        """Drop the tensors that were freed; all of them if most are alive."""
        alive = {own: known for own, known in self._next.items() if not (own.expired() or known.storage.expired())}
        self._next = alive if len(alive) <= _REMEMBERED // 2 else {}

    def _is_next(self, own: StorageWeakRef) -> bool:
        after = None if self._read is None else self._next.get(self._read)
        return after is not None and after.storage == own

    def followers(self, t: torch.Tensor) -> list[tuple[torch.UntypedStorage, ViewKey]]:
        """Small tensors that the script will probably read after `t`, if `t` is the next one of the known order.

        Returns:
            Their storages, and what is read of each.
        """
        at = StorageWeakRef(t.untyped_storage())
        self._last_follower = None
        if not self._is_next(at):
            return []
        found: list[tuple[torch.UntypedStorage, ViewKey]] = []
        seen, total = {at}, 0
        while (known := self._next.get(at)) is not None and known.storage not in seen and len(found) < TOGETHER:
            at = known.storage
            seen.add(at)
            storage = storage_of(at)
            if storage is None or storage.nbytes() < known.view[0] + known.nbytes:
                break
            if known.nbytes <= SMALL:
                total += known.nbytes
                if total > MOST_BYTES:
                    break
                found.append((storage, known.view))
                self._last_follower = at
        return found
