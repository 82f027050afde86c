"""The history of a process's storages on its devices, and pools: labels of the storages that are made while a pool is in use.

Nothing is kept unless a script asks for it, and storages then cost no more than before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from wooly.python_private import frame_at
from wooly.storage import DEVICE_MASK, Heap, heaps

#: Whether tracebacks are kept: of live storages, also of past allocations, also of frees.
CONTEXTS = ("state", "alloc", "all")
_OWN = str(Path(__file__).parent)
#: The id of the pool of storages that belong to no other pool, as in PyTorch's snapshots.
NO_POOL = (0, 0)

#: Code and bytecode offset of each Python frame, innermost first.
Stack = tuple[tuple[CodeType, int], ...]


class Action(NamedTuple):
    """An entry of the history.

    Attributes:
        action: a name of PyTorch's snapshots, such as "alloc" or "free_completed".
        buffer: id of the storage.
        nbytes: its bytes.
        time_us: µs since 1970.
        stack: where it happened; empty if it is not kept.
        pool: the pool of the storage.
        metadata: the text that was set for new storages.
        free: for "oom": bytes that the executor had granted and that were not used.
    """

    action: str
    buffer: int
    nbytes: int
    time_us: int
    stack: Stack
    pool: tuple[int, int]
    metadata: str
    free: int = 0


def stack_here() -> Stack:
    """The Python frames of this thread, without Wooly's own innermost ones."""
    frame: Any = frame_at(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class Pools:
    """Pools, and the storages that belong to them. It observes a device while a pool is in use there, or has storages."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._of: dict[int, tuple[int, int]] = {}
        self._thread = threading.local()
        self._users: Counter[int] = Counter()
        self._held: Counter[int] = Counter()

    def new(self) -> tuple[int, int]:
        """The id of a new pool."""
        return 0, next(self._ids)

    def of(self, buffer: int) -> tuple[int, int]:
        """The pool of a storage."""
        return self._of.get(buffer, NO_POOL)

    @contextlib.contextmanager
    def using(self, heap: Heap, pool: tuple[int, int]) -> Iterator[None]:
        """Storages that this thread makes on a device belong to the pool."""
        heap.observe(self)
        self._users[heap.index] += 1
        stack = self._stack()
        stack.append((heap.index, pool))
        try:
            yield
        finally:
            stack.remove((heap.index, pool))
            self._users[heap.index] -= 1
            self._stop_if_unused(heap.index)

    def _stop_if_unused(self, index: int) -> None:
        if not self._users[index] and not self._held[index]:
            heaps[index].observe(self, on=False)

    def _stack(self) -> list[tuple[int, tuple[int, int]]]:
        """The pools that this thread uses, by device."""
        if not hasattr(self._thread, "pools"):
            self._thread.pools = []
        found: list[tuple[int, tuple[int, int]]] = self._thread.pools
        return found

    def allocated(self, buffer: int, nbytes: int) -> None:
        """See `HeapObserver`."""
        for index, pool in reversed(self._stack()):
            if index == buffer & DEVICE_MASK:
                self._of[buffer] = pool
                self._held[index] += 1
                return

    def freed(self, buffer: int, nbytes: int) -> None:
        """See `HeapObserver`."""
        if self._of.pop(buffer, None) is not None:
            self._held[buffer & DEVICE_MASK] -= 1
            self._stop_if_unused(buffer & DEVICE_MASK)


class History:
    """What happened to the storages of one device since the history was switched on.

    Args:
        heap: the device's storages.
        pools: knows the pools of storages.

    Attributes:
        entries: what happened, oldest first.
        live: where each live storage was made, if that is known.
        metadata: a text for new entries.
    """

    def __init__(self, heap: Heap, pools: Pools) -> None:
        self._heap, self._pools = heap, pools
        self.entries: deque[Action] = deque()
        self.live: dict[int, Stack] = {}
        self.metadata = ""
        self._enabled: str | None = None
        self._context: str | None = None
        self._skipped: frozenset[str] = frozenset()
        self._room: Callable[[int], None] | None = None

    def switch(
        self, enabled: str | None, context: str | None, max_entries: int, skipped: frozenset[str], *, clear: bool
    ) -> None:
        """Keep a history from now on, or no longer.

        Args:
            enabled: "all": all entries; "state": only where live storages were made; None: nothing.
            context: one of `CONTEXTS`, or None: no tracebacks.
            max_entries: maximum number of entries; the oldest ones are dropped.
            skipped: actions that are not kept.
            clear: drop the entries so far.
        """
        kept = () if clear or enabled is None else tuple(self.entries)
        self.entries = deque(kept, None if max_entries >= sys.maxsize else max_entries)
        if enabled is None:
            self.live.clear()
        self._enabled, self._context, self._skipped = enabled, context, skipped
        self._heap.observe(self, on=enabled is not None)
        if self._room is not None:
            self._heap.make_room, self._room = self._room, None
        if enabled is not None:
            self._room, self._heap.make_room = self._heap.make_room, self._make_room

    def allocated(self, buffer: int, nbytes: int) -> None:
        """See `HeapObserver`."""
        stack = stack_here() if self._context is not None else ()
        if stack:
            self.live[buffer] = stack
        kept = stack if self._context in ("alloc", "all") else ()
        self._add(("segment_alloc", "alloc"), buffer, nbytes, kept)

    def freed(self, buffer: int, nbytes: int) -> None:
        """See `HeapObserver`."""
        self.live.pop(buffer, None)
        stack = stack_here() if self._context == "all" and self._enabled == "all" else ()
        self._add(("free_requested", "free_completed", "segment_free"), buffer, nbytes, stack)

    def snapshot_taken(self) -> None:
        """Note that a snapshot was taken."""
        self._add(("snapshot",), 0, 0, stack_here() if self._context == "all" else ())

    def _make_room(self, nbytes: int) -> None:
        assert self._room is not None
        try:
            self._room(nbytes)
        except RuntimeError:
            self._add(("oom",), 0, nbytes, stack_here() if self._context is not None else ())
            raise

    def _add(self, actions: tuple[str, ...], buffer: int, nbytes: int, stack: Stack) -> None:
        if self._enabled != "all" or not (nbytes or actions == ("snapshot",)):
            return
        now, pool = time.time_ns() // 1000, self._pools.of(buffer)
        for action in actions:
            if action not in self._skipped:
                free = max(self._heap.granted - self._heap.held_bytes, 0) if action == "oom" else 0
                self.entries.append(Action(action, buffer, nbytes, now, stack, pool, self.metadata, free))
