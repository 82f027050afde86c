"""Where a data channel can be reached: ``unix:///path``, ``tcp://host:port``, ``tls://host:port``, ``nats://host:port#subject``."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SCHEMES = ("unix", "tcp", "tls", "nats")


class EndpointError(ValueError):
    """An endpoint's text is not one of the four forms."""

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
            EndpointError: not one of the known forms.
        """
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise EndpointError(f"endpoint {text!r}: the scheme must be one of {', '.join(SCHEMES)}")
        if parts.scheme == "unix":
            if parts.netloc or not parts.path.startswith("/"):
                raise EndpointError(f"endpoint {text!r}: unix endpoints look like unix:///absolute/path")
            return cls("unix", path=parts.path)
        try:
            port = parts.port
        except ValueError as e:
            raise EndpointError(f"endpoint {text!r}: {e}") from e
        if not parts.hostname or port is None:
            raise EndpointError(f"endpoint {text!r}: host and port are needed")
        if (parts.scheme == "nats") != bool(parts.fragment):
            raise EndpointError(f"endpoint {text!r}: a subject (#subject) belongs to nats endpoints, and only to them")
        return cls(parts.scheme, parts.hostname, port, parts.fragment)

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"#{self.path}" if self.path else "")

    @property
    def is_local_and_present(self) -> bool:
        """Whether this is a unix socket of this host."""
        return self.scheme == "unix" and Path(self.path).exists()


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Set the buffer sizes and, on TCP, no delay."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
