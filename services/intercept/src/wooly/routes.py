"""Which ways to an executor may be tried: never one in plain text over a network where the executor offers TLS.

Whoever sits on the network can make a TLS endpoint unreachable. If the next endpoint in plain text would do, everybody could have
everything in plain text.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from wooly_bus.channel import Endpoint

#: What makes plain text allowed.
CURE = "set WOOLYAI_PLAINTEXT=1 if that network is to be trusted"


def why_not(endpoint: Endpoint, offered: Sequence[Endpoint], channel: str, nats_url: str, plaintext: bool) -> str:
    """Why an endpoint may not be tried; empty: it may.

    Args:
        endpoint: one of `offered`.
        offered: all endpoints of the executor.
        channel: auto, direct (no tunnel) or tunnel (nothing else: nobody is led there, so that plain text is the user's word).
        nats_url: how this process reaches NATS, for tunnels.
        plaintext: plain text is allowed in any case.
    """
    if channel != "auto" and (channel == "tunnel") != (endpoint.scheme == "nats"):
        return f"not tried, WOOLYAI_CHANNEL is {channel}"
    if plaintext or channel == "tunnel" or all(e.scheme != "tls" for e in offered):
        return ""
    if endpoint.scheme == "tcp" and not is_loopback(endpoint.host):
        return f"not tried: it is not encrypted, and the executor offers TLS; {CURE}"
    if endpoint.scheme == "nats" and not tunnel_is_safe(nats_url):
        return f"not tried: NATS is not on tls://, and the executor offers TLS; {CURE}"
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this host's own, and never leaves it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tunnel_is_safe(nats_url: str) -> bool:
    """Whether what goes through the NATS servers of a URL is encrypted on its way there, or stays on this host."""
    for server in nats_url.split(","):
        text = server.strip()
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        if parts.scheme not in ("tls", "wss") and not is_loopback(parts.hostname or ""):
            return False
    return True
