"""Options of connections to PostgreSQL, so that a server that has vanished is noticed within seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Options of libpq. A host that vanished (a failover, a cut network) answers nothing, not even with a reset. By default, Linux
#: tries for fifteen minutes to reach it, and a request that waits for the database waits as long.
_OPTIONS = {
    "connect_timeout": 5,  # seconds, per host
    "tcp_user_timeout": 10_000,  # milliseconds without an acknowledgement of what was sent
    "keepalives_idle": 10,  # seconds; also while the server computes
    "keepalives_interval": 5,
    "keepalives_count": 2,
}


def options(query: Mapping[str, Any]) -> dict[str, int]:
    """The options that a database's URL does not set itself.

    Args:
        query: the parameters in the URL.
    """
    return {name: value for name, value in _OPTIONS.items() if name not in query}
