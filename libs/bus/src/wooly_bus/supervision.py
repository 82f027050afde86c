"""The threads and tasks on which a service lives. When one of them ends unexpectedly, the process ends, at once.

A service whose threads do not all run is worse than a service that is down: it still answers, and does not do its work. So every
thread and every task of ours is started here. An unexpected end is logged with its traceback; then the process has `GRACE_S` to
say its last words, and ends with a status of its own. Processes that are no services (a user's script) only log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

log = logging.getLogger("wooly.bus")
P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, object]]
#: Exit status of a service of which a thread or a task ended unexpectedly. Its log has the traceback.
BROKEN: Final = 4
#: Seconds from the unexpected end to the end of the process, for last words. The process is gone within a second.
GRACE_S: Final = 0.7
#: Seconds after which the process ends even where no Python code can run any more (a C function holds the interpreter). The
#: status is 1 then, and all stacks are on standard error. Longer than `GRACE_S`, so that a busy machine does not cause it.
STUCK_S: Final = 2.0
#: Seconds that a service may take from the signal to its end. Kubernetes gives a pod 30 before it kills its processes.
END_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a service ends.

    Attributes:
        reason: for people.
        status: the exit status of the process.
    """

    reason: str
    status: int


class _Service:
    """This process, if it is a service. Its watchdog exists from the start: after a failure there may be no room for a thread."""

    def __init__(self, name: str, expected: tuple[type[Exception], ...]) -> None:
        self.name = name
        self.expected = expected
        self.failure: Failure | None = None
        self.stopping = False
        self.listeners: list[Callable[[], object]] = []
        self._first = threading.Lock()
        self._ending, self._failed = threading.Event(), threading.Event()
        self._tasks: Sequence[asyncio.Task[Any]] = ()
        threading.Thread(target=self._end_soon, name="wooly-watchdog", daemon=True).start()

    def stop(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Begin to end, as it was asked to. After `END_S` it counts as a failure that the process is still there.

        Args:
            tasks: those that are to end now.
        """
        self.stopping, self._tasks = True, tasks
        self._ending.set()

    def fail(self, failure: Failure) -> bool:
        """Begin to end. False if the process is ending already."""
        if not self._first.acquire(blocking=False):
            return False
        self.failure = failure
        self._failed.set()
        self._ending.set()
        with contextlib.suppress(Exception):  # standard error is no file
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
        return True

    def _end_soon(self) -> NoReturn:
        self._ending.wait()
        if not self._failed.wait(END_S):
            left = ", ".join([f"task {task.get_name()}" for task in self._tasks if not task.done()])
            fail("the wait for the service's end", TimeoutError(f"{END_S:g} s are over; left: {left or 'no task'}"))
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback()
        time.sleep(GRACE_S)
        assert self.failure is not None
        os._exit(self.failure.status)


_service: _Service | None = None
#: Errands that run: the event loop itself does not keep them alive.
_errands: set[asyncio.Task[Any]] = set()


def supervised(
    service: str, expected: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorates a service's `main`: its process ends, with the status of the failure, when one of its threads or tasks fails.

    Args:
        service: its name, for the log.
        expected: what `main` may raise where the service cannot work here (a wrong setting, no NATS): logged without a
            traceback, and the status is 1.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            global _service
            _service = _Service(service, expected)
            threading.excepthook = _on_thread_exception
            mend_wait_for()
            status = 0
            try:
                status = main(*args, **kwargs)
            except expected as e:
                log.error("the %s ends: %s", service, e)
                status = 1
            except Exception as e:
                if failure() is None:
                    fail("the main thread", e)
            failed = failure()
            return status if failed is None else failed.status

        return run

    return decorate


def run(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, which after an unexpected error waits for threads no longer than the process may live."""

    async def watched() -> None:
        try:
            await work
        except Exception as e:
            if _service is not None and not isinstance(e, _service.expected):
                fail("the main thread", e)
            raise

    asyncio.run(watched())


def mend_wait_for() -> None:
    """Replace `asyncio.wait_for` on Python 3.11, in this process, by one that never loses a cancellation.

    Python 3.11's own loses the cancellation of the calling task when the awaited future is done in the same turn of the event
    loop (CPython issue 86296, mended in 3.12). The task then goes on, and code that awaits the task's end never continues.
    Libraries such as nats-py call `asyncio.wait_for` too, so it is replaced for all of them.
    """
    if sys.version_info < (3, 12):
        asyncio.wait_for = asyncio.tasks.wait_for = _wait_for  # type: ignore[assignment]  # theirs takes generators, too


async def _wait_for(fut: Awaitable[T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await fut


def failure() -> Failure | None:
    """Why this process is ending; None while nothing of it has failed."""
    return None if _service is None else _service.failure


def on_failure(listener: Callable[[], object]) -> None:
    """Have `listener` called when something fails, in the thread that failed. It must not wait."""
    if _service is not None:
        _service.listeners.append(listener)


def fail(what: str, error: BaseException | None, status: int = BROKEN) -> None:
    """`what` ended unexpectedly, of `error`: log it. A service's process ends within `GRACE_S`.

    Args:
        what: the thread or task, for people.
        error: what it raised; None: it returned.
        status: the exit status of the process.
    """
    service = _service
    why = "it returned" if error is None else f"{type(error).__name__}: {error}"
    reason = f"{what} ended unexpectedly: {why}"
    first = service is not None and service.fail(Failure(reason, status))  # before anything that could wait
    with contextlib.suppress(Exception):
        if service is None:
            log.error("%s", reason, exc_info=error)
        elif not first:
            log.warning("%s, too", reason)
        else:
            log.critical("%s; the %s's process ends with status %d", reason, service.name, status, exc_info=error)
    if first and service is not None:
        for listener in list(service.listeners):
            with contextlib.suppress(Exception):
                listener()


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    """The net below: a thread that some library started. While the service stops, some find their event loop gone: no failure."""
    if args.exc_type is SystemExit:
        return
    what = f"thread {args.thread.name if args.thread is not None else '?'}"
    if _service is not None and _service.stopping:
        log.warning("%s ended while the %s stops", what, _service.name, exc_info=args.exc_value)
    else:
        fail(what, args.exc_value)


def start_thread(target: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread:
    """Start a thread that may return when it is done, and must not raise."""

    def run() -> None:
        try:
            target()
        except BaseException as e:
            fail(f"thread {name}", e)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def start_call(function: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Call `function` in a thread of its own; whoever started it takes what it returns or raises.

    For what takes as long as a stranger wishes: the threads of `asyncio.to_thread` are few, and others wait for them.
    """
    called: concurrent.futures.Future[T] = concurrent.futures.Future()
    called.set_running_or_notify_cancel()  # a thread cannot be stopped from outside

    def run() -> None:
        try:
            called.set_result(function())
        except BaseException as e:
            called.set_exception(e)

    start_thread(run, name)
    return called


def start_task(work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
    """Start a task that must go on until it is cancelled: if it raises or returns, the service has failed."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            fail(f"task {name}", task.exception())

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


def start_errand(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that does one thing, for one request or session, and ends.

    What it raises is logged, and is the fault of that one thing: nobody's session must end because another's request fails. The
    task is kept until it is done; whoever starts it may wait for it, and cancel it.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        _errands.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s: %s", name, type(error).__name__, error, exc_info=error)

    task = asyncio.create_task(work, name=name)
    _errands.add(task)
    task.add_done_callback(ended)
    return task


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The net below: a callback or a forgotten task of some library. What is ours is started by the functions above."""
    error = context.get("exception")
    log.error("in the event loop: %s", context.get("message"), exc_info=error)


async def run_for_ever(works: Mapping[str, Work], ending: Work) -> None:
    """Run what a service lives on until `ending` returns (a signal came). Returns at once when anything of the process fails.

    Args:
        works: by name; each goes on until it is cancelled.
        ending: returns when the service is to end.

    Raises:
        Exception: what a work raised, where this process is no service (a test).
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_exception)
    failed = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is over already
            loop.call_soon_threadsafe(failed.set)

    on_failure(wake)
    if failure() is not None:
        failed.set()
    running = [start_task(work(), name) for name, work in works.items()]
    waiting = [asyncio.create_task(ending()), asyncio.create_task(failed.wait())]
    try:
        done, _ = await asyncio.wait((*waiting, *running), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if failure() is None:  # else it is logged already, and the process ends
                task.result()
    finally:
        if _service is not None:
            _service.stop(running)
        for task in (*waiting, *running):
            task.cancel()
        await asyncio.gather(*waiting, *running, return_exceptions=True)
