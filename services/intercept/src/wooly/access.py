"""How a client gets into its controller's NATS: by a `.creds` file, or by credentials that REST gives for an API token."""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wooly_bus.access import Access
from wooly_bus.errors import BusError, shown

from wooly.settings import Settings

if TYPE_CHECKING:
    from wooly_bus.credentials import Credentials

#: Seconds that REST may take.
TIMEOUT_S = 5.0
_LARGEST = 1 << 20


class AccessError(BusError):
    """There are no credentials to be had; the message says why."""

    code = "wooly.access"


def from_file(path: Path) -> Credentials:
    """The credentials in a file; read anew for every connection, so that whoever keeps it may renew it.

    Raises:
        CredentialsError: it cannot be read, or holds none.
    """
    from wooly_bus.credentials import Credentials  # the cryptography of it costs every other client 20 ms

    return Credentials.load(path)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection would take the API token elsewhere, from https to http, too."""

    def redirect_request(self, *args: Any) -> None:
        """None: the answer is an error."""


class RestCredentials:
    """Credentials that a controller gives for an API token; new ones when a third of their time is left.

    Args:
        url: of REST.
        token: an API token.
        tls_ca: authorities that may vouch for it; None: the system's.

    Raises:
        AccessError: it gives none.
    """

    def __init__(self, url: str, token: str, tls_ca: Path | None = None) -> None:
        self._url, self._token, self._tls = url.rstrip("/"), token, tls_ca
        self._lock = threading.Lock()
        self._held: Credentials | None = None
        self._renew_at = 0.0
        self.nats_url = self.tenant = ""
        self()

    def __call__(self) -> Credentials:
        """Credentials that hold.

        Raises:
            AccessError: there are none.
        """
        with self._lock:
            if self._held is None or time.time() >= self._renew_at:
                self._held = self._ask()
            return self._held

    def _ask(self) -> Credentials:
        from wooly_bus.channel import ChannelTlsError, client_context
        from wooly_bus.credentials import Credentials, CredentialsError

        where = f"the controller at {shown(self._url)}"
        request = urllib.request.Request(
            f"{self._url}/api/v1/credentials",
            data=b"{}",
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
        )
        asked = time.time()
        try:
            tls = client_context(self._tls) if self._url.startswith("https:") else None
            opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=tls), _NoRedirect)
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                said: dict[str, Any] = json.loads(answer.read(_LARGEST))
            held = Credentials.parse(str(said["credentials"]))
            self.nats_url, self.tenant = str(said["nats_url"]), str(said["tenant"])
            expires = float(said["expires_at"])
        except urllib.error.HTTPError as e:
            raise AccessError(f"{where} gives no credentials: {_message(e)}") from e
        except ChannelTlsError as e:
            raise AccessError(f"{where}: {e} (WOOLYAI_TLS_CA names the authorities to trust)") from e
        except urllib.error.URLError as e:
            if isinstance(e.reason, ssl.SSLCertVerificationError):
                raise AccessError(
                    f"{where} has a certificate that is not trusted: {e.reason.verify_message} (WOOLYAI_TLS_CA names the "
                    "authorities to trust)"
                ) from e
            raise AccessError(f"{where} does not answer: {e.reason}") from e
        except (OSError, ValueError, KeyError, TypeError, CredentialsError) as e:
            raise AccessError(f"{where} answers something else than credentials: {e}") from e
        self._renew_at = asked + (expires - asked) / 2
        return held


def _message(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.loads(error.read(_LARGEST))["message"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"HTTP {error.code}"


def access_of(settings: Settings) -> Access:
    """The way into the controller that the settings name.

    Raises:
        BusError: there are no credentials for it.
    """
    url, path = settings.controller_url, settings.nats_creds
    if url.startswith(("http://", "https://")):
        source = RestCredentials(url, settings.credential, settings.tls_ca)
        return Access(source.nats_url, source, settings.tls_ca, source.tenant)
    return Access(url, None if path is None else lambda: from_file(path), settings.tls_ca)
