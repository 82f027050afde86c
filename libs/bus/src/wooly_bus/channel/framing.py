"""The frame header of the data channel, its limits, and its errors. This module knows two kinds of frames: ACK and END."""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: Payload length, kind, flags, zero, sequence number.
HEADER = struct.Struct("<IBBHQ")
ACK = 1
#: Kind of the last frame: the reason why its sender closes the connection, as UTF-8 of at most `MAX_REASON` bytes. It has no
#: number; in place of one it has 0, or `PASSING` if the session may go on over another connection.
END = 18
PASSING = 1
MAX_REASON = 4096
#: Flag of a frame whose data is in shared memory: its payload ends with the data's place (`segment.PLACE`) instead.
SHARED = 1
#: Largest payload of a frame, in bytes.
MAX_FRAME = 16 << 20
#: Unacknowledged payload bytes that a sender may have in flight, unless the WELCOME frame says otherwise.
DEFAULT_WINDOW = 64 << 20
#: Send and receive buffer of each socket, in bytes.
SOCKET_BUFFER = 4 << 20


class ChannelError(Exception):
    """Root of the errors of a data channel."""

    code = "channel.error"
    retryable = False
    #: Whether the session may go on over another connection: nothing that it did is the cause.
    passing = False


class ChannelClosedError(ChannelError):
    """The other end closed the connection, or the connection broke."""

    code = "channel.closed"
    retryable = True

    def __init__(self, message: str, *, passing: bool = True) -> None:
        super().__init__(message)
        self.passing = passing


class ChannelTimeoutError(ChannelError):
    """The other end did not answer within the timeout."""

    code = "channel.timeout"
    retryable = True


class ProtocolError(ChannelError):
    """The other end violated the framing rules. The connection cannot be used any more."""

    code = "channel.protocol"


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    kind: int
    flags: int
    seq: int
    payload: bytes | bytearray | memoryview


def parse_header(header: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """Payload length, kind, flags and sequence number of a header.

    Raises:
        ProtocolError: reserved bits are set, or the length exceeds its limit.
    """
    length, kind, flags, zero, seq = HEADER.unpack(header)
    if zero or flags & ~SHARED or (flags and kind in (ACK, END)):
        raise ProtocolError(f"reserved header bits are set (flags {flags:#x}, zero {zero:#x})")
    if length > MAX_FRAME:
        raise ProtocolError(f"the frame has {length} bytes; the limit is {MAX_FRAME}")
    if kind == ACK and length:
        raise ProtocolError("an ACK frame has a payload")
    if kind == END and length > MAX_REASON:
        raise ProtocolError(f"the END frame has {length} bytes; the limit is {MAX_REASON}")
    return length, kind, flags, seq
