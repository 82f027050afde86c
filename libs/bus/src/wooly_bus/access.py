"""How a process connects to NATS: URLs, credentials, trusted certificate authorities."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from wooly_bus.channel.tls import ChannelTlsError, client_context
from wooly_bus.errors import BusConnectError, shown

if TYPE_CHECKING:
    from wooly_bus.credentials import Credentials


class NatsSettings(BaseSettings):
    """Connection of a service to NATS: WOOLY_NATS_* variables, for every service that uses NATS.

    Attributes:
        creds: `.creds` file of a service; empty: no credentials, or those in the URL. With this file, NATS authenticates tenants.
        tls_ca: PEM file of the authorities that may sign the certificate of a NATS server on `tls://`; empty: those of the
            system.
        replicas: copies of each stream and bucket that a service creates. Use 3 for a cluster of three or more NATS servers, so
            that the loss of one server loses no data.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_NATS_", env_ignore_empty=True)

    creds: Path | None = None
    tls_ca: Path | None = None
    replicas: int = Field(default=1, ge=1, le=5)


@dataclass(frozen=True)
class Access:
    """URLs and credentials for a connection to NATS.

    Attributes:
        url: one or more URLs, separated by commas.
        credentials: returns the credentials; None: connect without credentials. Called for each connection, so that credentials
            can be renewed.
        tls_ca: PEM file of the trusted authorities on `tls://`; None: trust the authorities of the system.
        own: the tenant of this process, if the issuer of the credentials named it; empty: unknown.
    """

    url: str
    credentials: Callable[[], Credentials] | None = None
    tls_ca: Path | None = None
    own: str = ""

    @classmethod
    def of(cls, there: str | Access) -> Access:
        """The access for a URL without credentials; an `Access` is returned as it is."""
        return there if isinstance(there, Access) else cls(there)

    @classmethod
    def of_service(cls, url: str) -> Access:
        """The access of a service, from its environment."""
        from wooly_bus.credentials import Credentials  # clients without credentials do not load cryptography

        settings = NatsSettings()
        creds = settings.creds
        return cls(url, None if creds is None else lambda: Credentials.load(creds), settings.tls_ca)

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def servers(self) -> list[str]:
        """Each URL."""
        return [server.strip() for server in self.url.split(",")]

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of a connection; None: use the authorities of the system.

        Raises:
            BusConnectError: the file of authorities is missing or contains no certificate.
        """
        try:
            return None if self.tls_ca is None else client_context(self.tls_ca)
        except ChannelTlsError as e:
            raise BusConnectError(f"NATS at {self}: {e}") from e


def options(held: Credentials | None, tls: ssl.SSLContext | None) -> dict[str, Any]:
    """Arguments of nats-py's `connect` for these credentials and this TLS context."""
    found: dict[str, Any] = {} if tls is None else {"tls": tls}
    if held is not None:
        shows = Shows(lambda: held)
        found |= {"user_jwt_cb": shows.jwt, "signature_cb": shows.signature, "inbox_prefix": held.inbox}
    return found


class Shows:
    """Callbacks of nats-py. For each connection, nats-py asks for the signature, then for the JWT of the same credentials."""

    def __init__(self, credentials: Callable[[], Credentials]) -> None:
        self._credentials, self._held = credentials, credentials()

    def signature(self, nonce: str) -> bytes:
        """The signature of a server's nonce."""
        self._held = self._credentials()
        return base64.b64encode(self._held.key.sign(nonce.encode()))

    def jwt(self) -> bytearray:
        """The JWT of the credentials that signed last."""
        return bytearray(self._held.jwt.encode())
