"""The request for a byte stream to an executor through NATS, and its reply. The bytes go as `wooly_bus.channel.tunnel` says."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from wooly_wis.messages import Message

from wooly_bus import subjects

Inbox = Annotated[str, AfterValidator(subjects.inbox)]


class OpenTunnelRequest(Message):
    """A client wants a byte stream. `window` is what it takes unasked, in bytes; `key` marks the messages of this tunnel."""

    inbox: Inbox
    key: str = Field(pattern=r"^[0-9a-f]{16}$")
    window: int = Field(ge=1 << 10, le=1 << 30)


class OpenTunnelReply(Message):
    """The other end of it."""

    inbox: Inbox
    window: int = Field(ge=1 << 10, le=1 << 30)
