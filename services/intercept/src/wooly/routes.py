"""Decides which endpoints of an executor the client may try.

If the executor offers TLS, the client uses no plain-text endpoint over a network. Otherwise an attacker on the network could
block the TLS endpoint, and the client would fall back to plain text, which the attacker can read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from wooly_bus.channel import Endpoint

#: End of the messages about plain text: how the user can allow it.
PLAINTEXT_HINT = "set WOOLYAI_PLAINTEXT=1 if you trust this network"


def reason_not_to_try(
    endpoint: Endpoint, offered: Sequence[Endpoint], channel: str, nats_url: str, plaintext: bool
) -> str:
    """The reason why the client must not try an endpoint; empty if the client may try it.

    Args:
        endpoint: one of `offered`.
        offered: all endpoints of the executor.
        channel: auto, direct (no tunnel) or tunnel (only tunnels). With `tunnel`, the user chose NATS explicitly, so a plain-text
            tunnel is allowed.
        nats_url: URL by which this process reaches NATS, for tunnels.
        plaintext: whether plain text is always allowed.
    """
    if channel != "auto" and (channel == "tunnel") != (endpoint.scheme == "nats"):
        return f"not tried, because WOOLYAI_CHANNEL is {channel}"
    if plaintext or channel == "tunnel" or all(e.scheme != "tls" for e in offered):
        return ""
    if endpoint.scheme == "tcp" and not is_loopback(endpoint.host):
        return f"not tried: this endpoint is not encrypted, but the executor offers TLS; {PLAINTEXT_HINT}"
    if endpoint.scheme == "nats" and not tunnel_is_safe(nats_url):
        return f"not tried: the URL of NATS does not start with tls://, but the executor offers TLS; {PLAINTEXT_HINT}"
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tunnel_is_safe(nats_url: str) -> bool:
    """Whether every NATS server in a comma-separated list of URLs uses TLS or runs on this machine."""
    for server in nats_url.split(","):
        text = server.strip()
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        if parts.scheme not in ("tls", "wss") and not is_loopback(parts.hostname or ""):
            return False
    return True
