"""How fast the device's core is just now, where the device is a CPU.

A core that shares its silicon with a neighbour's thread, or whose clock was lowered, does half the work in the same CPU time.
Whose programs ran meanwhile would pay twice. So the thread of the loop does a small piece of work now and then; what that takes,
against what it takes on a core that nothing slows, is the pace at which usage is priced. Quantities (core time, residency) stay
as measured.
"""

from __future__ import annotations

import time

import torch

#: A core that nothing slows, in millionths.
FULL = 1_000_000
#: No launch is priced faster: what metering hears beyond twice that is an error to it.
FASTEST = 50 * FULL
#: Device time between two looks: a look costs one or two percent of it.
EVERY_NS = 5_000_000
#: Weight of the newest look in the mean: the last fifty milliseconds count.
_NEWEST = 0.1
#: A look that was disturbed counts as at most so many times the mean.
_FAR = 3.0
#: The piece of work: additions in the interpreter, and for about as long a small operator of the library, which feels a core's
#: caches more. Together they slow down as programs do, better than either, and than larger operators.
_ADDITIONS = range(600)
_OPERAND = torch.ones(256)
#: Looks at the beginning: 10 ms or so.
_FIRST = 500


class CoreSpeed:
    """Owned by the device loop's thread.

    Args:
        reference_ns: what the piece of work takes on the core that is priced in full; None: the best that this one has done.

    Attributes:
        mean_ns: what the piece of work takes just now.
        ppm: the pace, in millionths. Without a `reference_ns` at most `FULL`.
    """

    __slots__ = ("_best", "_reference", "_since", "mean_ns", "ppm")

    def __init__(self, reference_ns: int | None = None) -> None:
        self._reference = reference_ns
        self._best = self.mean_ns = 0.0
        self._since = 0
        self.ppm = FULL

    def begin(self) -> None:
        """Find out how fast the core is."""
        self.mean_ns = float(min([_took() for _ in range(16)]))
        self._best = self.mean_ns * _FAR
        for _ in range(_FIRST):
            self.look()

    def worked(self, ns: int) -> None:
        """So much device time went by. Every now and then this looks."""
        self._since += ns
        if self._since >= EVERY_NS:
            self._since = 0
            self.look()

    def look(self) -> None:
        """Measure once. How far the program before it has driven the piece of work out of the caches is not to count."""
        _took()
        self.measured(_took())

    def measured(self, ns: int) -> None:
        """The piece of work took so long."""
        self.mean_ns += _NEWEST * (min(ns, _FAR * self.mean_ns) - self.mean_ns)
        self._best = min(self._best, self.mean_ns)
        self.ppm = max(int(FULL * (self._reference or self._best) / self.mean_ns), 1)


def _took() -> int:
    """CPU time of the piece of work, in ns."""
    begun, total = time.thread_time_ns(), 0
    for n in _ADDITIONS:
        total += n
    _OPERAND.add(1)
    return max(time.thread_time_ns() - begun, 1)
