"""TLS contexts for both ends of a data channel. The client checks the executor's certificate and the host name in it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from wooly_bus.channel.framing import ChannelError


class ChannelTlsError(ChannelError):
    """A certificate is missing, invalid or not trusted."""

    code = "channel.tls"


class _AcceptedSocket(ssl.SSLSocket):
    """The server's end of a connection.

    After a reset, a connection has no peer. `ssl` then believes that the socket is not connected yet: it reads from the socket,
    raises the error, and leaks the descriptor. So `getpeername` hides the error, and the handshake fails in the normal way.
    """

    def getpeername(self) -> Any:
        """Address of the peer; None if the connection was reset."""
        try:
            return super().getpeername()
        except OSError:
            return None


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """The TLS context of a server.

    Args:
        certificate: PEM file with the certificate and the intermediate certificates up to its authority.
        key: PEM file with the private key; None: the key is in the file of the certificate.

    Raises:
        ChannelTlsError: a file is missing, or the key does not belong to the certificate.
    """
    if certificate is None:
        raise ChannelTlsError("cannot listen with TLS: no certificate is configured")
    for path in (certificate, key or certificate):
        _readable(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = _AcceptedSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # no tickets: TLS sessions are not resumed, and a waiting client would mistake a ticket for an acknowledgement
    context.num_tickets = 0
    try:
        context.load_cert_chain(
            certificate, key, password=lambda: ""
        )  # without it, `ssl` asks on the terminal for the password of an encrypted key
    except (ssl.SSLError, ValueError) as e:
        raise ChannelTlsError(f"cannot use certificate {certificate} with key {key or certificate}: {e}") from e
    return context


def client_context(authorities: Path | None = None) -> ssl.SSLContext:
    """The TLS context of a client.

    Args:
        authorities: PEM file with the certificates of the trusted authorities; None: trust the authorities of the system.

    Raises:
        ChannelTlsError: the file is missing, or contains no certificate.
    """
    if authorities is not None:
        _readable(authorities)
    try:
        context = ssl.create_default_context(cafile=authorities)
    except (ssl.SSLError, ValueError) as e:
        raise ChannelTlsError(f"{authorities} contains no certificates of authorities: {e}") from e
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def handshake_error(endpoint: object, error: ssl.SSLError) -> ChannelTlsError:
    """The error to raise in a client after a failed handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ChannelTlsError(f"{endpoint}: the executor's certificate is not trusted: {error.verify_message}")
    return ChannelTlsError(f"{endpoint}: the executor does not speak TLS: {error.reason or error}")


def _readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as e:
        raise ChannelTlsError(f"cannot read {path}: {e.strerror or e}") from e
