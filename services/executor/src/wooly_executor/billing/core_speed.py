"""Measures how fast the device's core is now, if the device is a CPU. The result is the pace of the core.

A core is slower while another hardware thread shares it, or while its clock is reduced. Then the same work takes up to twice the
CPU time, and sessions would pay twice. So the loop's thread measures a small reference task periodically. The pace is the task's
time on an undisturbed core divided by its time now, and prices of usage are multiplied by it. Measured quantities (core time,
residency) are not changed.
"""

from __future__ import annotations

import time

import torch

#: Full speed, in millionths.
FULL = 1_000_000
#: Maximum pace of a launch, in millionths. Metering treats more than twice this value as an error.
FASTEST = 50 * FULL
#: Device time between two measurements, in ns. A measurement costs one to two percent of it.
EVERY_NS = 5_000_000
#: Weight of the newest measurement in the moving mean, which covers about the last fifty milliseconds.
_NEWEST_WEIGHT = 0.1
#: A measurement counts as at most this many times the mean, so that a disturbed measurement has little effect.
_MAX_RATIO = 3.0
#: The reference task: additions in the interpreter, and for about the same time a small library operator, which depends more on
#: the core's caches. Together they slow down like real programs do; each alone, or a larger operator, follows programs less
#: closely.
_ADDITIONS = range(600)
#: Additions of an unmeasured run, which brings the task back into the caches. More of them change no measured time.
_UNMEASURED = range(60)
_OPERAND = torch.ones(256)
#: Number of measurements at the start: about 10 ms.
_FIRST_MEASUREMENTS = 500


class CoreSpeed:
    """Measures the pace of a core. The device loop's thread owns it.

    Args:
        reference_ns: time of the reference task on a core at full price; None: the best time of this core so far.

    Attributes:
        mean_ns: current mean time of the reference task.
        ppm: the pace, in millionths. Without `reference_ns` at most `FULL`.
    """

    __slots__ = ("_best", "_reference", "_since", "mean_ns", "ppm")

    def __init__(self, reference_ns: int | None = None) -> None:
        self._reference = reference_ns
        self._best = self.mean_ns = 0.0
        self._since = 0
        self.ppm = FULL

    def begin(self) -> None:
        """Measure the core for the first time."""
        self.mean_ns = float(min([_task_ns() for _ in range(16)]))
        self._best = self.mean_ns * _MAX_RATIO
        for _ in range(_FIRST_MEASUREMENTS):
            self.look()

    def worked(self, ns: int) -> None:
        """Note that so much device time has passed. Measures again if it is time."""
        self._since += ns
        if self._since >= EVERY_NS:
            self._since = 0
            self.look()

    def look(self) -> None:
        """Measure once. A short, unmeasured run loads the task into the caches, so that the preceding program has no effect."""
        _task_ns(_UNMEASURED)
        self.measured(_task_ns())

    def measured(self, ns: int) -> None:
        """Add a measured time of the reference task, in ns."""
        self.mean_ns += _NEWEST_WEIGHT * (min(ns, _MAX_RATIO * self.mean_ns) - self.mean_ns)
        self._best = min(self._best, self.mean_ns)
        self.ppm = max(int(FULL * (self._reference or self._best) / self.mean_ns), 1)


def _task_ns(additions: range = _ADDITIONS) -> int:
    """CPU time of the reference task, in ns."""
    begun, total = time.thread_time_ns(), 0
    for n in additions:
        total += n
    _OPERAND.add(1)
    return max(time.thread_time_ns() - begun, 1)
