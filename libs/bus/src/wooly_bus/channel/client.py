"""The client end of a data channel: blocking, no asyncio, gathers without joining, receives into the caller's memory.

One thread at a time may use a client (its owner holds a lock). Frames are numbered from 1 in each direction; acknowledgements
are taken in wherever something is received, and a send waits when more than `window` payload bytes are unacknowledged.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections import deque

from wooly_bus.channel.endpoint import Endpoint, tune
from wooly_bus.channel.framing import (
    ACK,
    DEFAULT_WINDOW,
    END,
    HEADER,
    MAX_FRAME,
    SOCKET_BUFFER,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    Frame,
    ProtocolError,
    parse_header,
)
from wooly_bus.channel.tls import client_context, handshake_error

Buffer = bytes | bytearray | memoryview
_ACK_EVERY = 32 << 20
_HANGUP = getattr(select, "POLLRDHUP", 0)  # `poll` reports POLLHUP and POLLERR unasked


class Expected:
    """Payloads that are on their way into memory of the caller's: see `ChannelClient.expect`.

    Attributes:
        done: they are there, or `other` came.
        other: the first frame of another kind that came instead.
    """

    __slots__ = ("_at", "_into", "_kind", "done", "other")

    def __init__(self, into: memoryview, kind: int) -> None:
        self._into, self._kind, self._at = into, kind, 0
        self.done = not len(into)
        self.other: Frame | None = None


class ChannelClient:
    """A connected data channel.

    Attributes:
        window: unacknowledged payload bytes that may be in flight.
        acked: highest sequence number that the other end has processed.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._header = bytearray(HEADER.size)
        self._header_view = memoryview(self._header)
        self._sent = 0
        self._received = 0
        self._unacked: deque[tuple[int, int]] = deque()
        self._expected: deque[Expected] = deque()
        self._in_flight = 0
        self._owed = 0
        self._leaving = False
        self._tls = isinstance(sock, ssl.SSLSocket)
        self.window = DEFAULT_WINDOW
        self.acked = 0

    @classmethod
    def connect(cls, endpoint: Endpoint, *, timeout: float = 5.0, tls: ssl.SSLContext | None = None) -> ChannelClient:
        """Connect to a unix, tcp or tls endpoint.

        Raises:
            ChannelClosedError: nobody listens there.
            ChannelTimeoutError: no answer within `timeout` seconds.
            ChannelTlsError: the server's certificate is not trusted, or it does not speak TLS.
        """
        sock: socket.socket | None = None
        try:
            if endpoint.scheme == "unix":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(timeout)
                tune(sock, SOCKET_BUFFER)
                sock.connect(endpoint.path)
            else:
                sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
                tune(sock, SOCKET_BUFFER)
                if endpoint.scheme == "tls":
                    sock = (tls or client_context()).wrap_socket(sock, server_hostname=endpoint.host)
        except OSError as e:
            if sock is not None:
                sock.close()
            if isinstance(e, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                raise ChannelClosedError(f"{endpoint}: the other end closed the connection in the TLS handshake") from e
            if isinstance(e, ssl.SSLError) and not isinstance(e, TimeoutError):
                raise handshake_error(endpoint, e) from e
            if not isinstance(e, TimeoutError):
                raise ChannelClosedError(f"{endpoint}: {e}") from e
            raise ChannelTimeoutError(f"{endpoint}: no answer within {timeout:g} s") from e
        return cls(sock)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, *buffers: Buffer) -> int:
        """Send one frame, gathered from `buffers`. Returns its sequence number.

        When it returns, the buffers' memory may be reused.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        size = 0
        for b in buffers:
            size += len(b)
        if size > MAX_FRAME:
            raise ProtocolError(f"frame of {size} bytes, at most {MAX_FRAME}")
        if self._in_flight + size > self.window and self._in_flight:
            self._wait_for_room(size)
        self._sent = seq = self._sent + 1
        self._write([HEADER.pack(size, kind, 0, 0, seq), *buffers], size + HEADER.size)
        self._unacked.append((seq, size))
        self._in_flight += size
        return seq

    def _write(self, buffers: list[Buffer], size: int) -> None:
        sock = self._sock
        try:
            if self._tls:
                for b in buffers:
                    sock.sendall(b)
                return
            n = sock.sendmsg(buffers)
            while n < size:
                rest: list[Buffer] = []
                for b in buffers:
                    if n >= len(b):
                        n -= len(b)
                    else:
                        rest.append(memoryview(b)[n:] if n else b)
                        n = 0
                buffers = rest
                size = sum(len(b) for b in buffers)
                n = sock.sendmsg(buffers)
        except OSError as e:
            raise self._left(e) from e

    def _wait_for_room(self, size: int) -> None:
        while self._in_flight and self._in_flight + size > self.window:
            if (other := self._take()) is not None:
                raise ProtocolError(f"frame of kind {other[1]} ({other[0]} bytes) where only acknowledgements may come")

    # -- receiving ---------------------------------------------------------------------------------------------------

    def recv(self, timeout: float | None = None) -> Frame:
        """The next frame that is not an acknowledgement.

        Raises:
            ChannelTimeoutError: none within `timeout` seconds.
            ChannelClosedError: the other end is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if deadline is not None:
                self._wait_readable(deadline)
            header = self._take()
            if header is not None:
                frame = self._rest(*header)
                self._owe(header[0])
                return frame

    def recv_data(self, into: memoryview, kind: int) -> Frame | None:
        """Fill `into` from the payloads of consecutive frames of `kind`, straight into its memory.

        Returns None when it is full, or the first frame of another kind that came instead.
        """
        expected = self.expect(into, kind)
        self.complete(expected)
        return expected.other

    def expect(self, into: memoryview, kind: int) -> Expected:
        """Fill `into` from the payloads of frames of `kind` that will come before anything else that is received from now on.

        They are taken in wherever something is received; `complete` waits for them.
        """
        expected = Expected(into, kind)
        if not expected.done:
            self._expected.append(expected)
        return expected

    def complete(self, expected: Expected) -> None:
        """Wait until what is expected is there, or the first frame of another kind that came instead."""
        while not expected.done:
            self._take()

    def poll_acks(self) -> None:
        """Take in the acknowledgements that have arrived, and what is expected, without waiting.

        Raises:
            ChannelClosedError: the other end is gone.
            ProtocolError: something else came, which nobody asked for.
        """
        while self._pending():
            if (other := self._take()) is not None:
                raise ProtocolError(f"unasked frame of kind {other[1]} ({other[0]} bytes)")

    def _take(self) -> tuple[int, int, int, int] | None:
        """Take in the next frame if it is an acknowledgement or expected; else its header, whose payload follows."""
        header = length, kind, _, seq = self._read_header()
        if kind == ACK:
            self._take_ack(seq)
            return None
        if kind == END:
            why = bytearray(length)
            self._read_into(memoryview(why))
            raise ChannelClosedError(why.decode(errors="replace"))
        if not self._expected:
            return header
        expected = self._expected[0]
        if kind != expected._kind:
            expected.other = self._rest(*header)
        else:
            at, into = expected._at, expected._into
            if length > len(into) - at:
                raise ProtocolError(f"{length} bytes of data where {len(into) - at} were missing")
            self._check_seq(seq)
            self._read_into(into[at : at + length])
            expected._at = at + length
            self._owe(length)
            if at + length < len(into):
                return None
        expected.done = True
        self._expected.popleft()
        return None

    def _rest(self, length: int, kind: int, flags: int, seq: int) -> Frame:
        """The frame of this header."""
        self._check_seq(seq)
        payload = bytearray(length)
        if length:
            self._read_into(memoryview(payload))
        return Frame(kind, flags, seq, payload)

    def _pending(self) -> bool:
        if self._tls and isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        return self._readable_within(0)

    def _wait_readable(self, deadline: float) -> None:
        if self._tls and self._pending():
            return
        left = deadline - time.monotonic()
        if left <= 0 or not self._readable_within(left):
            raise ChannelTimeoutError("no answer from the executor in time")

    def _readable_within(self, seconds: float) -> bool:
        poll = select.poll()  # `select.select` knows no descriptor above 1023
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _read_header(self) -> tuple[int, int, int, int]:
        self._read_into(self._header_view)
        return parse_header(self._header)

    def _read_into(self, view: memoryview) -> None:
        sock, size, at = self._sock, len(view), 0
        try:
            while at < size:
                n = sock.recv_into(view[at:] if at else view)
                if not n:
                    raise self._gone(None)
                at += n
        except OSError as e:
            raise self._gone(e) from e

    def _check_seq(self, seq: int) -> None:
        self._received += 1
        if seq != self._received:
            raise ProtocolError(f"frame {seq} came where {self._received} was due")

    def _take_ack(self, seq: int) -> None:
        if not self.acked <= seq <= self._sent:
            raise ProtocolError(f"acknowledgement of frame {seq}; {self.acked} to {self._sent} were possible")
        self.acked = seq
        unacked = self._unacked
        while unacked and unacked[0][0] <= seq:
            self._in_flight -= unacked.popleft()[1]

    def _owe(self, size: int) -> None:
        self._owed += size
        if self._owed >= _ACK_EVERY:
            self._owed = 0
            self._write([HEADER.pack(0, ACK, 0, 0, self._received)], HEADER.size)

    def _gone(self, cause: OSError | None) -> ChannelError:
        return ChannelClosedError(f"the connection broke: {cause}" if cause else "the other end closed the connection")

    def _left(self, cause: OSError) -> ChannelError:
        """Nothing can be sent. The other end may have said why before it left: everything that came is taken in, to its end."""
        if not self._leaving:
            self._leaving = True
            try:
                while self._pending():
                    if (header := self._take()) is not None:
                        self._rest(*header)
            except ChannelError as e:
                return e
        return self._gone(cause)

    def broken(self) -> bool:
        """Whether the other end is gone, though frames of its may still be unread. Any thread may ask."""
        poll = select.poll()
        try:
            poll.register(self._sock, _HANGUP)
        except (OSError, ValueError):  # closed here
            return True
        return bool(poll.poll(0))

    def abort(self) -> None:
        """Break the connection from any thread: whoever waits on it finds it closed. `close` is still due."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    @property
    def in_flight(self) -> int:
        """Unacknowledged payload bytes."""
        return self._in_flight

    def close(self) -> None:
        """Close the connection. Frames that were not acknowledged may be lost: ask for an answer first where that matters."""
        self._sock.close()
