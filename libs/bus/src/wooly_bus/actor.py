"""An actor owns its state and handles one message at a time; its subject is its address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from wooly_wis.messages import ErrorReply, Message

from wooly_bus.errors import BusError

log = logging.getLogger("wooly.bus")
Q = TypeVar("Q", bound=Message)


class Actor:
    """Base of actors: `alone` wraps a handler so that no two of one actor's handlers run at the same time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def alone(self, handler: Callable[[Q], Awaitable[Message | None]]) -> Handler[Q]:
        """`handler`, one message at a time, with its errors as replies."""
        return Handler(self._turn, handler)


class Handler(Generic[Q]):
    """A handler that never raises: errors become `ErrorReply`; unexpected ones are logged and called internal."""

    def __init__(self, turn: asyncio.Lock, handler: Callable[[Q], Awaitable[Message | None]]) -> None:
        self._turn = turn
        self._handler = handler

    async def __call__(self, message: Q) -> Message | None:
        """Handle one message."""
        async with self._turn:
            try:
                return await self._handler(message)
            except BusError as e:
                return e.to_reply()
            except Exception as e:
                log.exception("%s failed", getattr(self._handler, "__qualname__", self._handler))
                return ErrorReply(code="internal", message=f"{type(e).__name__}: {e}")
