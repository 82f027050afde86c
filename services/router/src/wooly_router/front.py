"""What a router shows over HTTP: REST, pages and `/metrics`. A router without REST does not import this module."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

from wooly_bus.errors import shown
from wooly_bus.http_listener import HttpServer
from wooly_bus.supervision import Work
from wooly_bus.web import Buckets

from wooly_router.actor import RouterActor
from wooly_router.gate import Gate
from wooly_router.rest.access import Access
from wooly_router.rest.api import create_api
from wooly_router.settings import RouterSettings
from wooly_router.tasks import TaskActor
from wooly_router.traces import TraceActor

log = logging.getLogger("wooly.router")
#: Seconds for which the router finishes REST answers when it ends.
LAST_ANSWERS_S = 3.0


class Front:
    """The HTTP server of a router.

    Raises:
        OSError: the port is in use.
        ChannelError: the certificate or the key cannot be used.
    """

    def __init__(
        self, settings: RouterSettings, actor: RouterActor, desk: TaskActor, gate: Gate, traces: TraceActor
    ) -> None:
        self._settings = settings
        self._listener = socket.create_server((settings.http_host, settings.http_port))
        access = Access(gate, Buckets(settings.rate_limit, 4 * settings.rate_limit))
        api = create_api(actor, desk, access, traces)
        self._tls = settings.tls()
        self._server = HttpServer(api, "router", tls=self._tls)
        self._server.closing = api.state.hub.close

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, Work]]:
        """Serve inside the block, and write the port to a file. At the end of the block, pending answers are finished.

        Yields:
            The server's work, by name.
        """
        port = self._listener.getsockname()[1]
        (self._settings.state_dir / "router.port").write_text(str(port))
        scheme = "http" if self._tls is None else "https"
        log.info(
            "router: REST on %s://%s:%d, NATS at %s",
            scheme,
            self._settings.http_host,
            port,
            shown(self._settings.nats_url),
        )
        http = asyncio.create_task(self._server.serve(sockets=[self._listener]))

        async def served() -> None:
            await asyncio.shield(http)

        try:
            yield {"REST": served}
        finally:
            self._server.should_exit = True
            await asyncio.wait((http,), timeout=LAST_ANSWERS_S)

    def close(self) -> None:
        """Close the port."""
        self._listener.close()
