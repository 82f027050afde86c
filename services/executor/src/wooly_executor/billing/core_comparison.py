"""Compares the core time that was billed with the use of the device that the vendor's library measures. For the log only."""

from __future__ import annotations

#: Time between two comparisons, in ns.
PERIOD_NS = 60_000_000_000


class CoreComparison:
    """The core time that was billed since the last comparison.

    Args:
        cores: number of cores of the device.
        now: monotonic ns.
    """

    def __init__(self, cores: int, now: int) -> None:
        self._cores, self._since, self._core_ns = cores, now, 0

    def add(self, core_ns: int) -> None:
        """Add core time that is billed."""
        self._core_ns += core_ns

    def due(self, now: int) -> bool:
        """Whether it is time for a comparison."""
        return now - self._since >= PERIOD_NS

    def text(self, measured: float | None, now: int) -> str:
        """Return the comparison since the last call, for the log.

        Args:
            measured: the share of the device that this process has used by the vendor's library, from 0 to 1; None: unknown.
            now: monotonic ns.
        """
        span, core_ns = max(now - self._since, 1), self._core_ns
        self._since, self._core_ns = now, 0
        share = 100 * core_ns / (span * self._cores)
        billed = f"cores: {share:.1f} % of the device's core time was billed in {span / 1e9:.0f} s"
        return billed + (
            f", {100 * measured:.1f} % were measured" if measured is not None else ", nothing was measured"
        )
