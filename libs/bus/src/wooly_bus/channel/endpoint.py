"""Addresses of data channels: ``unix:///path``, ``tcp://host:port``, ``tls://host:port``, ``nats://host:port#subject``."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SCHEMES = ("unix", "tcp", "tls", "nats")
#: A TCP connection ends if the other host has not answered for ten minutes: seconds before the first question, between two
#: questions, and their number. A laptop may sleep for shorter.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 18}


class EndpointError(ValueError):
    """The text of an endpoint has none of the four forms."""

    code = "channel.endpoint"
    retryable = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed endpoint.

    Attributes:
        scheme: unix, tcp, tls or nats.
        host: host name or address (empty for unix).
        port: port number (0 for unix; 0 when listening: any free port).
        path: socket path for unix; subject for nats.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse an endpoint.

        Raises:
            EndpointError: `text` has none of the four forms.
        """
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise EndpointError(f"endpoint {text!r}: the scheme must be one of {', '.join(SCHEMES)}")
        if parts.scheme == "unix":
            if parts.netloc or not parts.path.startswith("/"):
                raise EndpointError(f"endpoint {text!r}: a unix endpoint must look like unix:///absolute/path")
            return cls("unix", path=parts.path)
        try:
            port = parts.port
        except ValueError as e:
            raise EndpointError(f"endpoint {text!r}: {e}") from e
        if not parts.hostname or port is None:
            raise EndpointError(f"endpoint {text!r}: host or port is missing")
        if (parts.scheme == "nats") != bool(parts.fragment):
            raise EndpointError(
                f"endpoint {text!r}: nats endpoints need a subject (#subject), other endpoints must not have one"
            )
        return cls(parts.scheme, parts.hostname, port, parts.fragment)

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"#{self.path}" if self.path else "")

    @property
    def is_local_and_present(self) -> bool:
        """Whether this endpoint is a unix socket that exists on this host."""
        return self.scheme == "unix" and Path(self.path).exists()


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Set the buffer sizes of a socket. On TCP, also send at once, and close a connection whose other host has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # macOS has other names, and its own times
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
