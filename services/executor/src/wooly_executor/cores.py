"""How many cores a launch occupied: for the library's, the CPU time of the threads that compute for the device loop's; for
kernels that a driver spreads, their work-groups against its threads (`beyond`).

The library runs one operator on several threads: it starts them at the first such operator of a thread that calls it, and they
wait for the next. The loop's own clock does not see them. Linux has a clock for every thread; which threads are the loop's is
known by their name, which a thread takes from the one that starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

log = logging.getLogger("wooly.executor")
_NAME = "wooly-device"
_PR_SET_NAME = 15
_TASKS = Path("/proc/self/task")
#: Elements of an operator that the library spreads over all its threads.
_LARGE = 1 << 22


def beyond(ns: int, groups: int, threads: int) -> int:
    """The core time of a launch beyond its device time, in ns.

    Threads take whole work-groups. As these are alike, they run in ceil(groups / threads) waves, and groups / waves of the
    threads are busy on average: all of them where there are many groups, one where there is one.

    Args:
        ns: its device time.
        groups: its work-groups.
        threads: of the device.
    """
    waves = -(-groups // threads)
    return ns * groups // waves - ns if waves > 0 else 0


@contextlib.contextmanager
def apart(name: str) -> Iterator[None]:
    """Threads that are started in the block are no workers of the library's: they take this name (15 characters) instead."""
    if sys.platform != "linux":
        yield
        return
    comm = _TASKS / str(threading.get_native_id()) / "comm"
    before = comm.read_text().strip()
    comm.write_text(name)
    try:
        yield
    finally:
        comm.write_text(before)


def _clock_of(thread: int) -> int:
    """The id of Linux's clock of a thread's CPU time."""
    return (~thread << 3) | 6


class WorkerClock:
    """The CPU time of the threads that compute for the thread that called `attach`, without its own."""

    def __init__(self) -> None:
        self._clocks: tuple[int, ...] = ()
        self._own = 0
        self._tasks = 0

    def attach(self) -> None:
        """Find the caller's workers; they are started if they were not."""
        if torch.get_num_threads() == 1:
            return
        if sys.platform != "linux":
            log.warning("cores are not measured here: only the device loop's own thread is billed")
            return
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, _NAME.encode(), 0, 0, 0)
        large = torch.empty(_LARGE, dtype=torch.uint8)
        large.add_(1)
        self._own = threading.get_native_id()
        self.look()

    def look(self) -> None:
        """Take in workers that were started later (in the thread that called `attach`)."""
        if not self._own:
            return
        found = list(_TASKS.iterdir())
        if len(found) == self._tasks:
            return
        self._tasks = len(found)
        clocks = []
        ours = {t.native_id for t in threading.enumerate()}  # those that move memory and compile are no workers
        for task in found:
            try:
                if int(task.name) not in ours and (task / "comm").read_text().strip() == _NAME:
                    clocks.append(_clock_of(int(task.name)))
            except OSError:
                continue  # it has ended
        self._clocks = tuple(clocks)

    def read(self) -> int:
        """Their CPU time together, in ns. Half a microsecond per thread."""
        total = 0
        try:
            for clock in self._clocks:
                total += time.clock_gettime_ns(clock)
        except OSError:  # one has ended
            self._tasks = 0
            self.look()
            return sum([time.clock_gettime_ns(c) for c in self._clocks])
        return total
