"""Where long work on what a stranger sent lets others go first.

Python threads share one lock. So decoders and checkers call `pause` at least every few dozen microseconds of their work, and a
service that runs them beside something urgent says what happens there:

    with pausing(turn.end):          what `pause` calls, for this thread (or task) only
        program = decode_program(raw)

The function may wait, or raise to give the work up. Without one, `pause` does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

#: Bytes that one call of C code goes through between two pauses: that takes it about 50 microseconds.
PIECE_BYTES: Final = 32 << 10
_called: ContextVar[Callable[[], None] | None] = ContextVar("wooly_wis.pauses", default=None)


def pause() -> None:
    """Call what `pausing` named, if anything."""
    function = _called.get()
    if function is not None:
        function()


@contextlib.contextmanager
def pausing(function: Callable[[], None]) -> Iterator[None]:
    """In the block, `pause` calls `function`."""
    token = _called.set(function)
    try:
        yield
    finally:
        _called.reset(token)


def pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    """`data` in pieces, with a pause after each."""
    view = memoryview(data)
    for at in range(0, len(view), PIECE_BYTES):
        yield view[at : at + PIECE_BYTES]
        pause()
