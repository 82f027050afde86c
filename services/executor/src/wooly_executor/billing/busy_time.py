"""Counts how long the device has worked: in all, and as a share of the last second."""

from __future__ import annotations

from collections import deque

#: Time over which `BusyTime.percent` looks back, and the minimum distance of the samples that it keeps, in ns.
WINDOW_NS, SAMPLE_NS = 1_000_000_000, 100_000_000


class BusyTime:
    """The device time of all launches. The device's thread writes it; any thread may read `total_ns`.

    Attributes:
        total_ns: the sum, in ns.
    """

    __slots__ = ("_last_ns", "_samples", "total_ns")

    def __init__(self) -> None:
        self.total_ns = self._last_ns = 0
        self._samples: deque[tuple[int, int]] = deque([(0, 0)])  # (end of a launch, sum at this time)

    def add(self, ns: int, now_ns: int) -> None:
        """Add the device time of a launch that ended at `now_ns`, a time of a monotonic clock."""
        self.total_ns += ns
        self._last_ns = now_ns
        samples = self._samples
        if now_ns - samples[-1][0] >= SAMPLE_NS:
            samples.append((now_ns, self.total_ns))
            while len(samples) > 1 and samples[1][0] <= now_ns - WINDOW_NS:
                samples.popleft()

    def percent(self, now_ns: int) -> int:
        """The share of the last second in which the device worked, in percent, 0 to 100. It is exact to a tenth of a second."""
        since = now_ns - WINDOW_NS
        if self._last_ns <= since:
            return 0
        before = max([total for at, total in self._samples if at <= since], default=self.total_ns)
        return min(100, 100 * (self.total_ns - before) // WINDOW_NS)
