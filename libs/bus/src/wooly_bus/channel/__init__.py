"""The data channel: length-prefixed, numbered, acknowledged frames over a unix socket, TCP, TLS or a NATS tunnel."""

from wooly_bus.channel.client import ChannelClient
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

__all__ = [
    "ChannelClient",
    "ChannelClosedError",
    "ChannelError",
    "ChannelServer",
    "ChannelTimeoutError",
    "Connected",
    "Connection",
    "Disconnected",
    "Endpoint",
    "EndpointError",
    "Event",
    "Frame",
    "FrameReceived",
    "ProtocolError",
]
