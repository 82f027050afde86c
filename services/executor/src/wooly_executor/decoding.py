"""Takes in what grows with a stranger's bytes, beside the device's thread: definitions, sources of kernels, modules of jobs.

A few threads, of which one decodes at a time. All threads of the process share Python's lock, so a decoder works in slices: at
the end of each (`wooly_wis.pauses`) it looks whether the device's thread is at work, and then waits several times as long as it
worked. Tenants take turns, and a tenant has one decoding at a time. What takes too much time of a core is refused.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from wooly_bus.supervision import start_thread
from wooly_wis.errors import DecodeError
from wooly_wis.pauses import pausing

from wooly_executor.errors import DecodingCancelledError, DecodingTooLongError, ExecutorError, forget_frames

log = logging.getLogger("wooly.executor")

#: Threads: tenants whose decodings are under way together, taking turns slice by slice.
WORKERS = 4
#: Decodings of at least so many bytes, and how many of them are under way together: others keep a way past them.
LARGE = 256 << 10
LARGE_AT_ONCE = 2
#: A slice, in ns, and how long a thread waits for Python's lock before it asks for it. So long at most does a decoder that works
#: while the device rests delay the device's thread; the interpreter's own value is 5 ms.
SLICE_NS = 100_000
#: Times a slice that a decoder waits after it, while the device works: for its own class or a lower one, and for a higher one.
EQUAL_WAIT = 1
HIGHER_WAIT = 31
#: The longest sleep in ns, after which it is seen that the device rests.
SLEEP_NS = 500_000


class DeviceActivity:
    """What the device's thread is at. It writes, decoders read.

    Attributes:
        resting: it waits for something to happen.
        priority: class of what ran on the device last.
    """

    __slots__ = ("priority", "resting")

    def __init__(self) -> None:
        self.resting = False
        self.priority = 4


class Decoding:
    """Something to be taken in.

    Args:
        tenant: whose turn it takes.
        priority: class of the session.
        nbytes: its length.
        work: takes it in, with pauses.
        done: told of the result or of what was raised, and of the ns of a core that it took; by a decoder's thread.

    Attributes:
        cancelled: nobody waits for it any more.
    """

    __slots__ = ("cancelled", "done", "nbytes", "priority", "tenant", "work")

    def __init__(
        self,
        tenant: str,
        priority: int,
        nbytes: int,
        work: Callable[[], Any],
        done: Callable[[Any, Exception | None, int], None],
    ) -> None:
        self.tenant, self.priority, self.nbytes = tenant, priority, nbytes
        self.work, self.done = work, done
        self.cancelled = False


class Decoders:
    """The threads. They begin with the first decoding.

    Args:
        limit_s: seconds of a core that one decoding may take.

    Attributes:
        activity: for the device's thread to write.
    """

    def __init__(self, limit_s: float = 10.0) -> None:
        self.activity = DeviceActivity()
        self.limit_ns = int(limit_s * 1e9)
        self._fair_lock = _FairLock()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Decoding]] = OrderedDict()
        self._running: dict[str, Decoding] = {}
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def submit(self, decoding: Decoding) -> None:
        """Have it taken in. From any thread."""
        with self._changed:
            self._waiting.setdefault(decoding.tenant, deque()).append(decoding)
            if len(self._threads) < min(WORKERS, len(self._waiting) + len(self._running)):
                if not self._threads:
                    sys.setswitchinterval(SLICE_NS / 1e9)
                self._threads.append(start_thread(self._serve, "decoder"))
            self._changed.notify()

    def stop(self) -> None:
        """Give up what is under way, and end the threads."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            for decoding in self._running.values():
                decoding.cancelled = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                decoding = self._next()
                while decoding is None:
                    if self._stopped:
                        return
                    self._changed.wait()
                    decoding = self._next()
            self._take_in(decoding)
            with self._changed:
                del self._running[decoding.tenant]
                self._changed.notify_all()

    def _next(self) -> Decoding | None:
        """The next tenant's, of those of whom none is under way."""
        large = sum([d.nbytes >= LARGE for d in self._running.values()])
        for tenant, waiting in self._waiting.items():
            while waiting and waiting[0].cancelled:
                waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
                return self._next()
            if tenant in self._running or (waiting[0].nbytes >= LARGE and large >= LARGE_AT_ONCE):
                continue
            found = self._running[tenant] = waiting.popleft()
            self._waiting.move_to_end(tenant)
            if not waiting:
                del self._waiting[tenant]
            return found
        return None

    def _take_in(self, decoding: Decoding) -> None:
        result: Any = None
        error: Exception | None = None
        self._fair_lock.take()
        begun = time.thread_time_ns()
        try:
            with pausing(_Slices(self, decoding, begun).pause):
                result = decoding.work()
        except Exception as e:
            if not isinstance(e, (ExecutorError, DecodeError, MemoryError, RecursionError)):
                log.exception("taking in %d bytes of %s failed", decoding.nbytes, decoding.tenant)
            forget_frames(e)
            error = e
        finally:
            self._fair_lock.give()
        decoding.done(result, error, time.thread_time_ns() - begun)

    def slice_over(self, decoding: Decoding, begun: int, took: int) -> bool:
        """A slice has ended: wait for the next. Whether it may be used up though the device begins to work.

        Args:
            decoding: whose.
            begun: the thread's CPU time when it began.
            took: ns that the slice took.

        Raises:
            DecodingCancelledError: nobody waits for it any more.
            DecodingTooLongError: it has taken too long.
        """
        activity = self.activity
        if decoding.cancelled:
            raise DecodingCancelledError("nobody waits for it any more")
        if time.thread_time_ns() - begun > self.limit_ns:
            raise DecodingTooLongError(
                f"taking in {decoding.nbytes} bytes took more than {self.limit_ns / 1e9:g} s of a core "
                "(WOOLY_EXECUTOR_DECODE_S); send smaller programs: WOOLYAI_FLUSH_INSTRUCTIONS"
            )
        rested = activity.resting
        if not rested:
            end = time.perf_counter_ns() + took * (
                EQUAL_WAIT if decoding.priority <= activity.priority else HIGHER_WAIT
            )
            while not activity.resting and not decoding.cancelled and (left := end - time.perf_counter_ns()) > 0:
                time.sleep(min(left, SLEEP_NS) / 1e9)
        if self._fair_lock.contended:
            self._fair_lock.give()
            self._fair_lock.take()
        return not rested


class _Slices:
    """The slices of one decoding."""

    __slots__ = ("_activity", "_begun", "_decoders", "_decoding", "_granted", "_since", "_until")

    def __init__(self, decoders: Decoders, decoding: Decoding, begun: int) -> None:
        self._decoders, self._decoding, self._begun = decoders, decoding, begun
        self._activity = decoders.activity
        self._granted = False
        self._since = time.perf_counter_ns()
        self._until = self._since + SLICE_NS

    def pause(self) -> None:
        """See `wooly_wis.pauses`."""
        now = time.perf_counter_ns()
        if now < self._until and (self._granted or self._activity.resting):
            return
        self._granted = self._decoders.slice_over(self._decoding, self._begun, now - self._since)
        self._since = time.perf_counter_ns()
        self._until = self._since + SLICE_NS


class _FairLock:
    """Who decodes now: one thread, then the one that has waited longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    @property
    def contended(self) -> bool:
        """Whether another thread waits."""
        return bool(self._waiting)

    def take(self) -> None:
        """Wait for the turn."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def give(self) -> None:
        """End it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
