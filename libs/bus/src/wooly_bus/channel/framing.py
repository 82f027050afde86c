"""The frame header of the data channel, its limits, and its errors. Kinds other than ACK and END mean nothing here."""

from __future__ import annotations

import struct
from dataclasses import dataclass

HEADER = struct.Struct("<IBBHQ")
ACK = 1
#: The last frame: why its sender closes the connection, as UTF-8 of at most `MAX_REASON` bytes. Not numbered.
END = 18
MAX_REASON = 4096
MAX_FRAME = 16 << 20
DEFAULT_WINDOW = 64 << 20
SOCKET_BUFFER = 4 << 20


class ChannelError(Exception):
    """Root of what can go wrong on a data channel."""

    code = "channel.error"
    retryable = False


class ChannelClosedError(ChannelError):
    """The other end is gone."""

    code = "channel.closed"
    retryable = True


class ChannelTimeoutError(ChannelError):
    """Nothing came within the time that the caller allowed."""

    code = "channel.timeout"
    retryable = True


class ProtocolError(ChannelError):
    """The other end broke the framing rules; the connection is of no more use."""

    code = "channel.protocol"


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    kind: int
    flags: int
    seq: int
    payload: bytes | bytearray | memoryview


def parse_header(header: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """(payload length, kind, flags, seq) of a header.

    Raises:
        ProtocolError: reserved bits are set, or the length is beyond `MAX_FRAME`.
    """
    length, kind, flags, zero, seq = HEADER.unpack(header)
    if zero or flags:
        raise ProtocolError(f"reserved header bits are set (flags {flags:#x}, zero {zero:#x})")
    if length > MAX_FRAME:
        raise ProtocolError(f"frame of {length} bytes, at most {MAX_FRAME}")
    if kind == ACK and length:
        raise ProtocolError("ACK frame with a payload")
    if kind == END and length > MAX_REASON:
        raise ProtocolError(f"END frame of {length} bytes, at most {MAX_REASON}")
    return length, kind, flags, seq
