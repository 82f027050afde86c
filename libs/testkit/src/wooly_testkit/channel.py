"""Both ends of a data channel, for tests of the transport. Hellos are empty, and every hello is accepted."""

from __future__ import annotations

import ssl
from typing import Any

from wooly_bus.channel import Acceptor, ChannelClient, ChannelServer, Endpoint
from wooly_wis.frames import Kind


def acceptor_of(server: ChannelServer, **options: Any) -> Acceptor:
    """An acceptor that accepts every hello, and reports refusals as ERROR frames with the text ``code: message``."""
    return Acceptor(
        lambda payload: bytes(payload),
        lambda code, words: (Kind.ERROR, f"{code}: {words}".encode()),
        server.enter,
        hello=int(Kind.HELLO),
        **options,
    )


def greeted(client: ChannelClient) -> ChannelClient:
    """Send a hello, and return the client."""
    try:
        client.send(Kind.HELLO)
    except BaseException:
        client.close()
        raise
    return client


def connect(endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> ChannelClient:
    """Connect a client, and send a hello."""
    return greeted(ChannelClient.connect(endpoint, tls=tls))
