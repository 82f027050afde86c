"""Signal handlers of the program run between operations, or while the client waits for an answer, never inside an operation.

Python runs a signal handler between any two steps of the main thread, and the handler may raise an exception (KeyboardInterrupt,
a timeout). Inside an operation, such an exception would leave the client's records and the data channel inconsistent. So while a
session is open, each handler is wrapped. If the main thread is inside an operation, the wrapper does nothing, and a thread sends
the signal again a moment later. A wait for an answer is safe to interrupt. The handler may then use the device, for example to
save a checkpoint.
"""

from __future__ import annotations

import dis
import enum
import functools
import gc
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import wooly_bus.channel
import wooly_wis
from wooly_bus.channel import ChannelClient
from wooly_bus.supervision import start_thread

from wooly.link import Link
from wooly.python_private import frame_at
from wooly.torch_private import ENGINE_CODE, GUARD_CODE

Handler = Callable[[int, FrameType | None], Any]
Patch = tuple[Any, str, Any]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Code that keeps the client's records: files and folders whose functions must not be interrupted.
_RECORDING = (
    *[f"{_HERE}{name}.py" for name in ("device", "devices", "interrupts", "link", "recorder", "rng", "storage")],
    *[f"{_HERE}{name}{os.sep}" for name in ("kernels", "graphs")],
    os.path.dirname(wooly_bus.channel.__file__ or "") + os.sep,
    os.path.dirname(wooly_wis.__file__ or "") + os.sep,
)
#: Of these, code that never calls a function of the program. Below it, other people's functions are hooks of the interpreter
#: (`sys.addaudithook`; Dynamo loads a library that has one).
_CLOSED = (
    f"{_HERE}link.py",
    os.path.dirname(wooly_bus.channel.__file__ or "") + os.sep,
    os.path.dirname(wooly_wis.__file__ or "") + os.sep,
)
#: Code that recording functions call. Whether its caller may be interrupted decides.
_LIBRARIES = (
    os.path.dirname(os.__file__) + os.sep,
    _TORCH,
    _HERE,
    "<frozen",
    "<string>",
)
#: Files of callbacks whose exceptions Python prints and ignores, and a class of PyTorch whose functions are such callbacks.
_CALLBACKS = (
    weakref.__file__,
    weakref.WeakSet.__init__.__code__.co_filename,
    f"{_TORCH}utils{os.sep}weak.py",
)
_CALLBACK_CLASS = f"{_TORCH}_dynamo{os.sep}utils.py", "ExactWeakKeyDictionary."
#: The function that waits for an answer.
_WAITING: CodeType = ChannelClient.await_input.__code__
#: The functions that have called its caller while a link waits for an answer, the innermost one first.
_AWAITED = [ChannelClient.complete.__code__, Link.wait.__code__]
#: Instructions at which Python runs signal handlers itself: the start of a function, and the end of a loop's turn. At all others,
#: native code may have asked for them.
_BETWEEN = ("RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
#: Seconds in one call after which it is not a call of PyTorch's, but one that waits (`time.sleep`, `input`).
_CALL_S = 0.05
#: Seconds until a deferred signal is sent again: at first, and at most.
_AGAIN_S = (0.0005, 0.005)
#: Maximum turns of a loop in which a signal arrives that was sent to this thread before.
_TURNS = 10_000
#: Seconds of deferral after which a handler runs even inside an operation, for example while a send waits for a stopped executor.
PATIENCE_S = 10.0


class Moment(enum.Enum):
    """What the main thread does when a signal handler is to run."""

    OPERATION = enum.auto()  #: an operation, which keeps the client's records
    CALL = (
        enum.auto()
    )  #: a call of native code, which may be PyTorch's: its C++ may ask the device guard, which may not raise
    CALLBACK = enum.auto()  #: a callback whose exceptions Python prints and ignores
    FREE = enum.auto()  #: nothing of these, or the wait for an answer


def _in_collector(frame: FrameType) -> bool:
    """Whether a callback of the garbage collector runs. Python prints and ignores its exceptions, too."""
    codes = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_code in codes:
            return True
        inner = inner.f_back
    return False


def _is_callback(code: CodeType) -> bool:
    """Whether this is code of callbacks of weak references."""
    file, prefix = _CALLBACK_CLASS
    return code.co_filename in _CALLBACKS or (code.co_filename == file and code.co_qualname.startswith(prefix))


def _is_hook(frame: FrameType) -> bool:
    """Whether a function of others runs inside an operation, as a hook of the interpreter. A handler in a wait does not."""
    inner = frame.f_back
    while inner is not None:
        code = inner.f_code
        if code is _WAITING or code.co_filename == f"{_HERE}interrupts.py":
            return False
        if code.co_filename.startswith(_CLOSED):
            return True
        inner = inner.f_back
    return False


def moment(frame: FrameType | None) -> Moment:
    """What the main thread does, by its innermost frame."""
    if frame is None:
        return Moment.FREE
    code, at = frame.f_code, frame.f_lasti
    if code is _WAITING:
        return Moment.FREE
    if code is ENGINE_CODE:
        return Moment.OPERATION
    if _is_callback(code) or (gc.callbacks and _in_collector(frame)):
        return Moment.CALLBACK
    caller: FrameType | None = frame
    while caller is not None:
        name = caller.f_code.co_filename
        if caller.f_code is GUARD_CODE or name.startswith(_RECORDING):
            return Moment.OPERATION
        if not name.startswith(_LIBRARIES):
            if _is_hook(caller):
                return Moment.OPERATION
            break
        caller = caller.f_back
    return Moment.FREE if dis.opname[code.co_code[at]].startswith(_BETWEEN) else Moment.CALL


class _Deferral:
    """One signal that is deferred.

    Attributes:
        handler: the program's handler.
        since: when the handler was to run first.
        at: the frame and its instruction when the handler was to run last.
        at_since: since when the main thread is there.
    """

    __slots__ = ("at", "at_since", "handler", "since")

    def __init__(self, handler: Handler, now: float) -> None:
        self.handler = handler
        self.since = self.at_since = now
        self.at: tuple[int, int] | None = None

    def may_wait(self, frame: FrameType | None, doing: Moment) -> bool:
        """Whether the handler may run later. Notes where the main thread is."""
        now = time.monotonic()
        at = (id(frame), frame.f_lasti if frame is not None else -1)
        if at != self.at:
            self.at, self.at_since = at, now
        blocked = doing is Moment.CALL and now - self.at_since > _CALL_S
        return not blocked and now - self.since <= PATIENCE_S


class _Deferred:
    """The signals of this process that are deferred. A thread sends them to the main thread again."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._waiting: dict[int, _Deferral] = {}
        self._again: queue.SimpleQueue[int] = queue.SimpleQueue()  # a signal handler may interrupt its `put`
        self._resent: set[int] = set()
        self._lock = threading.Lock()  # only `_run` and `deliver` take it, never a signal handler
        start_thread(self._run, "wooly-signals")

    def is_due(self, number: int, handler: Handler, frame: FrameType | None, doing: Moment) -> bool:
        """Whether a handler is to run now. If not, the signal is sent again a moment later, or its handler has run already."""
        if self.pid != os.getpid():  # a forked process has no session, and not the thread
            return True
        if number in self._resent:
            self._resent.discard(number)
            if number not in self._waiting:
                return False
        if doing is not Moment.FREE:
            deferral = self._waiting.get(number)
            if deferral is None:
                deferral = self._waiting[number] = _Deferral(handler, time.monotonic())
            if deferral.may_wait(frame, doing):
                self._again.put(number)
                return False
        self._waiting.pop(number, None)
        return True

    @property
    def waits(self) -> bool:
        """Whether a signal is deferred."""
        return bool(self._waiting)

    def deliver(self, frame: FrameType) -> None:
        """Run the handlers of all deferred signals now."""
        while self._waiting:
            with self._lock:
                number, deferral = self._waiting.popitem()
            # A signal that was sent again arrives while this loop turns, and is ignored. Later, Python could take it and the
            # program's next signal for one, and both would be ignored.
            for _ in range(_TURNS):
                if number not in self._resent:
                    break
            deferral.handler(number, frame)

    def _run(self) -> None:
        main, pause = threading.main_thread().ident, _AGAIN_S[0]
        assert main is not None
        while True:
            begun = time.monotonic()
            number = self._again.get()
            pause = _AGAIN_S[0] if time.monotonic() - begun > _AGAIN_S[1] else min(2 * pause, _AGAIN_S[1])
            time.sleep(pause)
            with self._lock:
                if number in self._waiting:
                    self._resent.add(number)
                    if hasattr(signal, "pthread_kill"):
                        signal.pthread_kill(main, number)
                    else:  # on Windows, every signal reaches the main thread
                        signal.raise_signal(number)


_deferred: _Deferred | None = None


def run_deferred() -> None:
    """Run the handlers of the deferred signals, if the main thread calls this, between two operations.

    For calls that send a frame each. The thread that sends signals again gets the interpreter's lock while the main thread sends.
    So in a loop of such calls, each signal arrives inside an operation.
    """
    deferred = _deferred
    if deferred is not None and deferred.waits and threading.current_thread() is threading.main_thread():
        deferred.deliver(frame_at(2))


def _inside_wait(waiting: FrameType, handler: Callable[[], Any]) -> Any:
    """Call a signal handler inside the wait for input of this frame, so that the handler may use the device if a link waits."""
    outer, found = waiting.f_back, []
    for _ in range(3):
        if outer is not None:
            found.append(outer)
            outer = outer.f_back
    if [frame.f_code for frame in found[1:]] != _AWAITED:
        return handler()
    return found[-1].f_locals["self"].call_inside_wait(handler)


class DeferringHandler:
    """A signal handler that calls the program's handler as soon as the main thread is not inside an operation.

    Args:
        handler: the program's handler.
        deferred: the signals that are deferred.
        lose_session: called if the handler raised an exception inside an operation, with the reason.
    """

    def __init__(self, handler: Handler, deferred: _Deferred, lose_session: Callable[[str], None]) -> None:
        self.handler = handler
        self._deferred = deferred
        self._lose_session = lose_session

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        doing = moment(frame)
        if not self._deferred.is_due(number, self.handler, frame, doing):
            return None
        try:
            if frame is not None and frame.f_code is _WAITING:
                return _inside_wait(frame, lambda: self.handler(number, frame))
            return self.handler(number, frame)
        except BaseException as e:
            if doing is Moment.OPERATION:
                self._lose_session(f"{type(e).__name__} interrupted an operation that took more than {PATIENCE_S:g} s")
            raise


class Interrupts:
    """Wraps the signal handlers of this process.

    Args:
        lose_session: ends the session with a reason.
    """

    def __init__(self, lose_session: Callable[[str], None]) -> None:
        self._lose_session = lose_session

    def patches(self) -> Iterator[Patch]:
        """Wrap the existing handlers. Yield the patches (owner, name, value) for the functions that set and return handlers.

        A function that sets a handler or a timer runs the deferred handlers first, so that none runs when the program no longer
        expects it.
        """
        global _deferred
        if _deferred is None or _deferred.pid != os.getpid():
            _deferred = _Deferred()
        deferred = _deferred
        real_set, real_get = signal.signal, signal.getsignal

        def wrapped(handler: Any) -> Any:
            """A handler that defers the program's handler. SIG_DFL, SIG_IGN and None stay, and asyncio's, which do nothing."""
            if not callable(handler) or isinstance(handler, (DeferringHandler, signal.Handlers)):
                return handler
            if str(getattr(handler, "__module__", "")).startswith("asyncio."):
                return handler
            return DeferringHandler(handler, deferred, self._lose_session)

        def deliver() -> None:
            if threading.current_thread() is threading.main_thread():
                deferred.deliver(frame_at(2))

        @functools.wraps(real_set)
        def set_handler(signalnum: Any, handler: Any) -> Any:
            deliver()
            return _unwrapped(real_set(signalnum, wrapped(handler)))

        @functools.wraps(real_get)
        def get_handler(signalnum: Any) -> Any:
            return _unwrapped(real_get(signalnum))

        def delivering(real: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(real)
            def set_timer(*args: Any) -> Any:
                result = real(*args)
                deliver()
                return result

            return set_timer

        _replace(wrapped)
        changed: dict[str, Callable[..., Any]] = {"signal": set_handler, "getsignal": get_handler}
        for name in ("alarm", "setitimer"):
            if hasattr(signal, name):  # not on Windows
                changed[name] = delivering(getattr(signal, name))
        for name, function in changed.items():
            yield from ((module, name, function) for module in _holders(name, getattr(signal, name)))


def _holders(name: str, function: Callable[..., Any]) -> list[Any]:
    """The loaded modules whose global `name` is this function: `signal`, and those that ran `from signal import …`.

    ipykernel is one of these. It sets a handler for each cell.
    """
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]


def restore() -> None:
    """Put the program's handlers back. Call it after the patches are removed."""
    _replace(_unwrapped)


def _unwrapped(handler: Any) -> Any:
    return handler.handler if isinstance(handler, DeferringHandler) else handler


def _replace(change: Callable[[Any], Any]) -> None:
    """Change all handlers. Only the main thread can do it."""
    if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
        return
    for number in signal.valid_signals():
        before = signal.getsignal(number)
        after = change(before)
        if after is not before:
            signal.signal(number, after)
