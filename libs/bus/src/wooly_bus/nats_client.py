"""A nats-py client that refuses a server without TLS. Only this module overrides or uses what is private in nats-py."""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client


class PlainTextError(nats.errors.Error):
    """A server with a `tls://` URL does not offer TLS."""


class NatsClient(Client):
    """A client that requires TLS if the URL begins with `tls://`.

    The first line of a NATS server is plain text and tells whether the connection uses TLS. An attacker between client and
    server can change that line, and nats-py would then send its credentials without encryption.

    Attributes:
        votes: JetStream of the connected server decides together with other servers of its cluster.
    """

    votes = False

    async def close(self) -> None:
        """Close the connection. Its socket is closed also if the rest cannot be sent any more, when nats-py keeps it open."""
        try:
            await super().close()
        finally:
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        self.votes = bool(info.get("jetstream") and info.get("cluster"))
        server = self._current_server
        if initial_connection and server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise PlainTextError(
                f"tls://{server.uri.hostname}:{server.uri.port} does not offer TLS, so nothing was sent to it; add a tls "
                "block to the configuration of the server; if it has one, an attacker between client and server may suppress TLS"
            )
