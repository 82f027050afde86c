"""Work that is enqueued on a GPU while the host goes on, and its device time, which is known only later.

A launch whose device time is known from earlier runs returns before the GPU has done it: the session is charged the known time.
When the launch has landed, the difference to its measured time is added to what the session's next launch is charged. So the
host prepares the next launch while the GPU works, and each session pays what was measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wooly_executor.runtime.buffers import Buffers
from wooly_executor.runtime.driver import Driver
from wooly_executor.runtime.prepared import PreparedProgram, Span

#: Maximum number of parts of a program whose device times are kept.
KNOWN = 64


@dataclass(slots=True)
class Flight:
    """A launch in flight.

    Attributes:
        prepared: its program.
        span: its part of the program.
        marks: a mark on the stream before it, and one at each of its edges.
        expected: its device time as it was known before, in ns.
        owner: the session's buffers.
    """

    prepared: PreparedProgram
    span: Span
    marks: list[Any]
    expected: int
    owner: Buffers


class Flights:
    """The launches in flight on one GPU, oldest first. Only the device's thread uses it.

    Args:
        driver: the driver of the GPU.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._flying: deque[Flight] = deque()
        self._ns = 0

    def __len__(self) -> int:
        return len(self._flying)

    def known(self, prepared: PreparedProgram, span: Span) -> list[int] | None:
        """Return the device time of each part of a span as it was last measured, in ns; None: it was not measured yet."""
        found: list[int] | None = prepared.device_times.get(span)
        return found

    def charge(self, owner: Buffers, times: Sequence[int]) -> list[int]:
        """Add what a session owes to the times of its launch, and return the times to charge.

        No time becomes negative. If the session owes less than nothing, the rest reduces its later launches.
        """
        charged = list(times)
        if not owner.owed_ns:
            return charged
        owed, owner.owed_ns = owner.owed_ns, 0
        for k in reversed(range(len(charged))):
            paid = max(charged[k] + owed, 0)
            owed, charged[k] = charged[k] + owed - paid, paid
            if not owed:
                break
        owner.owed_ns = owed
        return charged

    def add(self, flight: Flight) -> None:
        """Add a launch."""
        self._flying.append(flight)
        self._ns += flight.expected

    def make_way(self, longest_ns: int) -> None:
        """Wait until at most `longest_ns` of work, or a single launch, is in flight. Then the host may prepare more.

        Raises:
            ContextLostError: the context is lost.
        """
        while len(self._flying) > 1 and self._ns > longest_ns:
            self._land_oldest()

    def land(self) -> None:
        """Wait until no work is in flight.

        Raises:
            ContextLostError: the context is lost.
        """
        while self._flying:
            self._land_oldest()

    def _land_oldest(self) -> None:
        flight = self._flying.popleft()
        self._ns -= flight.expected
        flight.owner.owed_ns += sum(self.measured(flight.prepared, flight.span, flight.marks)) - flight.expected

    def measured(self, prepared: PreparedProgram, span: Span, marks: Sequence[Any]) -> list[int]:
        """Wait for the last mark of a launch. Returns the device time between each mark and the one before it."""
        times = self._driver.elapsed_ns(marks)
        known = prepared.device_times
        if len(known) >= KNOWN and span not in known:
            known.clear()
        known[span] = times
        return times
