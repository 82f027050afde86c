"""How a process gets into NATS: where it is, what it shows there, whom it trusts."""

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
    """What a service shows NATS and trusts there; from WOOLY_NATS_* variables, for every service that speaks NATS.

    Attributes:
        creds: `.creds` file of a service; empty: none, or those of the URL. With it, tenants are whom NATS says they are.
        tls_ca: PEM file of the authorities that may vouch for a NATS server on `tls://`; empty: the system's.
        replicas: NATS servers that keep a copy of each stream and bucket that a service makes: 3 where three servers or more are
            one cluster, so that one of them may be lost.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_NATS_", env_ignore_empty=True)

    creds: Path | None = None
    tls_ca: Path | None = None
    replicas: int = Field(default=1, ge=1, le=5)


@dataclass(frozen=True)
class Access:
    """A way into NATS.

    Attributes:
        url: one or more URLs, separated by commas.
        credentials: makes or reads what is shown; None: nothing. Asked for every connection, so that they may be renewed.
        tls_ca: authorities to trust on `tls://`; None: the system's.
        own: the tenant that what is made here belongs to, where whoever gave the credentials said so; empty: not known.
    """

    url: str
    credentials: Callable[[], Credentials] | None = None
    tls_ca: Path | None = None
    own: str = ""

    @classmethod
    def of(cls, there: str | Access) -> Access:
        """A URL alone is a way in, too."""
        return there if isinstance(there, Access) else cls(there)

    @classmethod
    def of_service(cls, url: str) -> Access:
        """A service's way, by its environment."""
        from wooly_bus.credentials import Credentials  # clients without any do not pay for the cryptography of it

        settings = NatsSettings()
        creds = settings.creds
        return cls(url, None if creds is None else lambda: Credentials.load(creds), settings.tls_ca)

    def __str__(self) -> str:
        return shown(self.url)

    def tls(self) -> ssl.SSLContext | None:
        """What a connection trusts; None where the system's authorities do.

        Raises:
            BusConnectError: the file of authorities is missing or holds none.
        """
        try:
            return None if self.tls_ca is None else client_context(self.tls_ca)
        except ChannelTlsError as e:
            raise BusConnectError(f"NATS at {self}: {e}") from e


def options(held: Credentials | None, tls: ssl.SSLContext | None) -> dict[str, Any]:
    """Arguments of nats-py's `connect` that show these credentials."""
    found: dict[str, Any] = {} if tls is None else {"tls": tls}
    if held is not None:
        shows = Shows(lambda: held)
        found |= {"user_jwt_cb": shows.jwt, "signature_cb": shows.signature, "inbox_prefix": held.inbox}
    return found


class Shows:
    """What nats-py asks for at each connection: first for the signature, then for the permission that it goes with."""

    def __init__(self, credentials: Callable[[], Credentials]) -> None:
        self._credentials, self._held = credentials, credentials()

    def signature(self, nonce: str) -> bytes:
        """A server's nonce, signed."""
        self._held = self._credentials()
        return base64.b64encode(self._held.key.sign(nonce.encode()))

    def jwt(self) -> bytearray:
        """The permission."""
        return bytearray(self._held.jwt.encode())
