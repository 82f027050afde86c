"""Predicts when a session's next program arrives, from its last pauses. A pause is the time for which a session has no work.

A client that reads a result before it asks for the next step thinks for about the same time in each step. A step may have several
programs, with different pauses between them, so the last pauses themselves are the prediction: the next one is like one of them.
"""

from __future__ import annotations

from bisect import bisect_right

KEPT = 16
"""Number of pauses that are remembered: several steps of a client that sends a few programs in each."""
LEAST = 4
"""Minimum number of remembered pauses for a prediction."""
LONGEST_NS = 20_000_000
"""A longer pause, in ns, is forgotten: the client was idle, it did not think about its next step."""


class Rhythm:
    """The last pauses of one session. Times are in ns.

    Attributes:
        rested: time since which the session has had no work; -1: it has work, or it has not had any yet.
        pauses: the last pauses, oldest first.
        ordered: the same pauses, shortest first.
    """

    __slots__ = ("ordered", "pauses", "rested")

    def __init__(self, rested: int = -1, pauses: list[int] | None = None) -> None:
        self.rested = rested
        self.pauses = pauses or []
        self.ordered = sorted(self.pauses)

    def ended(self, now: int, begun: int) -> None:
        """Note that a program has arrived at `now`, so the pause has ended.

        Args:
            now: the time at which the core learned of the program.
            begun: the time since which the device has run something else, so that the program may have arrived at any time
                since then; `now` if the device was idle.
        """
        rested, self.rested = self.rested, -1
        pause = (max(begun, rested) + now) // 2 - rested
        if pause > LONGEST_NS:
            return
        self.pauses.append(pause)
        if len(self.pauses) > KEPT:
            del self.pauses[0]
        self.ordered = sorted(self.pauses)

    def next(self, now: int) -> int:
        """The earliest time, in ns from `now`, at which a program may arrive by the pauses that were longer; -1: none was."""
        ordered, elapsed = self.ordered, now - self.rested
        k = bisect_right(ordered, elapsed)
        return ordered[k] - elapsed if k < len(ordered) >= LEAST else -1

    def over(self, now: int, wall_ns: int, longest_ns: int) -> int:
        """The time, in ns from `now`, at which the next program has probably arrived, or at which the next longer pause leaves
        room for work of `wall_ns`; 0 if the program will probably not arrive within `longest_ns`. Call it only if `next` gives a
        time.
        """
        ordered, elapsed = self.ordered, now - self.rested
        first = last = bisect_right(ordered, elapsed)
        end = len(ordered) - 1
        while last < end and ordered[last + 1] - ordered[last] < wall_ns:
            last += 1
        found = min(ordered[last] + ordered[last] // 4 - elapsed, longest_ns)
        within = bisect_right(ordered, elapsed + found) - first
        return found if 2 * within >= len(ordered) - first else 0
