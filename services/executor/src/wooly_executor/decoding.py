"""Decodes what untrusted clients send, outside the device's thread: programs, kernel sources, modules of jobs.

There are a few threads, and one decodes at a time. All threads of the process share Python's lock, so a decoder works in slices.
After each slice (`wooly_wis.pauses`) it checks whether the device's thread works, and if so waits for several times the length of
the slice. Tenants take turns, and a tenant has one decoding at a time. A decoding that needs too much core time is refused.
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
from wooly_wis.errors import WisError
from wooly_wis.pauses import pausing

from wooly_executor.errors import DecodingCancelledError, DecodingTooLongError, ExecutorError, forget_frames

log = logging.getLogger("wooly.executor")

#: Number of threads: so many tenants can decode concurrently, slice by slice.
WORKERS = 4
#: Size, in bytes, from which a decoding is large, and the maximum number of large ones in progress. The other threads stay free
#: for small ones.
LARGE = 256 << 10
LARGE_AT_ONCE = 2
#: Length of a slice, in ns; also Python's switch interval. It bounds how long a decoder that started while the device was idle
#: delays the device's thread. The interpreter's default interval is 5 ms.
SLICE_NS = 100_000
#: Pause after a slice while the device works, as a multiple of the slice: for sessions of the running class or a higher one, and
#: for those of a lower class.
EQUAL_WAIT = 1
HIGHER_WAIT = 31
#: Maximum sleep, in ns, before a decoder checks again whether the device is idle.
SLEEP_NS = 500_000


class DeviceActivity:
    """What the device's thread does now. The device's thread writes it, and decoders read it.

    Attributes:
        resting: the thread waits for an event.
        priority: class of the session that ran last.
    """

    __slots__ = ("priority", "resting")

    def __init__(self) -> None:
        self.resting = False
        self.priority = 4


class Decoding:
    """One decoding in the queue.

    Args:
        tenant: the tenant whose turn it uses.
        priority: class of the session.
        nbytes: size of the input.
        work: decodes, with pauses.
        done: gets the result or None, the error or None, and the core time in ns. A decoder's thread calls it.

    Attributes:
        cancelled: the result is no longer needed.
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
    """The decoder threads. They start with the first decoding.

    Args:
        limit_s: maximum core time of one decoding, in seconds.

    Attributes:
        activity: written by the device's thread.
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
        """Queue a decoding. Any thread may call this."""
        with self._changed:
            self._waiting.setdefault(decoding.tenant, deque()).append(decoding)
            if len(self._threads) < min(WORKERS, len(self._waiting) + len(self._running)):
                if not self._threads:
                    sys.setswitchinterval(SLICE_NS / 1e9)
                self._threads.append(start_thread(self._serve, "decoder"))
            self._changed.notify()

    def stop(self) -> None:
        """Cancel all decodings and end the threads."""
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
            self._decode(decoding)
            with self._changed:
                del self._running[decoding.tenant]
                self._changed.notify_all()

    def _next(self) -> Decoding | None:
        """Take the first decoding of the next tenant that has no decoding in progress."""
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

    def _decode(self, decoding: Decoding) -> None:
        result: Any = None
        error: Exception | None = None
        self._fair_lock.take()
        begun = time.thread_time_ns()
        try:
            with pausing(_Slices(self, decoding, begun).pause):
                result = decoding.work()
        except Exception as e:
            if not isinstance(e, (ExecutorError, WisError, MemoryError, RecursionError)):
                log.exception("cannot decode %d bytes of tenant %s: unexpected error", decoding.nbytes, decoding.tenant)
            forget_frames(e)
            error = e
        finally:
            self._fair_lock.give()
        decoding.done(result, error, time.thread_time_ns() - begun)

    def slice_over(self, decoding: Decoding, begun: int, took: int) -> bool:
        """End a slice and wait for the next one.

        Args:
            decoding: the decoding in progress.
            begun: the thread's CPU time at the start of the decoding, in ns.
            took: length of the slice, in ns.

        Returns:
            Whether the next slice may be used up even if the device starts to work.

        Raises:
            DecodingCancelledError: the result is no longer needed.
            DecodingTooLongError: the decoding exceeds its core time.
        """
        activity = self.activity
        if decoding.cancelled:
            raise DecodingCancelledError("the decoding was cancelled: its session has ended")
        if time.thread_time_ns() - begun > self.limit_ns:
            raise DecodingTooLongError(
                f"decoding {decoding.nbytes} bytes took more than {self.limit_ns / 1e9:g} s of a core "
                "(WOOLY_EXECUTOR_DECODE_S); send smaller programs: lower WOOLYAI_FLUSH_INSTRUCTIONS"
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
    """A lock that threads get in the order in which they asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    @property
    def contended(self) -> bool:
        """Whether another thread waits."""
        return bool(self._waiting)

    def take(self) -> None:
        """Acquire the lock."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def give(self) -> None:
        """Release the lock."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
