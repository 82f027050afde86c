"""The client end of a data channel: blocking sockets, no asyncio, no copies of payloads (gathered writes, direct receives).

One thread at a time may use a client (its owner holds a lock). Frames are numbered from 1 in each direction. Every receive also
processes acknowledgements. A send waits while more than `window` payload bytes are unacknowledged.

An exception of a signal handler may end a receive at one place: while it waits for input (`await_input`). The client then keeps
the bytes that it has, and the next receive goes on from there. What a caller expected still arrives later, in its turn. A send
that waits for room receives, too; after such an exception, its frame is not sent. A signal handler may also use the client while
`complete` waits (`call_inside_wait`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wooly_wis.frames import MAX_CHUNK

from wooly_bus.channel.busy_wait import LOOK_NS, BusyWait
from wooly_bus.channel.endpoint import Endpoint, tune
from wooly_bus.channel.framing import (
    ACK,
    DEFAULT_WINDOW,
    END,
    HEADER,
    MAX_FRAME,
    PASSING,
    SHARED,
    SOCKET_BUFFER,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    Frame,
    ProtocolError,
    parse_header,
)
from wooly_bus.channel.segment import (
    CLIENT_PIECE,
    LEAST,
    PLACE,
    RING,
    SEGMENT,
    SHARED_FROM,
    Ring,
    Segment,
    offered_memory,
)
from wooly_bus.channel.sockets import (
    Buffer,
    hung_up,
    input_of,
    send_gathered,
    send_with_descriptor,
    unix_address,
    unix_socket,
)
from wooly_bus.channel.tls import client_context, handshake_error

#: Received payload bytes after which the client sends an acknowledgement: half of the default window.
_ACK_EVERY = 32 << 20

#: Payload, in bytes, from which the time of its arrival is measured.
_LARGE = 64 << 10
#: Bytes that one receive may read ahead: several small frames arrive with one call of the system. Longer payloads are received
#: without a copy.
_AHEAD = 4096
_HEADER_SIZE = HEADER.size
_read_header = HEADER.unpack_from
#: Bytes up to which frames are held, to be sent together.
_MOST_HELD = 16 << 10
#: The kind of an `Expected` that takes the next frame, whatever its kind.
_ANY = -1


class Expected:
    """What the client will receive: payloads into memory of the caller, or one frame. See `ChannelClient.expect`.

    Attributes:
        done: all payloads were received, or `other` was received.
        other: the first frame of another kind that was received instead, or the one frame.
    """

    __slots__ = ("_at", "_into", "_kind", "_place", "done", "other")

    def __init__(self, into: memoryview, kind: int, place: int | None = None) -> None:
        self._into, self._kind, self._at, self._place = into, kind, 0, place
        self.done = kind != _ANY and not len(into)
        self.other: Frame | None = None


class _Incoming:
    """A frame that is being received.

    Attributes:
        kind, flags, seq: fields of its header.
        into: where its payload belongs; of data in shared memory: where its place belongs.
        at: number of payload bytes that were received.
        expected: the expectation that the payload belongs to; None if the frame is for `Expected.other`, or is dropped.
    """

    __slots__ = ("at", "expected", "flags", "into", "kind", "payload", "seq")

    def __init__(self, kind: int, flags: int, seq: int, payload: bytearray | None, into: memoryview) -> None:
        self.kind, self.flags, self.seq, self.payload, self.into = kind, flags, seq, payload, into
        self.at = 0
        self.expected: Expected | None = None


class InputTakenError(Exception):
    """Ends a receive, because a signal handler has received meanwhile. `ChannelClient.complete` looks again."""


class ChannelClient:
    """A connected data channel.

    Attributes:
        window: unacknowledged payload bytes that may be in flight.
        acked: highest sequence number that the other end has processed.
        receiving_s: seconds in which large payloads arrived, from the header of the frame on.
        segment: memory that it shares with the server; None: all data passes through the socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._header = bytearray(HEADER.size)
        self._header_view = memoryview(self._header)
        self._header_at = 0
        self._incoming: _Incoming | None = None
        self._input = input_of(sock)
        self._ahead = memoryview(bytearray(_AHEAD))
        self._ahead_at = self._ahead_end = 0
        self._busy: BusyWait | None = None
        self._holds = 0
        self._held = b""
        self._sent = 0
        self._received = 0
        self._unacked: deque[tuple[int, int]] = deque()
        self._expected: deque[Expected] = deque()
        self._in_flight = 0
        self._unacknowledged = 0
        self._draining = False
        self._tls = isinstance(sock, ssl.SSLSocket)
        self.window = DEFAULT_WINDOW
        self.acked = 0
        self.receiving_s = 0.0
        self.segment: Segment | None = None
        self._offered: int | None = None
        self._ring = Ring(0, RING)
        #: Number of the last frame whose data is in the shared memory itself.
        self._placed = 0

    @classmethod
    def connect(cls, endpoint: Endpoint, *, timeout: float = 5.0, tls: ssl.SSLContext | None = None) -> ChannelClient:
        """Connect to a unix, tcp or tls endpoint.

        Raises:
            ChannelClosedError: no process listens at the endpoint.
            ChannelTimeoutError: the endpoint does not answer within `timeout` seconds.
            ChannelTlsError: the server's certificate is not trusted, or the server does not speak TLS.
        """
        sock: socket.socket | None = None
        try:
            if endpoint.scheme == "unix":
                sock = unix_socket()
                sock.settimeout(timeout)
                tune(sock, SOCKET_BUFFER)
                with unix_address(Path(endpoint.path)) as address:
                    sock.connect(address)
            else:
                sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
                tune(sock, SOCKET_BUFFER)
                if endpoint.scheme == "tls":
                    sock = (tls or client_context()).wrap_socket(sock, server_hostname=endpoint.host)
        except OSError as e:
            if sock is not None:
                sock.close()
            if isinstance(e, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                raise ChannelClosedError(
                    f"{endpoint}: the executor closed the connection during the TLS handshake"
                ) from e
            if isinstance(e, ssl.SSLError) and not isinstance(e, TimeoutError):
                raise handshake_error(endpoint, e) from e
            if not isinstance(e, TimeoutError):
                raise ChannelClosedError(f"{endpoint}: {e}") from e
            raise ChannelTimeoutError(f"{endpoint}: no answer within {timeout:g} s") from e
        return cls(sock)

    def look_before_blocking(self, look_ns: int = LOOK_NS) -> None:
        """Let waits look for input for a short time before they block (`busy_wait`).

        Do not call this for a client in the process of its server: one thread would take the interpreter's lock from the other.

        Args:
            look_ns: maximum time for which a wait looks, in ns; 0: waits block at once.
        """
        self._busy = BusyWait(look_ns)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, *buffers: Buffer) -> int:
        """Send one frame whose payload is the concatenation of `buffers`. Returns its sequence number.

        The caller may reuse the memory of the buffers when `send` returns.

        Raises:
            ChannelClosedError: the connection is closed.
        """
        size = 0
        for b in buffers:
            size += len(b)
        if size > MAX_FRAME:
            raise ProtocolError(f"the frame has {size} bytes; the limit is {MAX_FRAME}")
        if self._in_flight + size > self.window and self._in_flight:
            self._wait_for_room(size)
        seq = self._sent + 1
        header, held = HEADER.pack(size, kind, 0, 0, seq), self._held
        # Any call may raise a RecursionError: the frame counts as sent after the last call that could.
        if self._holds and len(held) + size < _MOST_HELD:
            held = b"".join((held, header, *buffers))
        elif held:
            self._write([held, header, *buffers], len(held) + size + HEADER.size)
            held = b""
        else:
            self._write([header, *buffers], size + HEADER.size)
        self._unacked.append((seq, size))
        self._held, self._sent = held, seq
        if self._holds:
            self._holds -= 1
        self._in_flight += size
        return seq

    @property
    def bulk_bytes(self) -> int:
        """Bytes of data that one bulk frame had best."""
        return MAX_CHUNK if self.segment is None else CLIENT_PIECE

    def send_bulk(self, kind: int, prefix: Buffer, data: Buffer) -> int:
        """Send one bulk frame, as `send` does. Large data goes through shared memory, if there is any.

        Data that is in the shared memory itself must not change until `await_placed` returns.
        """
        segment, nbytes = self.segment, len(data)
        if segment is None or not SHARED_FROM <= nbytes <= RING // 2:
            return self.send(kind, prefix, data)
        at = own = segment.place_of(data)
        if at is None:
            while (at := self._ring.take(nbytes, self._sent + 1)) is None:
                self._take()
            segment.view[at : at + nbytes] = data
        self._write_held()
        seq, size = self._sent + 1, len(prefix) + PLACE.size
        self._write([HEADER.pack(size, kind, SHARED, 0, seq), prefix, PLACE.pack(at, nbytes)], size + HEADER.size)
        self._sent = seq
        if own is not None:
            self._placed = seq
        self._unacked.append((seq, size))
        self._in_flight += size
        return seq

    def await_placed(self) -> None:
        """Wait until the server has copied all data that is in the shared memory itself.

        Raises:
            ChannelClosedError: the connection is closed.
        """
        while self.acked < self._placed:
            self._take()

    def place_of(self, into: memoryview, least: int = SHARED_FROM) -> int | None:
        """Where in the shared memory a large answer belongs; None: `into` is not in it."""
        return None if self.segment is None else self.segment.place_of(into, least)

    def send_hello(self, kind: int, payload: bytes) -> None:
        """Send the hello. On a unix socket, offer memory with it; `share` begins to use the memory."""
        self._offered = offered_memory() if self._sock.family == getattr(socket, "AF_UNIX", -1) else None
        if self._offered is None:
            self.send(kind, payload)
            return
        self._sent = seq = self._sent + 1
        frame = HEADER.pack(len(payload), kind, 0, 0, seq) + payload
        try:
            sent = send_with_descriptor(self._sock, frame, self._offered)
        except OSError as e:
            raise self._send_error(e) from e
        if sent < len(frame):
            self._write([memoryview(frame)[sent:]], len(frame) - sent)
        self._unacked.append((seq, len(payload)))
        self._in_flight += len(payload)

    def share(self, nbytes: int) -> None:
        """Use the memory that was offered with the hello.

        Args:
            nbytes: bytes that the server accepts; 0: it accepts no memory.

        Raises:
            ChannelError: this process cannot map the memory.
        """
        descriptor, self._offered = self._offered, None
        if descriptor is None:
            return
        if not LEAST <= nbytes <= SEGMENT:
            os.close(descriptor)
            return
        try:
            self.segment = Segment(descriptor, nbytes)
        except OSError as e:
            os.close(descriptor)
            raise ChannelError(
                f"this process cannot map {nbytes} bytes of shared memory: {e}; raise its limit of address space (`ulimit -v`)"
            ) from e

    def hold(self, frames: int = 1) -> None:
        """Send the next frames, if they are small, together with the frame after them, or before the next wait or `poll_acks`.

        Args:
            frames: number of frames to hold; 0: the next frame is sent at once, with those that are held.
        """
        self._holds = frames

    def _write_held(self) -> None:
        held = self._held
        if held:
            self._write([held], len(held))
            self._held = b""

    def _write(self, buffers: list[Buffer], size: int) -> None:
        sock = self._sock
        try:
            if self._tls:
                for b in buffers:
                    sock.sendall(b)
                return
            n = send_gathered(sock, buffers)
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
                n = send_gathered(sock, buffers)
        except OSError as e:
            raise self._send_error(e) from e

    def _wait_for_room(self, size: int) -> None:
        while self._in_flight and self._in_flight + size > self.window:
            self._take()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def recv(self, timeout: float | None = None) -> Frame:
        """Receive the next frame that is not an acknowledgement and not expected.

        Raises:
            ChannelTimeoutError: no frame was received within `timeout` seconds.
            ChannelClosedError: the connection is closed.
        """
        expected = self.expect_frame()
        self.complete(expected, timeout)
        assert expected.other is not None
        return expected.other

    def recv_data(self, into: memoryview, kind: int) -> Frame | None:
        """Receive the payloads of consecutive frames of `kind` directly into `into`.

        Returns None when `into` is full, or the first frame of another kind that was received instead.
        """
        expected = self.expect(into, kind)
        self.complete(expected)
        return expected.other

    def expect(self, into: memoryview, kind: int) -> Expected:
        """Announce that the next frames have the given kind, and that their payloads belong into `into`.

        Every later receive fills `into` first. `complete` waits until `into` is full.
        """
        expected = Expected(into, kind, self.place_of(into))
        if not expected.done:
            self._expected.append(expected)
        return expected

    def expect_frame(self) -> Expected:
        """Announce one frame of any kind; it becomes `Expected.other`."""
        return self.expect(memoryview(b""), _ANY)

    def complete(self, expected: Expected, timeout: float | None = None) -> None:
        """Wait until what is expected has been received.

        Raises:
            ChannelTimeoutError: it was not received within `timeout` seconds.
            ChannelClosedError: the connection is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not expected.done:
            if deadline is not None:
                self._write_held()
                self._wait_readable(deadline)
            try:
                self._take()
            except InputTakenError:
                continue

    def call_inside_wait(self, function: Callable[[], Any]) -> Any:
        """Call a signal handler, which may use this client, while `complete` waits in `await_input`.

        What the wait expects may arrive meanwhile.

        Raises:
            InputTakenError: the handler has used the client. The wait must look again.
        """
        before = self._sent, self._received, self.acked
        waiting, self._input = self._input, input_of(self._sock)  # an object of `poll` waits once at a time
        try:
            found = function()
        finally:
            self._input = waiting
        if (self._sent, self._received, self.acked) != before:
            raise InputTakenError
        return found

    def poll_acks(self) -> None:
        """Process the acknowledgements and expected payloads that have arrived, without waiting.

        Raises:
            ChannelClosedError: the connection is closed.
            ProtocolError: an unexpected frame was received.
        """
        self._write_held()
        while self._pending():
            self._take()

    def _take(self) -> None:
        """Receive and process at least one frame that is expected, or an acknowledgement.

        Raises:
            ChannelClosedError: the connection is closed.
            ProtocolError: the frame is not expected.
        """
        if self._held:
            self._write_held()
        incoming = self._incoming
        if incoming is None:
            if not self._header_at:
                if self._ahead_at == self._ahead_end:
                    self.await_input()
                    self._read_ahead()
                if self._take_whole():
                    return
            while self._header_at < HEADER.size:
                self.await_input()
                self._header_at += self._receive(self._header_view[self._header_at :])
            self._header_at = 0
            length, kind, flags, seq = parse_header(self._header)
            if flags:
                incoming = self._announced_place(length, kind, seq)
            else:
                incoming = self._announced(length, kind, seq)
            self._incoming = incoming
        began = time.perf_counter() if len(incoming.into) >= _LARGE else 0.0
        while incoming.at < len(incoming.into):
            self.await_input()
            incoming.at += self._receive(incoming.into[incoming.at :])
        if began:
            self.receiving_s += time.perf_counter() - began
        self._incoming = None
        self._process(incoming)

    def _take_whole(self) -> bool:
        """Process the acknowledgements and expected frames that were read ahead whole. Returns whether there were any.

        `_take` handles all other frames, and raises the errors.
        """
        ahead, at, end = self._ahead, self._ahead_at, self._ahead_end
        found = False
        while end - at >= _HEADER_SIZE:
            length, kind, flags, zero, seq = _read_header(ahead, at)
            payload = at + _HEADER_SIZE
            after = payload + length
            if after > end or flags or zero or kind == END:
                break
            if kind == ACK:
                if length:
                    break
                self._ahead_at = at = after
                self._take_ack(seq)
                found = True
                continue
            if not self._expected or seq != self._received + 1:
                break
            expected = self._expected[0]
            if kind == expected._kind:
                begin = expected._at
                if length > len(expected._into) - begin:
                    break
                expected._at = begin + length
                expected._into[begin : begin + length] = ahead[payload:after]
                expected.done = expected._at == len(expected._into)
            else:
                expected.other = Frame(kind, flags, seq, bytearray(ahead[payload:after]))
                expected.done = True
            self._received, self._ahead_at, found = seq, after, True
            at = after
            if expected.done:
                self._expected.popleft()
            self._acknowledge(length)
        return found

    def _announced(self, length: int, kind: int, seq: int) -> _Incoming:
        """The frame after its header, with the memory for its payload.

        Raises:
            ProtocolError: the frame is not expected.
        """
        expected = self._expected[0] if self._expected and kind not in (ACK, END) else None
        if expected is None and kind not in (ACK, END) and not self._draining:
            raise ProtocolError(f"unexpected frame of kind {kind} ({length} bytes)")
        if expected is None or kind != expected._kind:
            payload = bytearray(length)
            incoming = _Incoming(kind, 0, seq, payload, memoryview(payload))
        else:
            at = expected._at
            if length > len(expected._into) - at:
                raise ProtocolError(f"received {length} bytes of data, but expected at most {len(expected._into) - at}")
            incoming = _Incoming(kind, 0, seq, None, expected._into[at : at + length])
        incoming.expected = expected
        return incoming

    def _announced_place(self, length: int, kind: int, seq: int) -> _Incoming:
        """The frame after its header, if its data is in shared memory, with memory for the data's place.

        Raises:
            ProtocolError: the frame is not expected, or no memory is shared.
        """
        expected = self._expected[0] if self._expected else None
        if expected is None and self._draining:
            return self._announced(length, kind, seq)
        if self.segment is None or length != PLACE.size or expected is None or kind != expected._kind:
            raise ProtocolError(f"unexpected frame of kind {kind} with data in shared memory")
        place = bytearray(length)
        incoming = _Incoming(kind, SHARED, seq, place, memoryview(place))
        incoming.expected = expected
        return incoming

    def _process(self, incoming: _Incoming) -> None:
        if incoming.kind == ACK:
            self._take_ack(incoming.seq)
            return
        if incoming.kind == END:
            raise ChannelClosedError(bytes(incoming.into).decode(errors="replace"), passing=incoming.seq == PASSING)
        self._check_seq(incoming.seq)
        length, expected = len(incoming.into), incoming.expected
        if expected is None:
            return
        if incoming.flags:
            self._take_data(incoming.into, expected)
        elif incoming.payload is not None:
            expected.other = Frame(incoming.kind, incoming.flags, incoming.seq, incoming.payload)
        else:
            expected._at += length
        if (incoming.payload is not None and not incoming.flags) or expected._at == len(expected._into):
            expected.done = True
            self._expected.popleft()
        self._acknowledge(length)

    def _take_data(self, place: memoryview, expected: Expected) -> None:
        """Copy data out of shared memory, and give its place back.

        Raises:
            ProtocolError: the place is not in the memory, or the data is longer than expected.
        """
        assert self.segment is not None
        start, nbytes = PLACE.unpack(place)
        data, at = self.segment.part(start, nbytes), expected._at
        if nbytes > len(expected._into) - at:
            raise ProtocolError(f"received {nbytes} bytes of data, but expected at most {len(expected._into) - at}")
        if expected._place is None or start != expected._place + at:
            expected._into[at : at + nbytes] = data
        expected._at = at + nbytes
        self._unacknowledged = _ACK_EVERY

    def _pending(self) -> bool:
        if self._ahead_at < self._ahead_end:
            return True
        if self._tls and isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        return bool(self._input.poll(0))

    def _wait_readable(self, deadline: float) -> None:
        if (self._tls or self._ahead_at < self._ahead_end) and self._pending():
            return
        left = deadline - time.monotonic()
        if left <= 0 or not self._input.poll(left * 1000):
            raise ChannelTimeoutError("the executor did not answer within the timeout")

    def await_input(self) -> None:
        """Wait for input. The only place where a signal handler's exception may end a receive."""
        if self._ahead_at < self._ahead_end:
            return
        if self._tls and isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return
        poll, busy = self._input.poll, self._busy
        if busy is None:
            poll()
            return
        begun, until = busy.begin()
        now = begun
        while not poll(0):
            now = busy.go_on(now, until)
            if not now:
                poll()
                break
        busy.end(begun, until, blocked=not now)

    def _receive(self, into: memoryview) -> int:
        """Receive what has arrived. Returns the number of bytes."""
        at, end = self._ahead_at, self._ahead_end
        if at == end:
            if len(into) >= _AHEAD:
                return self._receive_into(into)
            self._read_ahead()
            at, end = 0, self._ahead_end
        n = min(len(into), end - at)
        into[:n] = self._ahead[at : at + n]
        self._ahead_at, self._ahead_end = at + n, end
        return n

    def _read_ahead(self) -> None:
        """Receive what has arrived, up to `_AHEAD` bytes. Everything that was read ahead before is used up."""
        self._ahead_end = self._receive_into(self._ahead)
        self._ahead_at = 0

    def _receive_into(self, into: memoryview) -> int:
        try:
            received = self._sock.recv_into(into)
        except OSError as e:
            raise self._closed_error(e) from e
        if not received:
            raise self._closed_error(None)
        return received

    def _check_seq(self, seq: int) -> None:
        self._received += 1
        if seq != self._received:
            raise ProtocolError(f"received frame {seq}, but expected frame {self._received}")

    def _take_ack(self, seq: int) -> None:
        if not self.acked <= seq <= self._sent:
            raise ProtocolError(
                f"received an acknowledgement of frame {seq}; only frames {self.acked} to {self._sent} can be acknowledged"
            )
        self.acked = seq
        if self.segment is not None:
            self._ring.give_back(seq)
        unacked = self._unacked
        while unacked and unacked[0][0] <= seq:
            self._in_flight -= unacked.popleft()[1]

    def _acknowledge(self, size: int) -> None:
        self._unacknowledged += size
        if self._unacknowledged >= _ACK_EVERY:
            self._unacknowledged = 0
            self._write([HEADER.pack(0, ACK, 0, 0, self._received)], HEADER.size)

    def _closed_error(self, cause: OSError | None) -> ChannelError:
        return ChannelClosedError(f"the connection broke: {cause}" if cause else "the executor closed the connection")

    def _send_error(self, cause: OSError) -> ChannelError:
        """The error after a failed send.

        The executor may have sent an END frame with the reason: read everything that has arrived.
        """
        if not self._draining:
            self._draining, self._held = True, b""
            try:
                while self._pending():
                    self._take()
            except ChannelError as e:
                return e
        return self._closed_error(cause)

    def broken(self) -> bool:
        """Whether the other end closed the connection. Received frames may still be unread. Any thread may call this."""
        return hung_up(self._sock)

    def abort(self) -> None:
        """Shut the connection down.

        Any thread may call this; waiting calls fail with `ChannelClosedError`. The owner must still `close` it.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    @property
    def in_flight(self) -> int:
        """Number of unacknowledged payload bytes."""
        return self._in_flight

    def await_end(self, timeout: float) -> None:
        """Drop what arrives until the executor closes the connection, for at most `timeout` seconds.

        If this end closed first with data unread, the connection would be reset, and the executor might lose the last frames.
        """
        deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left)
                if not self._sock.recv(1 << 16):
                    return

    def close(self) -> None:
        """Close the connection. Unacknowledged frames may be lost; to avoid this, wait for an answer first."""
        with contextlib.suppress(ChannelError):
            self._write_held()
        self._sock.close()
        self.share(0)
        if self.segment is not None:
            self.segment.close()
            self.segment = None
