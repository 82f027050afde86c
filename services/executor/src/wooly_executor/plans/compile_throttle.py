"""Decides when a compiler may be asked for a plan. Compiling takes cores, caches and memory from the programs on the same
machine.

So compiling waits until the device is idle, or until programs have used as much device time as compiling takes. One program is
compiled at a time. The program that has used most device time comes first.

    async with throttle.permit(taken_ns):      waits for the permit; only one holder at a time has it
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

#: Seconds between two checks of the device, and the number of consecutive checks with almost no work after which the device
#: counts as idle. Many short checks are better than few long ones: on a CPU, device time is CPU time of the loop's thread, which
#: stands still while other threads have the core.
CHECK_S = 0.1
IDLE_CHECKS = 10
#: Share of the time between two checks that the device may work and still count as idle.
IDLE_SHARE = 0.05
#: On a device that is never idle, programs must have used this many times the device time that compiling takes. The gain of a
#: plan is unknown in advance. Starting when the cost is reached is at most twice as bad as the best decision.
COST_FACTOR = 1
#: Expected seconds of one compilation before the first one is measured, and the maximum that one measurement counts as, because a
#: compiler may not answer for long.
EXPECTED_S = 1.0
MAX_COST_S = 5.0


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that waits. `beside`: it was permitted while the device was busy."""

    taken_ns: Callable[[], int]
    turn: asyncio.Future[None]
    beside: bool = False


class CompileThrottle:
    """Gives one permit at a time. One event loop uses it.

    Args:
        busy_ns: returns the device time so far.
        occupied: returns whether the device works now; the time of a running launch counts when the launch ends.
        clock: returns seconds.
    """

    def __init__(
        self, busy_ns: Callable[[], int], occupied: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._busy_ns = busy_ns
        self._occupied = occupied
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._inside = False
        self._expected_s = EXPECTED_S
        #: Device time of permitted programs minus the cost of their compilations, in ns. Only permits on a busy device count.
        self._credit_ns = 0.0
        self._asked = asyncio.Event()
        self._seen = busy_ns(), clock()
        self._idle_checks = 0

    @contextlib.asynccontextmanager
    async def permit(self, taken_ns: Callable[[], int]) -> AsyncIterator[None]:
        """Wait for the permit, and hold it during the block.

        Args:
            taken_ns: returns the device time that the program has used so far.
        """
        mine = _Waiting(taken_ns, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._asked.set()
        try:
            await mine.turn
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._inside = False
            raise
        begun = self._clock()
        try:
            yield
        finally:
            self._inside = False
            took_s = min(self._clock() - begun, MAX_COST_S)
            self._expected_s += (took_s - self._expected_s) / 4
            if mine.beside:
                self._credit_ns = min(self._credit_ns - COST_FACTOR * took_s * 1e9, 0)

    async def run(self) -> None:
        """Check the device while requests wait, until cancelled."""
        while True:
            if not self._waiting:
                self._asked.clear()
                await self._asked.wait()
                self._seen, self._idle_checks = (self._busy_ns(), self._clock()), 0
            await asyncio.sleep(CHECK_S)
            self.check()

    def check(self) -> None:
        """Give the permit to the next request if the conditions hold."""
        self._idle_checks = self._idle_checks + 1 if self._was_idle() else 0
        if self._inside or not self._waiting:
            return
        taken = [w.taken_ns() for w in self._waiting]
        idle = self._idle_checks >= IDLE_CHECKS
        if idle or self._credit_ns + sum(taken) >= COST_FACTOR * self._expected_s * 1e9:
            first = self._waiting.pop(taken.index(max(taken)))
            first.beside = not idle
            self._credit_ns += 0 if idle else max(taken)
            self._inside = True
            first.turn.set_result(None)

    def _was_idle(self) -> bool:
        """Whether the device did almost no work since the last check."""
        (busy, at), self._seen = self._seen, (self._busy_ns(), self._clock())
        done, passed = self._seen[0] - busy, self._seen[1] - at
        return not self._occupied() and done < IDLE_SHARE * passed * 1e9
