"""Pauses in long work on untrusted input, so that urgent threads can run.

Python threads share one lock. So decoders and checkers call `pause` at least every 50 microseconds of work. A service that also
has urgent work chooses what a pause does:

    with pausing(turn.end):          `pause` calls `turn.end`, in this thread (or task) only
        program = decode_program(raw)

The function may wait; it may raise an exception to stop the work. Without a function, `pause` does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

#: Bytes that one call of C code processes between two pauses. One piece takes about 50 microseconds.
PIECE_BYTES: Final = 32 << 10
_called: ContextVar[Callable[[], None] | None] = ContextVar("wooly_wis.pauses", default=None)


def pause() -> None:
    """Call the function that `pausing` set, if any."""
    function = _called.get()
    if function is not None:
        function()


@contextlib.contextmanager
def pausing(function: Callable[[], None]) -> Iterator[None]:
    """Inside the block, let `pause` call `function`."""
    token = _called.set(function)
    try:
        yield
    finally:
        _called.reset(token)


def pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    """Yield `data` in pieces of `PIECE_BYTES`, and pause after each piece."""
    view = memoryview(data)
    for at in range(0, len(view), PIECE_BYTES):
        yield view[at : at + PIECE_BYTES]
        pause()
