"""Tokens that open a data channel: the router signs them, the executor verifies them.

A token names its session, tenant and executor. It expires soon, because a client uses it once, directly after the session is
opened. So a stolen token is soon useless, and an executor cannot use it at another executor. Times are those of the router: the
router sends its time when it opens the session, and the executor counts from there, so that clocks need not be synchronized.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from wooly_bus.channel.framing import ProtocolError
from wooly_bus.errors import BusError
from wooly_bus.keys import Key, verified

HEADER = {"typ": "wooly-channel", "alg": "EdDSA"}
PEER_HEADER = {"typ": "wooly-peer", "alg": "EdDSA"}
#: Lifetime of a token, in seconds.
VALID_S = 60.0


class Pass(Protocol):
    """Decides whether a client may open a channel of a session."""

    def check(self, shown: str) -> None:
        """Check the token `shown` that a client sent.

        Raises:
            ProtocolError: the token is not valid; the message has the reason.
        """


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A secret that client and executor share; used without a router (standalone), or with a router that does not sign tokens."""

    secret: str

    def check(self, shown: str) -> None:
        """See `Pass.check`."""
        if not hmac.compare_digest(self.secret.encode(), shown.encode(errors="replace")):
            raise ProtocolError("the channel token is not valid for this session; open a new session")


@dataclass(frozen=True, slots=True)
class SignedPass:
    """The expected claims of a session's signed tokens.

    Attributes:
        public: public key of the router.
        session_id: the session.
        tenant: the tenant that owns the session.
        executor_id: the executor that serves the session.
        now: returns the router's time, in seconds since the epoch.
    """

    public: str
    session_id: str
    tenant: str
    executor_id: str
    now: Callable[[], float]

    def check(self, shown: str) -> None:
        """See `Pass.check`."""
        try:
            claims = verified(shown, self.public, "cluster", HEADER)
        except BusError as e:
            raise ProtocolError(f"the channel token was not signed by this installation's router: {e}") from e
        self._check_claims(claims, "the channel token")

    def peer(self, ticket: str) -> dict[str, Any]:
        """Check the router's ticket for another executor, and return what it says about that executor.

        Raises:
            ProtocolError: the ticket is not valid.
        """
        try:
            claims = verified(ticket, self.public, "cluster", PEER_HEADER)
        except BusError as e:
            raise ProtocolError(
                f"the ticket for another executor was not signed by this installation's router: {e}"
            ) from e
        self._check_claims(claims, "the ticket for another executor")
        return dict(claims.get("peer") or {})

    def _check_claims(self, claims: Mapping[str, Any], shown: str) -> None:
        for name, what, ours in (
            ("session", "session", self.session_id),
            ("tenant", "tenant", self.tenant),
            ("executor", "executor", self.executor_id),
        ):
            if claims.get(name) != ours:
                raise ProtocolError(f"{shown} is for another {what}; open a new session")
        ends = claims.get("exp")
        if not isinstance(ends, (int, float)) or not self.now() < ends:
            raise ProtocolError(f"{shown} has expired; open a new session")


def channel_token(key: Key, *, session_id: str, tenant: str, executor_id: str, now: float) -> str:
    """Sign a token for one channel.

    Args:
        key: key of the router.
        session_id: the session.
        tenant: the tenant that owns the session.
        executor_id: the executor that serves the session.
        now: the router's time, in seconds since the epoch.
    """
    claims = {"session": session_id, "tenant": tenant, "executor": executor_id, "iat": now, "exp": now + VALID_S}
    return key.claim(claims, HEADER)


def peer_ticket(
    key: Key, peer: Mapping[str, Any], *, session_id: str, tenant: str, executor_id: str, now: float
) -> str:
    """Sign a statement about another executor, for the executor of a session.

    Args:
        key: key of the router.
        peer: what the executor needs to know to become a client of the other one.
        session_id: the session.
        tenant: the tenant that owns the session.
        executor_id: the executor for which the statement is.
        now: the router's time, in seconds since the epoch.
    """
    whose = {"session": session_id, "tenant": tenant, "executor": executor_id}
    return key.claim({**whose, "peer": dict(peer), "iat": now, "exp": now + VALID_S}, PEER_HEADER)
