"""Shared checks of the services with HTTP: request rates per caller, and the web pages that may send requests."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

#: Number of callers whose rate is stored; beyond it, the caller that was idle longest is forgotten.
CALLERS = 10_000


class Buckets:
    """A token bucket per caller: it holds `burst` requests, and `rate` requests per second are added.

    Args:
        rate: requests per second.
        burst: largest number of requests at once.
        clock: returns monotonic seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._burst, self._clock = rate, burst, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, cost: float = 1.0) -> bool:
        """Take `cost` out of the caller's bucket, which may become negative. Returns False if the bucket has less than 1."""
        now = self._clock()
        left, at = self._left.get(caller, (self._burst, now))
        left = min(self._burst, left + (now - at) * self.rate)
        self._left[caller] = (left - cost if left >= 1 else left, now)
        self._left.move_to_end(caller)
        if len(self._left) > CALLERS:
            self._left.popitem(last=False)
        return left >= 1


#: Value that WOOLY_<SERVICE>_OPEN_TO_NETWORK must have before a service without authentication listens on the network.
OPEN = "everyone who reaches this address is administrator"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name; or empty, which means all addresses


def refuse_open(service: str, host: str, said: str) -> str:
    """The reason why a service without authentication must not listen on `host`; empty if it may.

    Args:
        service: name of the service in its variables, such as "ROUTER".
        host: the address on which the service listens.
        said: value of WOOLY_<SERVICE>_OPEN_TO_NETWORK.
    """
    if is_loopback(host) or said == OPEN:
        return ""
    return (
        f"authentication is off, and WOOLY_{service}_HTTP_HOST={host} is not a loopback address, so everyone on the network "
        f"would be administrator; turn authentication on, or use a loopback address, or, to allow this, set "
        f'WOOLY_{service}_OPEN_TO_NETWORK="{OPEN}"'
    )


def shows(header: str, token: str) -> bool:
    """Whether the `Authorization` header of a request has this token."""
    return hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def from_elsewhere(origin: str, host: str, auth: str) -> str:
    """The reason why a request from a browser is refused; empty if it is allowed.

    A page of another origin must not use the permissions of its visitor. Without authentication, the `Host` header must also be
    an address, localhost, or the name of this host. Otherwise an attacker could let a DNS name point here (DNS rebinding), and
    the attacker's page would have our origin.

    Args:
        origin: the `Origin` header; empty if the request has none.
        host: the `Host` header.
        auth: "open": requests need no token; "tokens": requests need a token.
    """
    try:
        if origin and urlsplit(origin).netloc != host:
            return f"pages of {origin[:100]} must not send requests to this service"
        name = urlsplit(f"//{host}").hostname or ""
        if auth == "open" and name not in ("localhost", socket.gethostname().lower()):
            ipaddress.ip_address(name)
    except ValueError:
        return "authentication is off, so the Host header must be an IP address, localhost, or the name of this machine"
    return ""
