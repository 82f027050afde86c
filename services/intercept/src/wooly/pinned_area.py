"""Pinned host memory that the executor can access, in the memory that the channel shares (`wooly_bus.channel.pinned_area`).

A tensor in it is uploaded and downloaded with one copy, which the executor makes. The memory is that of the connection which was
opened last; other pinned tensors are in ordinary memory.
"""

from __future__ import annotations

import weakref

import numpy as np
from wooly_bus.channel.pinned_area import PinnedArea

_last: weakref.ref[PinnedArea] | None = None


def use(area: PinnedArea) -> None:
    """Allocate pinned memory in this area from now on."""
    global _last
    _last = weakref.ref(area)


def allocate(nbytes: int) -> np.ndarray | None:
    """Pinned bytes that the executor can access; None: no session is open, it shares no memory, or there is no room."""
    area = None if _last is None else _last()
    made = None if area is None else area.allocate(nbytes)
    return None if made is None else np.ctypeslib.as_array(made)
