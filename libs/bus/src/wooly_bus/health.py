"""Whether a service lives and is ready, over HTTP, for whoever starts and restarts it.

`/livez`: the event loop answers and everything that the service cannot do without runs; if not, a restart is the cure.
`/readyz`: that, and NATS is connected; if not, a restart mends nothing. Both answer with one line per check, 200 or 503.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Check = Callable[[], bool]

#: Seconds that somebody who asks may take.
PATIENCE_S = 5.0
#: Connections at a time. The next one ends the oldest: whoever asks does so at once, and an idle crowd shuts nobody out.
CONNECTIONS = 64
_LONGEST = 8192


class HealthSettings(BaseSettings):
    """Where a service says how it is; from WOOLY_HEALTH_* variables, for every service that speaks NATS.

    Attributes:
        host: where `/livez` and `/readyz` listen.
        port: their port; empty: they are not served.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_HEALTH_", env_ignore_empty=True)

    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=0, le=65535)


@contextlib.asynccontextmanager
async def serve_health(
    settings: HealthSettings, live: Mapping[str, Check], ready: Mapping[str, Check]
) -> AsyncIterator[int | None]:
    """Answer inside the block. Yields the port; None where none is configured.

    Args:
        settings: where.
        live: what must hold for the process to be worth keeping; read at every question.
        ready: what must hold besides for it to be of use.

    Raises:
        OSError: the port is taken.
    """
    if settings.port is None:
        yield None
        return

    asking: dict[asyncio.StreamWriter, None] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(asking) >= CONNECTIONS:
            oldest = next(iter(asking))
            del asking[oldest]
            oldest.transport.abort()
        asking[writer] = None
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            writer.write(_reply(head, live, ready))
            await asyncio.wait_for(writer.drain(), PATIENCE_S)
        asking.pop(writer, None)
        writer.close()

    server = await asyncio.start_server(answer, settings.host, settings.port, limit=_LONGEST)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _reply(head: bytes, live: Mapping[str, Check], ready: Mapping[str, Check]) -> bytes:
    method, _, rest = head.partition(b" ")
    checks = {b"/livez": dict(live), b"/readyz": {**live, **ready}}.get(rest.partition(b" ")[0])
    if checks is None or method not in (b"GET", b"HEAD"):
        return _http("404 Not Found", "there are /livez and /readyz\n", method)
    results = {name: bool(check()) for name, check in checks.items()}
    text = "".join(f"{name}: {'ok' if good else 'FAILED'}\n" for name, good in results.items()) or "ok\n"
    return _http("200 OK" if all(results.values()) else "503 Service Unavailable", text, method)


def _http(status: str, text: str, method: bytes) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if method == b"HEAD" else body)
