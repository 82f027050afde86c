"""Both ends of a data channel for tests of the transport: every hello is accepted, and says nothing."""

from __future__ import annotations

import ssl
from typing import Any

from wooly_bus.channel import Acceptor, ChannelClient, ChannelServer, Endpoint
from wooly_wis.frames import Kind


def acceptor_of(server: ChannelServer, **options: Any) -> Acceptor:
    """An acceptor that lets everybody in who says hello, and tells what it refuses as ERROR frames: ``code: words``."""
    return Acceptor(
        lambda payload: bytes(payload),
        lambda code, words: (Kind.ERROR, f"{code}: {words}".encode()),
        server.enter,
        hello=int(Kind.HELLO),
        **options,
    )


def greeted(client: ChannelClient) -> ChannelClient:
    """The client, which has said hello."""
    try:
        client.send(Kind.HELLO)
    except BaseException:
        client.close()
        raise
    return client


def connect(endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> ChannelClient:
    """A client that is connected and has said hello."""
    return greeted(ChannelClient.connect(endpoint, tls=tls))
