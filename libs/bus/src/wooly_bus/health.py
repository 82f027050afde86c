"""Health checks of a service over HTTP, for orchestrators such as Kubernetes.

`/livez`: the event loop answers and all essential parts run; if the check fails, restart the process.
`/readyz`: the same, and NATS is connected; if only this check fails, a restart does not help. Both answer with status 200 or 503
and one line per check.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Check = Callable[[], bool]

#: Deadline in seconds for reading a request, and for writing the answer.
PATIENCE_S = 5.0
#: Most connections at the same time. A further connection closes the oldest, so that idle connections cannot block a probe.
CONNECTIONS = 64
#: Longest head of a request, in bytes.
_LONGEST = 8192


class HealthSettings(BaseSettings):
    """Address of the health checks of a service; from WOOLY_HEALTH_* variables, for every service that uses NATS.

    Attributes:
        host: address on which `/livez` and `/readyz` listen.
        port: port of `/livez` and `/readyz`; empty: health checks are off.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_HEALTH_", env_ignore_empty=True)

    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=0, le=65535)


@contextlib.asynccontextmanager
async def serve_health(
    settings: HealthSettings, live: Mapping[str, Check], ready: Mapping[str, Check]
) -> AsyncIterator[int | None]:
    """Serve the health checks for the duration of the block. Yields the port; None if no port is configured.

    Args:
        settings: address and port.
        live: checks by name; if one fails, the process must be restarted. The mapping is read at each request.
        ready: further checks by name; if one fails, the process is not ready.

    Raises:
        OSError: the port is taken.
    """
    if settings.port is None:
        yield None
        return

    open_connections: dict[asyncio.StreamWriter, None] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(open_connections) >= CONNECTIONS:
            oldest = next(iter(open_connections))
            del open_connections[oldest]
            oldest.transport.abort()
        open_connections[writer] = None
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            writer.write(_reply(head, live, ready))
            await asyncio.wait_for(writer.drain(), PATIENCE_S)
        open_connections.pop(writer, None)
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
        return _http("404 Not Found", "not found; use GET /livez or GET /readyz\n", method)
    results = {name: bool(check()) for name, check in checks.items()}
    text = "".join(f"{name}: {'ok' if good else 'FAILED'}\n" for name, good in results.items()) or "ok\n"
    return _http("200 OK" if all(results.values()) else "503 Service Unavailable", text, method)


def _http(status: str, text: str, method: bytes) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if method == b"HEAD" else body)
