"""What services that are asked over HTTP have in common: rates per caller, and whose pages may call."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

#: Callers whose rate is remembered.
CALLERS = 10_000


class Buckets:
    """A bucket of requests per caller: `burst` at once, refilled with `rate` a second.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._burst, self._clock = rate, burst, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, cost: float = 1.0) -> bool:
        """One request more, which takes `cost` out of the bucket, if need be more than is in it. False if the bucket is empty."""
        now = self._clock()
        left, at = self._left.get(caller, (self._burst, now))
        left = min(self._burst, left + (now - at) * self.rate)
        self._left[caller] = (left - cost if left >= 1 else left, now)
        self._left.move_to_end(caller)
        if len(self._left) > CALLERS:
            self._left.popitem(last=False)
        return left >= 1


#: What a setting must say where a service that asks for nothing listens on the network.
OPEN = "everyone who reaches this address is administrator"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, or empty: every address


def refuse_open(service: str, host: str, said: str) -> str:
    """Why a service that asks nobody for a token must not serve; empty if it may.

    Args:
        service: as in its variables: "ROUTER".
        host: where it listens.
        said: what the operator says about that, in words.
    """
    if is_loopback(host) or said == OPEN:
        return ""
    return (
        f"it asks nobody for a token, and WOOLY_{service}_HTTP_HOST={host} is not a loopback address, so everybody who "
        f'reaches it could do everything; if that is meant, say WOOLY_{service}_OPEN_TO_NETWORK="{OPEN}"'
    )


def shows(header: str, token: str) -> bool:
    """Whether a request's `Authorization` header shows this token."""
    return hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def from_elsewhere(origin: str, host: str, auth: str) -> str:
    """Why a browser must not make this request for a page; empty if nothing speaks against it.

    A page of another origin may not use what its visitor may do here. Where everybody may do everything, the host must also be
    named as nobody else's page can be: a name that an attacker's DNS points here would make its page one of ours.

    Args:
        origin: the header, empty where there is none.
        host: the header.
        auth: "open": everybody may do everything; "tokens": who shows one.
    """
    try:
        if origin and urlsplit(origin).netloc != host:
            return f"pages of {origin[:100]} may not call this"
        name = urlsplit(f"//{host}").hostname or ""
        if auth == "open" and name not in ("localhost", socket.gethostname().lower()):
            ipaddress.ip_address(name)
    except ValueError:
        return "a service without authentication is called by its address, as localhost, or by its host's name"
    return ""
