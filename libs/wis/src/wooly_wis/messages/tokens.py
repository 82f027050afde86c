"""Who shows an API token, and what they may."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wooly_wis.messages.base import Message


class CheckTokenRequest(Message):
    """Who shows this token? (service to router). `secret_hash`: its SHA-256 in hex; empty: none was shown."""

    secret_hash: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class CheckTokenReply(Message):
    """Who it is, and what they may; the router refuses tokens that are nobody's, or have ended.

    `actor`: for logs; `tenant`: whose things they see (None: everybody's); `may`: scopes, as `credits:read`; `until`: when it
    ends by itself, in seconds since the epoch; `auth`: "open" where nobody is asked for a token.
    """

    actor: str
    tenant: str | None
    may: tuple[str, ...]
    until: float | None = None
    auth: Literal["open", "tokens"]
