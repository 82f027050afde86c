"""The request that opens a tunnel (a byte stream to an executor through NATS), and its reply.

`wooly_bus.channel.tunnel` defines the messages that then carry the bytes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from wooly_wis.messages import Message

from wooly_bus import subjects

Inbox = Annotated[str, AfterValidator(subjects.inbox)]


class OpenTunnelRequest(Message):
    """Open a tunnel.

    Attributes:
        inbox: the subject on which the client receives the messages of the tunnel.
        key: 16 hexadecimal digits that mark the messages of this tunnel.
        window: bytes that the executor may send before it needs a CREDIT message.
    """

    inbox: Inbox
    key: str = Field(pattern=r"^[0-9a-f]{16}$")
    window: int = Field(ge=1 << 10, le=1 << 30)


class OpenTunnelReply(Message):
    """The executor's end of a tunnel.

    Attributes:
        inbox: the subject on which the executor receives the messages of the tunnel.
        window: bytes that the client may send before it needs a CREDIT message.
    """

    inbox: Inbox
    window: int = Field(ge=1 << 10, le=1 << 30)
