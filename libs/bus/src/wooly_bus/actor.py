"""An actor owns its state and handles one message at a time; its subject is its address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic

from wooly_bus.contract_types import Q, R


class Actor:
    """Base of actors.

    `alone` wraps a handler so that no two handlers of one actor run at the same time. A handler that must wait for another
    process is not wrapped. It takes the lock itself (`async with self._turn`) for each step that reads or writes the actor's
    state, and waits without the lock. Otherwise one slow process would block all others.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def alone(self, handler: Callable[[Q], Awaitable[R]]) -> Handler[Q, R]:
        """Wrap `handler` so that it handles one message at a time, in the order of arrival."""
        return Handler(self._turn, handler)


class Handler(Generic[Q, R]):
    """A handler that holds the lock of its actor. It raises errors; the app turns them into replies."""

    def __init__(self, turn: asyncio.Lock, handler: Callable[[Q], Awaitable[R]]) -> None:
        self._turn = turn
        self._handler = handler
        self.__qualname__ = getattr(handler, "__qualname__", type(self).__qualname__)

    async def __call__(self, message: Q) -> R:
        """Handle one message."""
        async with self._turn:
            return await self._handler(message)
