"""Measures how many cores a launch occupied.

For the library, this is the CPU time of its worker threads. For kernels that a driver spreads over threads, it follows from the
number of work-groups and of threads (`beyond`).

The library runs one operator on several threads. It starts them at the first large operator of a calling thread, and they then
wait for the next operator. The loop's own clock does not include them. Linux has a CPU clock per thread. The loop's workers are
known by their name, which a thread inherits from the thread that starts it.
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
#: Elements of an operator that is large enough for the library to use all its threads.
_LARGE = 1 << 22


def beyond(ns: int, groups: int, threads: int) -> int:
    """The core time of a launch minus its device time, in ns.

    A thread runs whole work-groups. Equal work-groups run in ceil(groups / threads) waves, so groups / waves threads are busy on
    average: all threads if there are many groups, one thread if there is one group.

    Args:
        ns: device time of the launch.
        groups: its number of work-groups.
        threads: number of threads of the device.
    """
    waves = -(-groups // threads)
    return ns * groups // waves - ns if waves > 0 else 0


def occupied(blocks: int, per_core: int | None, cores: int) -> int:
    """The cores of a GPU that a kernel occupies on average, in thousandths of a core.

    A core counts while a block is on it. The blocks of a wave spread over as many cores as possible. In all waves but the last
    one, all cores are occupied.

    Args:
        blocks: blocks of the kernel's grid.
        per_core: blocks that a core takes at once; None: unknown, so that all blocks count as one wave.
        cores: number of cores of the device.
    """
    if blocks <= 0:
        return 0
    if per_core is None or per_core <= 0:
        return 1000 * min(blocks, cores)
    full, rest = divmod(blocks, per_core * cores)
    return 1000 * (full * cores + min(rest, cores)) // (full + (rest > 0))


@contextlib.contextmanager
def apart(name: str) -> Iterator[None]:
    """Give threads that start in the block this name (at most 15 characters), so that they do not count as workers of the
    library.
    """
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
    """The id of Linux's CPU clock of a thread."""
    return (~thread << 3) | 6


class WorkerClock:
    """Measures the CPU time of the library's worker threads, without the thread that called `attach`."""

    def __init__(self) -> None:
        self._clocks: tuple[int, ...] = ()
        self._own = 0
        self._tasks = 0

    def attach(self) -> None:
        """Find the worker threads of the calling thread. Start them if they do not run yet."""
        if torch.get_num_threads() == 1:
            return
        if sys.platform != "linux":
            log.warning(
                "cannot measure worker threads (this needs Linux): sessions are billed for the device loop's thread alone"
            )
            return
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, _NAME.encode(), 0, 0, 0)
        large = torch.empty(_LARGE, dtype=torch.uint8)
        large.add_(1)
        self._own = threading.get_native_id()
        self.look()

    @property
    def any(self) -> bool:
        """Whether there are worker threads."""
        return bool(self._clocks)

    def look(self) -> None:
        """Find worker threads that started later. Call it in the thread that called `attach`."""
        if not self._own:
            return
        found = list(_TASKS.iterdir())
        if len(found) == self._tasks:
            return
        self._tasks = len(found)
        clocks = []
        # Python's own threads (mover, compilers) are not workers of the library
        ours = {t.native_id for t in threading.enumerate()}
        for task in found:
            try:
                if int(task.name) not in ours and (task / "comm").read_text().strip() == _NAME:
                    clocks.append(_clock_of(int(task.name)))
            except OSError:
                continue  # the thread has ended
        self._clocks = tuple(clocks)

    def read(self) -> int:
        """The CPU time of all worker threads, in ns. Takes half a microsecond per thread."""
        total = 0
        try:
            for clock in self._clocks:
                total += time.clock_gettime_ns(clock)
        except OSError:  # a thread has ended
            self._tasks = 0
            self.look()
            return sum([time.clock_gettime_ns(c) for c in self._clocks])
        return total
