"""TLS contexts of both ends of a data channel: the executor shows a certificate, the client checks it and the name in it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from wooly_bus.channel.framing import ChannelError


class ChannelTlsError(ChannelError):
    """A certificate is missing, cannot be used, or is not one to trust."""

    code = "channel.tls"


class _AcceptedSocket(ssl.SSLSocket):
    """The server's end of a connection.

    A connection that was reset already has no peer. `ssl` takes such a socket for one that is not connected yet, reads from it,
    raises what it gets, and loses the descriptor. It is told of no error here, and the handshake fails as any other.
    """

    def getpeername(self) -> Any:
        """As of any socket; None where the peer is gone."""
        try:
            return super().getpeername()
        except OSError:
            return None


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """What a server shows.

    Args:
        certificate: PEM file with the certificate, and what lies between it and its authority.
        key: PEM file with the private key; None: it is in the same file.

    Raises:
        ChannelTlsError: a file is missing, or the two do not fit.
    """
    if certificate is None:
        raise ChannelTlsError("a certificate is needed to listen with TLS, and none is configured")
    for path in (certificate, key or certificate):
        _readable(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = _AcceptedSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = (
        0  # sessions are not resumed, and a ticket would look like an acknowledgement to a waiting client
    )
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # an encrypted key must not ask on the terminal
    except (ssl.SSLError, ValueError) as e:
        raise ChannelTlsError(f"{certificate} and {key or certificate} are not a certificate and its key: {e}") from e
    return context


def client_context(authorities: Path | None = None) -> ssl.SSLContext:
    """What a client trusts.

    Args:
        authorities: PEM file with the certificates of the authorities to trust; None: those of the system.

    Raises:
        ChannelTlsError: the file is missing, or holds no certificate.
    """
    if authorities is not None:
        _readable(authorities)
    try:
        context = ssl.create_default_context(cafile=authorities)
    except (ssl.SSLError, ValueError) as e:
        raise ChannelTlsError(f"{authorities} holds no certificates of authorities: {e}") from e
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def handshake_error(endpoint: object, error: ssl.SSLError) -> ChannelTlsError:
    """What a failed handshake means to a client."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ChannelTlsError(f"{endpoint}: the executor's certificate is not trusted: {error.verify_message}")
    return ChannelTlsError(f"{endpoint}: no TLS there: {error.reason or error}")


def _readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as e:
        raise ChannelTlsError(f"cannot read {path}: {e.strerror or e}") from e
