"""A nats-py client that refuses a server without TLS. Only this module overrides or uses what is private in nats-py."""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client

#: How a client notices that its server is silent: seconds between two pings, and their number without an answer. A machine that
#: vanishes closes no connection; by nats-py's own values, its clients would look for another server of the cluster after six
#: minutes, and by these after 15 s.
PING_S, MAX_PINGS = 5.0, 2
NOTICING: dict[str, Any] = {"ping_interval": PING_S, "max_outstanding_pings": MAX_PINGS}


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

    def stay(self) -> None:
        """From now on, do not replace the connection if it breaks."""
        self.options["allow_reconnect"] = False

    async def _process_op_err(self, e: Exception) -> None:
        """Leave a server that is silent at once. To close its connection would wait until it has read what was sent to it."""
        writer = getattr(self._transport, "_io_writer", None)
        if isinstance(e, nats.errors.StaleConnectionError) and writer is not None:
            writer.transport.abort()
        await super()._process_op_err(e)

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
