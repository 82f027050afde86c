"""Counts how long a link waits for answers, how much of this is the network's time, and for which Python lines.

The shortest time from a question to its answer is an upper bound of the connection's round trip. A wait counts as the network's
for at most this time, and for the time in which a large answer arrives. The rest is the time of the device. This module knows
neither sockets nor frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from wooly.origins import Origin, describe_origin, origin

#: Number of lines whose waits are counted apart. The waits of further lines are counted together.
MOST_LINES = 4096
#: Number of lines in `Waits.top`.
TOP = 5
#: Name of the waits of further lines.
FURTHER = "other lines"
#: Payload, in bytes, from which the time of sending or receiving counts as the network's.
LARGE = 64 << 10


class _Line:
    """The waits of one Python line."""

    __slots__ = ("count", "network_s", "waiting_s", "where")

    def __init__(self, where: Origin | None) -> None:
        self.where = where
        self.count, self.waiting_s, self.network_s = 0, 0.0, 0.0


class Waits:
    """The waits of one link.

    Args:
        clock: returns seconds.

    Attributes:
        trip_s: the shortest time from a question to its answer so far, in seconds.
        clock: see Args.
        near: whether the executor is on this machine. Then no wait is the network's.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.near = False
        self.trip_s = float("inf")
        self._lines: dict[tuple[int, int], _Line] = {}
        self._further = _Line(None)

    @property
    def count(self) -> int:
        """Number of waits."""
        return sum([line.count for line in self._all()])

    @property
    def waiting_s(self) -> float:
        """Seconds for which the link waited for answers and for sending large payloads."""
        return sum([line.waiting_s for line in self._all()])

    @property
    def network_s(self) -> float:
        """The network's part of `waiting_s`."""
        return sum([line.network_s for line in self._all()])

    def _all(self) -> list[_Line]:
        return [*list(self._lines.values()), self._further]  # another thread may add a line meanwhile

    def answered(self, seconds: float, transfer_s: float = 0.0, *, asked: bool, where: Origin | None = None) -> None:
        """Note a wait for an answer.

        Args:
            seconds: how long the link waited.
            transfer_s: the part of it in which a large payload arrived.
            asked: whether the wait began with the question. Such a wait bounds the round trip.
            where: the Python line that waited; None: the line that calls now.
        """
        trip_s = self.trip_s
        if asked and seconds < trip_s:
            self.trip_s = trip_s = seconds
        network_s = trip_s + transfer_s
        self._add(seconds, network_s if network_s < seconds else seconds, where or origin())

    def sent(self, seconds: float) -> None:
        """Note the time of sending a large payload."""
        self._add(seconds, seconds, origin())

    def _add(self, seconds: float, network_s: float, where: Origin) -> None:
        code, at = where
        key = id(code), at
        line = self._lines.get(key)
        if line is None:
            line = self._further
            if len(self._lines) < MOST_LINES:
                line = self._lines[key] = _Line(where)  # it keeps the code object alive, so its id is not reused
        line.count += 1
        line.waiting_s += seconds
        if not self.near:
            line.network_s += network_s


def top(waits: list[Waits]) -> list[dict[str, Any]]:
    """The lines that waited longest for the network, or else for the device: at most `TOP`, over all links of a session.

    Returns:
        Per line: ``line`` (file, number and function), ``waits``, ``waiting_s`` and ``network_s``.
    """
    found: dict[str, dict[str, Any]] = {}
    for each in waits:
        for line in each._all():
            name = FURTHER if line.where is None else describe_origin(line.where)
            sums = found.setdefault(name, {"line": name, "waits": 0, "waiting_s": 0.0, "network_s": 0.0})
            sums["waits"] += line.count
            sums["waiting_s"] += line.waiting_s
            sums["network_s"] += line.network_s
    longest = sorted(found.values(), key=lambda s: (-s["network_s"], -s["waiting_s"], s["line"]))
    return [s for s in longest[:TOP] if s["waits"]]
