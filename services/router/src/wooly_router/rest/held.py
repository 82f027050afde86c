"""Responses that hold a resource while they are sent: an event stream of the router, or a blob transfer of a tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class HeldStream(StreamingResponse):
    """A streaming response that releases its resource at its end, even if it never started.

    If a client disconnects before the first byte, the response ends before the iterator runs. A `finally` inside the iterator
    would not run either.

    Args:
        content: the body.
        release: releases the resource.
        media_type: media type of the body.
        headers: headers of the response.
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
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()
