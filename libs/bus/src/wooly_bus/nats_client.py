"""nats-py's client, which no server can talk out of TLS. The one place that overrides a private method of nats-py."""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client


class PlainTextError(nats.errors.Error):
    """A server behind `tls://` wants to go on without TLS."""


class NatsClient(Client):
    """A client that insists on TLS where the URL says `tls://`.

    Whether a connection becomes TLS is said by the server's first line, which comes in plain text: somebody in between can say
    no, and nats-py would show its credentials and go on.
    """

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        server = self._current_server
        if initial_connection and server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise PlainTextError(
                f"tls://{server.uri.hostname}:{server.uri.port} does not offer TLS, and nothing is sent to it in plain text; the "
                "server needs a tls block in its configuration, or somebody on the way suppresses it"
            )
