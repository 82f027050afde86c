"""Work that is enqueued on a GPU while the host goes on, and its device time, which is known only later.

A launch whose device time is known from earlier runs returns before the GPU has done it: the session is charged the known time.
When the launch has landed, the difference to its measured time is added to what the session's next launch is charged. So the
host prepares the next launch while the GPU works, and each session pays what was measured.

A launch that may report a violation is checked when it lands. Until then, at most one more launch of its session is enqueued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wooly_executor.runtime.buffers import Buffers
from wooly_executor.runtime.driver import Driver
from wooly_executor.runtime.prepared import DeviceTimes, PreparedProgram, Span

#: Maximum number of parts of a program whose device times are kept.
KNOWN = 64


@dataclass(slots=True)
class Flight:
    """A launch in flight.

    Attributes:
        prepared: its program.
        span: its part of the program.
        marks: a mark on the stream before it, and one at each of its edges.
        enqueued: when the host enqueued each mark, in ns.
        expected: its device time as it was known before, in ns.
        owner: the session's buffers.
        check: is called when it has landed; None: there is nothing to check.
    """

    prepared: PreparedProgram
    span: Span
    marks: list[Any]
    enqueued: list[int]
    expected: int
    owner: Buffers
    check: Callable[[], None] | None = None


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

    def known(self, prepared: PreparedProgram, span: Span) -> DeviceTimes | None:
        """Return the device time of each part of a span as it was last measured; None: it was not measured yet."""
        return prepared.device_times.get(span)

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
        if flight.check is not None:
            flight.owner.unchecked += 1

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

    def check(self, owner: Buffers, but: int) -> None:
        """Wait until at most so many launches of a session are unchecked.

        Raises:
            ContextLostError: the context is lost.
        """
        while owner.unchecked > but:
            self._land_oldest()

    def _land_oldest(self) -> None:
        flight = self._flying.popleft()
        self._ns -= flight.expected
        found = self.measured(flight.prepared, flight.span, flight.marks, flight.enqueued)
        flight.owner.owed_ns += sum(found.ns) - flight.expected
        if flight.check is not None:
            flight.owner.unchecked -= 1
            flight.check()

    def measured(
        self, prepared: PreparedProgram, span: Span, marks: Sequence[Any], enqueued: Sequence[int]
    ) -> DeviceTimes:
        """Wait for the last mark of a launch. Returns the device time between each mark and the one before it."""
        times = DeviceTimes(self._driver.elapsed_ns(marks), enqueued)
        known = prepared.device_times
        if len(known) >= KNOWN and span not in known:
            known.clear()
        known[span] = times
        return times
