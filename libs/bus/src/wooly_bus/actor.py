"""An actor owns its state and handles one message at a time; its subject is its address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic

from wooly_bus.contract_types import Q, R


class Actor:
    """Base of actors.

    `alone` wraps a handler so that no two of one actor's handlers run at the same time. A handler that must wait for
    somebody else takes its turn itself (`async with self._turn`) for each step that reads and writes the actor's state,
    and waits outside of it: else one slow peer would stop everybody.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def alone(self, handler: Callable[[Q], Awaitable[R]]) -> Handler[Q, R]:
        """`handler`, one message at a time, in the order of arrival."""
        return Handler(self._turn, handler)


class Handler(Generic[Q, R]):
    """A handler that waits for its actor's turn. Errors pass: the app makes replies of them."""

    def __init__(self, turn: asyncio.Lock, handler: Callable[[Q], Awaitable[R]]) -> None:
        self._turn = turn
        self._handler = handler
        self.__qualname__ = getattr(handler, "__qualname__", type(self).__qualname__)

    async def __call__(self, message: Q) -> R:
        """Handle one message."""
        async with self._turn:
            return await self._handler(message)
