"""All private names of CPython that the client uses. Check this file against each new Python release.

Checked against Python 3.11 to 3.14.
"""

from __future__ import annotations

import atexit
import dis
import functools
import multiprocessing.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import SemLock
from types import CodeType, FrameType
from typing import Any

#: `frame_at(depth)`: a frame of this thread's stack. Depth 0 is the caller's frame, depth 1 the frame of the caller's caller.
frame_at: Callable[[int], FrameType] = sys._getframe


_PASSES_NAMES = frozenset(("KW_NAMES", "LOAD_CONST"))
_CALLS = frozenset(("CALL", "CALL_KW", "PRECALL"))
_LOADS_NAMED = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"))


def call_at(code: CodeType, offset: int) -> tuple[str, tuple[str, ...]] | None:
    """The name of the function that an instruction calls, and the names of the call's keyword arguments.

    Args:
        code: the code of a frame.
        offset: offset of the instruction in bytes, as `f_lasti` gives it.

    Returns:
        None if the instruction is no call with keyword arguments, if they come from a dictionary, or if the code does not tell
        the positions of its instructions (`-X no_debug_ranges`).
    """
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset == offset:
            break
        before.append(instruction)
    else:
        return None
    positions = instruction.positions
    if instruction.opname not in _CALLS or positions is None or positions.col_offset is None:
        return None
    begin = positions.lineno, positions.col_offset
    while before and before[-1].opname in _CALLS:
        before.pop()
    if not before or before[-1].opname not in _PASSES_NAMES:
        return None
    names = code.co_consts[before[-1].arg or 0]  # Python 3.11 gives no `argval`
    if not isinstance(names, tuple):
        return None
    # The expression of the function is where the call begins, and nothing else of the call is loaded after it from there.
    for load in reversed(before):
        at = load.positions
        if load.opname in _LOADS_NAMED and at is not None and (at.lineno, at.col_offset) == begin:
            return str(load.argval), names
    return None


def join_threads() -> None:
    """Wait for all threads that are not daemons, as Python does after a script."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Call the functions of `atexit`, the last one first, as Python does after a script. Their errors are printed."""
    atexit._run_exitfuncs()


def skip_at_exit(function: Callable[..., object]) -> None:
    """Do not call the finalizers (`weakref.finalize`) with this function at the end of the process."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive is not None and alive[1] is function:
            finalizer.atexit = False


def end_children() -> None:
    """End the daemons among the child processes of `multiprocessing`, and wait for the others. `atexit` does it, too."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def unlock_after_fork(lock: Any) -> None:
    """Release a lock in a forked process. A thread of the parent may hold the lock, and the fork does not have that thread."""
    lock._at_fork_reinit()


def fenced_semaphores(before: Callable[[], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches (owner, name, value) by which all locks, semaphores, conditions, events and barriers of `multiprocessing`
    call `before` before they are released.
    """
    real_methods, real_exit = SemLock._make_methods, SemLock.__exit__  # type: ignore[attr-defined]

    @functools.wraps(real_methods)
    def make_methods(self: Any) -> None:
        real_methods(self)
        release = self.release

        def fenced() -> None:
            before()
            release()

        self.release = fenced

    @functools.wraps(real_exit)
    def leave(self: Any, *exc: Any) -> None:
        before()
        real_exit(self, *exc)

    yield (SemLock, "_make_methods", make_methods)
    yield (SemLock, "__exit__", leave)
