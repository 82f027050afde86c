"""The web UI: plain modules and one style sheet, served unchanged. All data comes from REST; the UI makes no decisions."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
#: Only files from this server run, other pages cannot frame ours, and text never becomes markup or script.
POLICY = "; ".join(
    [
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # the browser asks each time, and uses its copy if it is still valid
}


class _Files(StaticFiles):
    """Static files with our headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *[(k.encode(), v.encode()) for k, v in HEADERS.items()]]
            await send(message)

        await super().__call__(scope, receive, with_headers)


def serve(api: FastAPI) -> None:
    """Serve the UI under `/ui/`; `/` redirects to it."""

    @api.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("ui/")

    api.mount("/ui", _Files(directory=STATIC, html=True), name="ui")
