"""Messages about API tokens: the owner of a token, and the token's rights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wooly_wis.messages.base import Message


class CheckTokenRequest(Message):
    """Check an API token (service to router). `secret_hash`: the token's SHA-256 in hex; empty: the caller showed no token."""

    secret_hash: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class CheckTokenReply(Message):
    """The owner and the rights of a token. The router refuses unknown and expired tokens.

    Attributes:
        actor: name of the owner, for logs.
        tenant: the tenant whose data the token may read; None: all tenants.
        may: scopes, such as `credits:read`.
        until: expiry, in seconds since the epoch; None: no expiry.
        auth: "open" if the router requires no tokens.
    """

    actor: str
    tenant: str | None
    may: tuple[str, ...]
    until: float | None = None
    auth: Literal["open", "tokens"]
