"""Host memory whose pages stay where they are: a GPU copies from and to it by itself, and while programs run."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Pages of nobody else's. They are unlocked before they go."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def page_locked(nbytes: int, lock: Callable[[int, int], None], unlock: Callable[[int], None]) -> Tensor:
    """A flat tensor of exactly so many bytes, locked until the last view of it is gone.

    Args:
        nbytes: at least 1.
        lock: takes an address and bytes; raises where they cannot be locked.
        unlock: takes the address; called once, by any thread, and may not raise.
    """
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(pages, dtype=torch.uint8)  # its storage holds the pages
    address = found.data_ptr()
    lock(address, nbytes)
    pages.unlock = lambda: unlock(address)
    return found
