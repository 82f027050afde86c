"""When a plan is asked for: compiling takes cores, caches and memory from what runs on the same machine.

So it is for times when the device has nothing to do, or for when programs have taken as much of its time as compiling takes.
One program at a time, that which took most first.

    async with throttle.permit(taken_ns):      waits; while it lasts, nobody else is let in
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

#: Seconds between two looks at the device, and looks in a row at which it did next to nothing: then it idles. A CPU's device time
#: is that of its thread, which stands still where others have the core, so many looks count more than long ones.
LOOK_S = 0.1
QUIET_LOOKS = 10
#: The share of the time between two looks that is next to nothing.
NEXT_TO_NOTHING = 0.05
#: Where the device never idles, programs must have taken so many times what compiling takes. What plans save is not known before;
#: to begin when as much was spent as they cost loses the least against who had known.
WORTH = 1
#: What compiling takes in seconds, as long as nobody knows; and at most: a compiler may be away for long.
EXPECTED_S = 1.0
MOST_S = 5.0


@dataclass(eq=False, slots=True)
class _Waiting:
    """Who waits. `beside`: was let in beside a device that works."""

    taken_ns: Callable[[], int]
    turn: asyncio.Future[None]
    beside: bool = False


class CompileThrottle:
    """Lets one in at a time. Used by one event loop.

    Args:
        busy_ns: device time so far.
        occupied: whether the device is at work now: what it does is counted when it is done.
        clock: seconds.
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
        #: Device time that programs have taken beyond what their compiling was worth; of those that were let in beside work.
        self._credit_ns = 0.0
        self._asked = asyncio.Event()
        self._seen = busy_ns(), clock()
        self._quiet = 0

    @contextlib.asynccontextmanager
    async def permit(self, taken_ns: Callable[[], int]) -> AsyncIterator[None]:
        """Wait for one's turn, and keep it.

        Args:
            taken_ns: the device time that the program has taken so far.
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
            took_s = min(self._clock() - begun, MOST_S)
            self._expected_s += (took_s - self._expected_s) / 4
            if mine.beside:
                self._credit_ns = min(self._credit_ns - WORTH * took_s * 1e9, 0)

    async def run(self) -> None:
        """Look at the device while somebody waits, until cancelled."""
        while True:
            if not self._waiting:
                self._asked.clear()
                await self._asked.wait()
                self._seen, self._quiet = (self._busy_ns(), self._clock()), 0
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Let the next one in, if it is time."""
        self._quiet = self._quiet + 1 if self._idled() else 0
        if self._inside or not self._waiting:
            return
        taken = [w.taken_ns() for w in self._waiting]
        idle = self._quiet >= QUIET_LOOKS
        if idle or self._credit_ns + sum(taken) >= WORTH * self._expected_s * 1e9:
            first = self._waiting.pop(taken.index(max(taken)))
            first.beside = not idle
            self._credit_ns += 0 if idle else max(taken)
            self._inside = True
            first.turn.set_result(None)

    def _idled(self) -> bool:
        """Whether the device did next to nothing since the last look."""
        (busy, at), self._seen = self._seen, (self._busy_ns(), self._clock())
        done, passed = self._seen[0] - busy, self._seen[1] - at
        return not self._occupied() and done < NEXT_TO_NOTHING * passed * 1e9
