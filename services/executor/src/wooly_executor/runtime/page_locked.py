"""Page-locked host memory. A GPU copies from and to it by itself, even while programs run."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Anonymous private pages. They are unlocked before they are freed."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def page_locked(nbytes: int, lock: Callable[[int, int], None], unlock: Callable[[int], None]) -> Tensor:
    """Return a flat tensor of exactly `nbytes` bytes, page-locked until its last view is gone.

    Args:
        nbytes: at least 1.
        lock: called with address and size; raises if the memory cannot be locked.
        unlock: called once with the address, by any thread; must not raise.
    """
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(pages, dtype=torch.uint8)  # the tensor's storage keeps the pages alive
    address = found.data_ptr()
    lock(address, nbytes)
    pages.unlock = lambda: unlock(address)
    return found
