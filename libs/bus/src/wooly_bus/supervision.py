"""Starts and supervises the threads and tasks of a service. If one ends unexpectedly, the process ends within a second.

A service without one of its threads is worse than a service that is down: it still answers, but does not do its work. So all of
Wooly's threads and tasks are started here. An unexpected end is logged with its traceback. Then the process has `GRACE_S` to
report the failure, and ends with status `BROKEN`. A process that is not a service (a user's script) only logs.
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
#: Exit status of a service after the unexpected end of a thread or task. The log has the traceback.
BROKEN: Final = 4
#: Seconds from the unexpected end of a thread or task to the end of the process: time to report the failure to other processes.
GRACE_S: Final = 0.7
#: Seconds after which the process ends even if no Python code can run (a C function holds the interpreter lock). The exit status
#: is 1 then, and all stacks are on standard error. Longer than `GRACE_S`, so that a busy machine does not cause it.
STUCK_S: Final = 2.0
#: Seconds that a service may take from the signal to its end. It is less than the 30 s after which Kubernetes kills a pod.
END_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a service ends.

    Attributes:
        reason: the reason, as text for logs.
        status: exit status of the process.
    """

    reason: str
    status: int


class _Service:
    """State of this process if it is a service. The watchdog thread starts here, because after a failure it may fail to start."""

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
        """Begin a requested shutdown. If the process still runs after `END_S`, this is a failure.

        Args:
            tasks: the tasks that must end.
        """
        self.stopping, self._tasks = True, tasks
        self._ending.set()

    def fail(self, failure: Failure) -> bool:
        """Begin to end because of a failure. Returns False if a failure is being handled already."""
        if not self._first.acquire(blocking=False):
            return False
        self.failure = failure
        self._failed.set()
        self._ending.set()
        with contextlib.suppress(Exception):  # standard error is not a file
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
        return True

    def _end_soon(self) -> NoReturn:
        self._ending.wait()
        if not self._failed.wait(END_S):
            left = ", ".join([f"task {task.get_name()}" for task in self._tasks if not task.done()])
            fail("the shutdown", TimeoutError(f"not complete after {END_S:g} s; still running: {left or 'no task'}"))
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback()
        time.sleep(GRACE_S)
        assert self.failure is not None
        os._exit(self.failure.status)


_service: _Service | None = None
#: Running errands. The event loop holds only weak references to tasks.
_errands: set[asyncio.Task[Any]] = set()


def supervised(
    service: str, expected: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate the `main` of a service: if a thread or task fails, the process ends with the status of the failure.

    Args:
        service: name of the service, for the log.
        expected: errors that `main` raises if the service cannot run here (a wrong setting, no NATS). They are logged without a
            traceback, and the exit status is 1.
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
    """Run a coroutine as `asyncio.run` does. After an unexpected error, do not wait for threads longer than `GRACE_S`."""

    async def watched() -> None:
        try:
            await work
        except Exception as e:
            if _service is not None and not isinstance(e, _service.expected):
                fail("the main thread", e)
            raise

    asyncio.run(watched())


def mend_wait_for() -> None:
    """Replace `asyncio.wait_for` on Python 3.11, in this process, by a version that never loses a cancellation.

    The version of Python 3.11 loses the cancellation of the calling task if the awaited future completes in the same turn of the
    event loop (CPython issue 86296, fixed in 3.12). The task then continues, and code that awaits its end waits forever.
    Libraries such as nats-py call `asyncio.wait_for` too, so it is replaced for all of them.
    """
    if sys.version_info < (3, 12):
        asyncio.wait_for = asyncio.tasks.wait_for = _wait_for  # type: ignore[assignment]  # the original also accepts generators


async def _wait_for(fut: Awaitable[T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await fut


def failure() -> Failure | None:
    """The reason why this process is ending; None if no failure has occurred."""
    return None if _service is None else _service.failure


def on_failure(listener: Callable[[], object]) -> None:
    """Register `listener`. It is called after a failure, in the thread that failed, and must not block."""
    if _service is not None:
        _service.listeners.append(listener)


def fail(what: str, error: BaseException | None, status: int = BROKEN) -> None:
    """Log that a thread or task ended unexpectedly. The process of a service then ends after `GRACE_S`.

    Args:
        what: name of the thread or task, for the log.
        error: the error that it raised; None: it returned.
        status: exit status of the process.
    """
    service = _service
    why = "it returned" if error is None else f"{type(error).__name__}: {error}"
    reason = f"{what} ended unexpectedly: {why}"
    first = service is not None and service.fail(Failure(reason, status))  # first, because the code below could block
    with contextlib.suppress(Exception):
        if service is None:
            log.error("%s", reason, exc_info=error)
        elif not first:
            log.warning("%s (while the process ends because of another failure)", reason)
        else:
            log.critical("%s; the %s's process ends with status %d", reason, service.name, status, exc_info=error)
    if first and service is not None:
        for listener in list(service.listeners):
            with contextlib.suppress(Exception):
                listener()


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Handle an error in a thread of a library.

    During a shutdown this is no failure: such a thread may find its event loop closed.
    """
    if args.exc_type is SystemExit:
        return
    what = f"thread {args.thread.name if args.thread is not None else '?'}"
    if _service is not None and _service.stopping:
        log.warning(
            "%s ended with an error during the shutdown of the %s", what, _service.name, exc_info=args.exc_value
        )
    else:
        fail(what, args.exc_value)


def start_thread(target: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread:
    """Start a thread. It may return, but an error that it raises is a failure of the process."""

    def run() -> None:
        try:
            target()
        except BaseException as e:
            fail(f"thread {name}", e)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def start_call(function: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Call `function` in a new thread. The future gets its result or error.

    Use this for calls whose duration an unauthenticated client controls. `asyncio.to_thread` has few threads, and such calls
    would block the others.
    """
    called: concurrent.futures.Future[T] = concurrent.futures.Future()
    called.set_running_or_notify_cancel()  # a running thread cannot be cancelled

    def run() -> None:
        try:
            called.set_result(function())
        except BaseException as e:
            called.set_exception(e)

    start_thread(run, name)
    return called


def start_task(work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
    """Start a task that must run until it is cancelled. If it raises or returns, the service has failed."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            fail(f"task {name}", task.exception())

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


def start_errand(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start an errand: a task for one request or session.

    Its error is logged and does not end the process, because one failed request must not end other sessions. This module holds a
    reference to the task until it is done. The caller may await and cancel it.
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
    """Log an error in a callback or task of a library. Wooly's own tasks are started by the functions above."""
    error = context.get("exception")
    log.error("error in the event loop: %s", context.get("message"), exc_info=error)


async def run_for_ever(works: Mapping[str, Work], ending: Work) -> None:
    """Run the tasks of a service until `ending` returns (because of a signal). After a failure in the process, return at once.

    Args:
        works: coroutine functions by name; each must run until it is cancelled.
        ending: returns when the service must end.

    Raises:
        Exception: the error of a task, if this process is not a service (in tests).
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_exception)
    failed = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed already
            loop.call_soon_threadsafe(failed.set)

    on_failure(wake)
    if failure() is not None:
        failed.set()
    running = [start_task(work(), name) for name, work in works.items()]
    waiting = [asyncio.create_task(ending()), asyncio.create_task(failed.wait())]
    try:
        done, _ = await asyncio.wait((*waiting, *running), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if failure() is None:  # otherwise the failure is logged already, and the process ends
                task.result()
    finally:
        if _service is not None:
            _service.stop(running)
        for task in (*waiting, *running):
            task.cancel()
        await asyncio.gather(*waiting, *running, return_exceptions=True)
