"""The client's credentials for the controller's NATS: from a `.creds` file, or from the controller's REST for an API token."""

from __future__ import annotations

import http.client
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

#: Timeouts of the first REST request and of the others, in seconds. Behind a load balancer, another router may answer the second.
TIMEOUTS_S = (2.0, 4.0)
#: How long to ask again if the controller says that a later request may succeed (its database restarts), or takes a request and
#: does not answer (its machine is overloaded); and the first and the longest pause between two requests, in seconds.
RETRY_S, _PAUSES_S = 15.0, (0.2, 2.0)
#: Maximum size of a REST answer, in bytes. Longer answers are cut off and then fail to parse.
_LARGEST = 1 << 20


class AccessError(BusError):
    """The client cannot get credentials. The message says why."""

    code = "wooly.access"


class _SlowError(AccessError):
    """The controller did not answer in time. It is retryable if the controller has taken the request."""


def from_file(path: Path) -> Credentials:
    """Read credentials from a file. Each connection reads the file again, so another program can renew the credentials in it.

    Raises:
        CredentialsError: the file cannot be read, or contains no credentials.
    """
    from wooly_bus.credentials import Credentials  # imported here, because its cryptography library takes 20 ms to load

    return Credentials.load(path)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses HTTP redirects. A redirect would send the API token to another server, possibly over plain http."""

    def redirect_request(self, *args: Any) -> None:
        """Return None, which makes the redirect an HTTP error."""


class RestCredentials:
    """Credentials that the controller's REST issues for an API token, renewed after half of their lifetime.

    Args:
        url: URL of the controller's REST.
        token: an API token.
        tls_ca: file with the certificate authorities to trust; None: those of the system.

    Raises:
        AccessError: the controller does not issue credentials.
    """

    def __init__(self, url: str, token: str, tls_ca: Path | None = None) -> None:
        self._url, self._token, self._tls = url.rstrip("/"), token, tls_ca
        self._lock = threading.Lock()
        self._held: Credentials | None = None
        self._renew_at = 0.0
        self.nats_url = self.tenant = ""
        self()

    def __call__(self) -> Credentials:
        """Return valid credentials.

        Raises:
            AccessError: the controller does not issue credentials.
        """
        with self._lock:
            if self._held is None or time.time() >= self._renew_at:
                self._held = self._ask_until_answered()
            return self._held

    def _ask_until_answered(self) -> Credentials:
        until, pause, timeouts = time.monotonic() + RETRY_S, _PAUSES_S[0], list(TIMEOUTS_S)
        while True:
            try:
                return self._ask(timeouts[0])
            except _SlowError as e:
                if len(timeouts) > 1:
                    del timeouts[0]
                elif not e.retryable or time.monotonic() + timeouts[0] > until:
                    raise
            except AccessError as e:
                if not e.retryable or time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES_S[1])

    def _ask(self, timeout_s: float) -> Credentials:
        from wooly_bus.channel import ChannelTlsError, client_context
        from wooly_bus.credentials import Credentials, CredentialsError

        where = f"the controller at {shown(self._url)}"
        slow = f"{where} did not answer within {timeout_s:g} s; check that it runs, and try again"
        request = urllib.request.Request(
            f"{self._url}/api/v1/credentials",
            data=b"{}",
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
        )
        asked = time.time()
        try:
            tls = client_context(self._tls) if self._url.startswith("https:") else None
            opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=tls), _NoRedirect)
            with opener.open(request, timeout=timeout_s) as answer:
                body = answer.read(_LARGEST)
                if answer.length and len(body) < _LARGEST:
                    raise http.client.IncompleteRead(body, answer.length)
            said: dict[str, Any] = json.loads(body)
            held = Credentials.parse(str(said["credentials"]))
            self.nats_url, self.tenant = str(said["nats_url"]), str(said["tenant"])
            expires = float(said["expires_at"])
        except urllib.error.HTTPError as e:
            message, retryable, code = _refusal(e)
            cure = "Try again later" if retryable else "Check the API token (WOOLYAI_CREDENTIAL)"
            refused = AccessError(f"{where} does not issue credentials: {message}. {cure}")
            refused.retryable = retryable
            refused.code = code or AccessError.code
            raise refused from e
        except ChannelTlsError as e:
            raise AccessError(
                f"cannot make a TLS connection to {where}: {e} (set WOOLYAI_TLS_CA to a file with the certificate authorities "
                "to trust)"
            ) from e
        except urllib.error.URLError as e:
            if isinstance(e.reason, TimeoutError):
                raise _SlowError(slow) from e
            if isinstance(e.reason, ssl.SSLCertVerificationError):
                raise AccessError(
                    f"{where} has a certificate that is not trusted: {e.reason.verify_message} (set WOOLYAI_TLS_CA to a file "
                    "with the certificate authorities to trust)"
                ) from e
            raise AccessError(
                f"{where} does not answer: {e.reason}. Check WOOLYAI_CONTROLLER_URL, and that the controller runs"
            ) from e
        except TimeoutError as e:
            late = _SlowError(slow)
            late.retryable = True  # it took the request
            raise late from e
        except (OSError, http.client.HTTPException) as e:  # a router that is stopped ends its connections
            broken = AccessError(f"the connection to {where} broke: {e}. Try again later")
            broken.retryable = True
            raise broken from e
        except (ValueError, KeyError, TypeError, CredentialsError) as e:
            raise AccessError(
                f"the answer of {where} contains no credentials: {e}. Check that WOOLYAI_CONTROLLER_URL is the URL of a Wooly "
                "controller"
            ) from e
        self._renew_at = asked + (expires - asked) / 2
        return held


def _refusal(error: urllib.error.HTTPError) -> tuple[str, bool, str]:
    """The message of a refusal, whether a later request may succeed, and its code; empty: it has none."""
    with error:
        try:
            said = json.loads(error.read(_LARGEST))
            return (
                str(said["message"]),
                error.code == 503 and said.get("retryable") is True,
                str(said.get("code") or ""),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"HTTP {error.code}", False, ""


def access_of(settings: Settings) -> Access:
    """Address and credentials of the controller in the settings.

    Raises:
        BusError: the client cannot get credentials for the controller.
    """
    url, path = settings.controller_url, settings.nats_creds
    if url.startswith(("http://", "https://")):
        source = RestCredentials(url, settings.credential, settings.tls_ca)
        return Access(source.nats_url, source, settings.tls_ca, source.tenant)
    return Access(url, None if path is None else lambda: from_file(path), settings.tls_ca)
