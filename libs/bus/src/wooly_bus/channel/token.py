"""Tokens that open a data channel: the router signs, the executor verifies.

A token names its session, tenant and executor, and ends soon: it is shown once, right after the session is opened. Whoever reads
it on the way gains nothing that lasts, and no executor can use it at another. Seconds are the router's: it says its time when it
opens the session, and the executor counts on from there, so that clocks need not agree.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from wooly_bus.channel.framing import ProtocolError
from wooly_bus.errors import BusError
from wooly_bus.keys import Key, verified

HEADER = {"typ": "wooly-channel", "alg": "EdDSA"}
#: Seconds for which a token opens its channel.
VALID_S = 60.0


class Pass(Protocol):
    """What lets a client at a session."""

    def check(self, shown: str) -> None:
        """Let it in.

        Raises:
            ProtocolError: it is not let in; the message says why.
        """


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A secret that both sides were told; where there is no router (standalone), or it signs nothing."""

    secret: str

    def check(self, shown: str) -> None:
        """See `Pass`."""
        if not hmac.compare_digest(self.secret.encode(), shown.encode(errors="replace")):
            raise ProtocolError("the token is not the session's")


@dataclass(frozen=True, slots=True)
class SignedPass:
    """A session's side of its signed tokens.

    Attributes:
        public: the router's key.
        session_id: the session.
        tenant: whose it is.
        executor_id: where it is.
        now: the router's time in seconds.
    """

    public: str
    session_id: str
    tenant: str
    executor_id: str
    now: Callable[[], float]

    def check(self, shown: str) -> None:
        """See `Pass`."""
        try:
            claims = verified(shown, self.public, "cluster", HEADER)
        except BusError as e:
            raise ProtocolError(f"the channel token is not the router's: {e}") from e
        for name, what, ours in (
            ("session", "session", self.session_id),
            ("tenant", "tenant", self.tenant),
            ("executor", "executor", self.executor_id),
        ):
            if claims.get(name) != ours:
                raise ProtocolError(f"the channel token is for another {what}")
        ends = claims.get("exp")
        if not isinstance(ends, (int, float)) or not self.now() < ends:
            raise ProtocolError("the channel token has expired; open a new session")


def channel_token(key: Key, *, session_id: str, tenant: str, executor_id: str, now: float) -> str:
    """A token for one channel.

    Args:
        key: the router's.
        session_id: the session.
        tenant: whose it is.
        executor_id: where it is.
        now: the router's time, seconds since the epoch.
    """
    claims = {"session": session_id, "tenant": tenant, "executor": executor_id, "iat": now, "exp": now + VALID_S}
    return key.claim(claims, HEADER)
