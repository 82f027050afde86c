"""Answers that hold something while they are sent: a place among those who follow events, one of a tenant's transfers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class HeldStream(StreamingResponse):
    """A stream that gives back what it holds when it is over, also where it never began.

    A client that leaves before the first byte ends the answer before the iterator has run a line: a `finally` in there would
    not run either.

    Args:
        content: what is sent.
        release: gives it back.
        media_type: of the content.
        headers: of the answer.
    """

    def __init__(
        self,
        content: AsyncIterator[str | bytes],
        release: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()
