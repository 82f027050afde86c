"""The data channel: length-prefixed, numbered, acknowledged frames over a unix socket, TCP, TLS or a NATS tunnel."""

from wooly_bus.channel.acceptor import Acceptor, Guest, StrangerLimits
from wooly_bus.channel.client import ChannelClient, Expected, InputTakenError
from wooly_bus.channel.endpoint import Endpoint, EndpointError
from wooly_bus.channel.framing import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    Frame,
    ProtocolError,
)
from wooly_bus.channel.server import (
    ChannelServer,
    Connected,
    Connection,
    Disconnected,
    Event,
    FrameReceived,
)
from wooly_bus.channel.tls import ChannelTlsError, client_context, server_context

__all__ = [
    "Acceptor",
    "ChannelClient",
    "ChannelClosedError",
    "ChannelError",
    "ChannelServer",
    "ChannelTimeoutError",
    "ChannelTlsError",
    "Connected",
    "Connection",
    "Disconnected",
    "Endpoint",
    "EndpointError",
    "Event",
    "Expected",
    "Frame",
    "FrameReceived",
    "Guest",
    "InputTakenError",
    "ProtocolError",
    "StrangerLimits",
    "client_context",
    "server_context",
]
