"""The executor's end of all data channels: one thread, non-blocking sockets, events out.

The owner calls `poll` in a loop. Bulk frames are received straight into memory that the owner names; a connection that the owner
pauses is not read, so that only its socket buffers fill. A hostile or broken connection is closed and harms no other.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wooly_bus.channel.endpoint import Endpoint, tune
from wooly_bus.channel.framing import (
    ACK,
    END,
    HEADER,
    MAX_REASON,
    SOCKET_BUFFER,
    ChannelError,
    ProtocolError,
    parse_header,
)

READ_PER_POLL = 4 << 20
UNAUTHENTICATED_LIMIT = 64 << 10
HANDSHAKE_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer connected; nothing is known of it yet."""

    conn: Connection


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A whole frame arrived. For a bulk frame, `payload` is its prefix and the data is already where it belongs."""

    conn: Connection
    kind: int
    seq: int
    payload: bytearray


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended; `reason` is empty for an orderly end."""

    conn: Connection
    reason: str


Event = Connected | FrameReceived | Disconnected
#: (connection, kind, prefix, number of data bytes) -> memory for them, or None to ask again after `resume`.
BulkSink = Callable[["Connection", int, bytes, int], memoryview | None]


@dataclass(slots=True)
class _Incoming:
    """The frame that is being received."""

    kind: int
    seq: int
    payload: bytearray
    got: int = 0
    data_len: int = 0
    data: memoryview | None = None
    data_got: int = 0


@dataclass(eq=False)
class Connection:
    """One peer.

    Attributes:
        peer: where it came from, for messages.
        authenticated: set by the owner; before it, only small frames are taken.
        owner: the owner's own record of this connection.
    """

    sock: socket.socket
    peer: str
    opened_at: float
    server: ChannelServer
    authenticated: bool = False
    owner: Any = None
    closed: bool = False
    paused: bool = False
    waiting_for_sink: bool = False
    _header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    _header_got: int = 0
    _incoming: _Incoming | None = None
    _received: int = 0
    _sent: int = 0
    _out: deque[memoryview] = field(default_factory=deque)
    _ack: int = 0
    _acked: int = 0
    _held: bool = False
    _handshaking: bool = False
    _interest: int = 0
    _in_events: bool = False
    queued_bytes: int = 0

    def send(self, kind: int, *buffers: bytes | bytearray | memoryview) -> int:
        """Queue one frame. The buffers are not copied: they must not change until `queued_bytes` is 0."""
        if self.closed:
            return 0
        size = sum(len(b) for b in buffers)
        self._queue_ack()
        self._sent += 1
        self._out.append(memoryview(HEADER.pack(size, kind, 0, 0, self._sent)))
        for b in buffers:
            if len(b):
                self._out.append(memoryview(b))
        self.queued_bytes += size + HEADER.size
        self.server._dirty[self] = None
        return self._sent

    def ack(self, seq: int) -> None:
        """Say that everything up to `seq` is processed. Sent with the next frame or at the end of the poll."""
        if seq > self._ack:
            self._ack = seq
            self.server._dirty[self] = None

    def _queue_ack(self) -> None:
        if self._ack > self._acked:
            self._acked = self._ack
            self._out.append(memoryview(HEADER.pack(0, ACK, 0, 0, self._ack)))
            self.queued_bytes += HEADER.size

    def pause(self) -> None:
        """Stop reading this connection."""
        self.paused = True
        self.server._watch(self)

    def resume(self) -> None:
        """Read again, and ask the bulk sink again if it had put us off."""
        self.paused = False
        self.server._resumed[self] = None
        self.server._watch(self)

    def close(self, reason: str = "") -> None:
        """Close at once; a `Disconnected` event follows. A peer that is known is told the reason, if there is room on the way."""
        self.server._close(self, reason)


class ChannelServer:
    """Listens on several endpoints and turns sockets into events.

    Args:
        bulk: kinds whose data goes to `sink`, with the length of the prefix that stays in the payload.
        sink: names the memory for a bulk frame.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        bulk: dict[int, int] | None = None,
        sink: BulkSink | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        max_connections: int = 1024,
    ) -> None:
        self._bulk = bulk or {}
        self._sink = sink
        self._clock = clock
        self._handshake_timeout = handshake_timeout
        self._max = max_connections
        self._selector = selectors.DefaultSelector()
        self._listeners: list[tuple[socket.socket, Endpoint, ssl.SSLContext | None]] = []
        self._connections: dict[Connection, None] = {}
        self._strangers: dict[Connection, None] = {}
        self._dirty: dict[Connection, None] = {}
        self._resumed: dict[Connection, None] = {}
        self._events: list[Event] = []
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)

    # -- listening ---------------------------------------------------------------------------------------------------

    def listen(self, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> Endpoint:
        """Listen there. Returns the endpoint with the port that was really taken.

        Raises:
            ChannelError: the address cannot be used.
        """
        try:
            if endpoint.scheme == "unix":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                path = Path(endpoint.path)
                path.unlink(missing_ok=True)
                sock.bind(endpoint.path)
                path.chmod(0o600)
                bound = endpoint
            elif endpoint.scheme in ("tcp", "tls"):
                if endpoint.scheme == "tls" and tls is None:
                    raise ChannelError(f"{endpoint}: a TLS context is needed")
                sock = socket.create_server((endpoint.host, endpoint.port))
                bound = Endpoint(endpoint.scheme, endpoint.host, sock.getsockname()[1])
            else:
                raise ChannelError(f"{endpoint}: cannot listen on this scheme")
        except OSError as e:
            raise ChannelError(f"cannot listen on {endpoint}: {e}") from e
        sock.setblocking(False)
        sock.listen(64)
        self._listeners.append((sock, bound, tls if endpoint.scheme == "tls" else None))
        self._selector.register(sock, selectors.EVENT_READ, len(self._listeners) - 1)
        return bound

    def wake(self) -> None:
        """Make a waiting `poll` return; callable from any thread, also when the server is closed already."""
        with contextlib.suppress(OSError):  # full of wake-ups, or closed
            self._wake_in.send(b"\0")

    def close(self) -> None:
        """Close every connection and listener."""
        for conn in list(self._connections):
            self._close(conn, "the executor is stopping")
        for sock, endpoint, _ in self._listeners:
            sock.close()
            if endpoint.scheme == "unix":
                Path(endpoint.path).unlink(missing_ok=True)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait up to `timeout` seconds (None: for ever) and return what happened."""
        self._flush_dirty(hold=timeout == 0)
        for conn in list(self._resumed):
            del self._resumed[conn]
            if not conn.closed and not conn.paused:
                self._readable(conn)
        if self._strangers:
            timeout = min(timeout if timeout is not None else 1.0, 1.0)
        for key, mask in self._selector.select(0 if self._events or self._resumed else timeout):
            if key.data is None:
                self._drain_wakes()
            elif isinstance(key.data, int):
                self._accept(key.data)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._writable(key.data)
                if mask & selectors.EVENT_READ and not key.data.closed and not key.data.paused:
                    self._readable(key.data)
        if self._strangers:
            self._expire_strangers()
        events, self._events = self._events, []
        for event in events:
            event.conn._in_events = False
        return events

    def waiting(self) -> bool:
        """Whether `poll` would have something to tell at once. A fifth of its price, for who asks often."""
        return bool(self._events or self._resumed or self._selector.select(0))

    def flush(self) -> None:
        """Write what is queued now, rather than in the next `poll`."""
        for conn in [conn for conn in self._dirty if conn._out]:
            del self._dirty[conn]
            conn._held = False
            conn._queue_ack()
            self._writable(conn)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_out.recv(4096):
                continue
        except BlockingIOError:
            return

    def _accept(self, index: int) -> None:
        listener, endpoint, tls = self._listeners[index]
        try:
            sock, address = listener.accept()
        except OSError:
            return  # it went away again
        if len(self._connections) >= self._max:
            sock.close()
            return
        sock.setblocking(False)
        tune(sock, SOCKET_BUFFER)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        peer = str(endpoint) if endpoint.scheme == "unix" else f"{address[0]}:{address[1]}"
        self._take_in(sock, peer, handshaking=tls is not None)

    def adopt(self, sock: socket.socket, peer: str) -> None:
        """Serve a socket that was connected elsewhere, as if it had come through a listener (in the loop's thread)."""
        if len(self._connections) >= self._max:
            sock.close()
            return
        sock.setblocking(False)
        self._take_in(sock, peer, handshaking=False)

    def _take_in(self, sock: socket.socket, peer: str, *, handshaking: bool) -> None:
        conn = Connection(sock, peer, self._clock(), self)
        conn._handshaking = handshaking
        self._connections[conn] = None
        self._strangers[conn] = None
        self._watch(conn)
        self._events.append(Connected(conn))

    def _expire_strangers(self) -> None:
        now = self._clock()
        for conn in list(self._strangers):
            if conn.authenticated:
                del self._strangers[conn]
            elif now - conn.opened_at > self._handshake_timeout:
                self._close(conn, f"no valid hello within {self._handshake_timeout:g} s")

    def _watch(self, conn: Connection) -> None:
        if conn.closed:
            return
        want = 0
        if not conn.paused and not conn.waiting_for_sink:
            want |= selectors.EVENT_READ
        if conn._out:
            want |= selectors.EVENT_WRITE
        if want == conn._interest:
            return
        if not conn._interest:
            self._selector.register(conn.sock, want, conn)
        elif not want:
            self._selector.unregister(conn.sock)
        else:
            self._selector.modify(conn.sock, want, conn)
        conn._interest = want

    def _close(self, conn: Connection, reason: str) -> None:
        if conn.closed:
            return
        if conn._out and not reason:
            self._writable(conn)
        conn.closed = True
        if reason and conn.authenticated and not conn._handshaking:
            why = reason.encode()[:MAX_REASON]
            conn._out += [memoryview(HEADER.pack(len(why), END, 0, 0, 0)), memoryview(why)]
            self._writable(conn)
        if conn._interest:
            self._selector.unregister(conn.sock)
            conn._interest = 0
        self._connections.pop(conn, None)
        self._strangers.pop(conn, None)
        self._dirty.pop(conn, None)
        self._resumed.pop(conn, None)
        conn._out.clear()
        conn.queued_bytes = 0
        conn.sock.close()
        self._events.append(Disconnected(conn, reason))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _flush_dirty(self, *, hold: bool) -> None:
        """Write what is queued. With `hold`, a mere acknowledgement may wait for one more poll: an answer may go with it."""
        for conn in list(self._dirty):
            if hold and not conn._out and not conn._held:
                conn._held = True
                continue
            del self._dirty[conn]
            conn._held = False
            if not conn.closed:
                conn._queue_ack()
                self._writable(conn)

    def _writable(self, conn: Connection) -> None:
        out = conn._out
        try:
            while out:
                if isinstance(conn.sock, ssl.SSLSocket):
                    n = conn.sock.send(out[0])
                else:
                    n = conn.sock.sendmsg([out[i] for i in range(min(len(out), 16))])
                conn.queued_bytes -= n
                while n:
                    head = out[0]
                    if n >= len(head):
                        n -= len(head)
                        out.popleft()
                    else:
                        out[0] = head[n:]
                        n = 0
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._watch(conn)
            return
        except OSError as e:
            out.clear()
            self._close(conn, f"the connection broke: {e}")
            return
        self._watch(conn)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _readable(self, conn: Connection) -> None:
        if conn._handshaking and not self._shake(conn):
            return
        budget = READ_PER_POLL
        try:
            while budget > 0 and not conn.closed and not conn.paused:
                n = self._advance(conn)
                if n is None:
                    return
                budget -= n
            if budget <= 0 and isinstance(conn.sock, ssl.SSLSocket) and conn.sock.pending():
                self._resumed[conn] = None
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ProtocolError as e:
            self._close(conn, str(e))
        except OSError as e:
            self._close(conn, f"the connection broke: {e}")

    def _shake(self, conn: Connection) -> bool:
        assert isinstance(conn.sock, ssl.SSLSocket)
        try:
            conn.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as e:
            self._close(conn, f"TLS handshake failed: {e}")
            return False
        conn._handshaking = False
        return True

    def _advance(self, conn: Connection) -> int | None:
        """Receive one piece. Returns its bytes, or None where nothing more can be read now."""
        incoming = conn._incoming
        if incoming is None:
            n = conn.sock.recv_into(memoryview(conn._header)[conn._header_got :])
            if not n:
                self._close(conn, "" if not conn._header_got else "the connection ended inside a frame")
                return None
            conn._header_got += n
            if conn._header_got == HEADER.size:
                conn._header_got = 0
                self._begin(conn)
            return n
        if incoming.got < len(incoming.payload):
            n = conn.sock.recv_into(memoryview(incoming.payload)[incoming.got :])
            if not n:
                self._close(conn, "the connection ended inside a frame")
                return None
            incoming.got += n
            if incoming.got == len(incoming.payload):
                self._payload_complete(conn, incoming)
            return n
        if incoming.data is None:
            return 0 if self._ask_sink(conn, incoming) else None  # waiting for the owner
        n = conn.sock.recv_into(incoming.data[incoming.data_got :])
        if not n:
            self._close(conn, "the connection ended inside a frame")
            return None
        incoming.data_got += n
        if incoming.data_got == incoming.data_len:
            self._deliver(conn, incoming)
        return n

    def _begin(self, conn: Connection) -> None:
        length, kind, _, seq = parse_header(conn._header)
        if kind == ACK:
            return
        if seq != conn._received + 1:
            raise ProtocolError(f"frame {seq} came where {conn._received + 1} was due")
        conn._received = seq
        if not conn.authenticated and length > UNAUTHENTICATED_LIMIT:
            raise ProtocolError(f"frame of {length} bytes before the hello was accepted")
        prefix = self._bulk.get(kind)
        if prefix is None:
            conn._incoming = _Incoming(kind, seq, bytearray(length))
        else:
            if length < prefix:
                raise ProtocolError(f"bulk frame of {length} bytes, its head alone has {prefix}")
            conn._incoming = _Incoming(kind, seq, bytearray(prefix), data_len=length - prefix)
        if not conn._incoming.payload:
            self._payload_complete(conn, conn._incoming)

    def _payload_complete(self, conn: Connection, incoming: _Incoming) -> None:
        if incoming.kind in self._bulk:
            self._ask_sink(conn, incoming)
        else:
            self._deliver(conn, incoming)

    def _ask_sink(self, conn: Connection, incoming: _Incoming) -> bool:
        assert self._sink is not None
        if conn._in_events:
            # The owner has not seen the frames before this one yet, so it cannot say where these bytes belong.
            self._resumed[conn] = None
            return False
        data = self._sink(conn, incoming.kind, bytes(incoming.payload), incoming.data_len)
        if data is None:
            conn.waiting_for_sink = True
            self._watch(conn)
            return False
        conn.waiting_for_sink = False
        self._watch(conn)
        incoming.data = data
        if not incoming.data_len:
            self._deliver(conn, incoming)
        return True

    def _deliver(self, conn: Connection, incoming: _Incoming) -> None:
        conn._incoming = None
        conn._in_events = True
        self._events.append(FrameReceived(conn, incoming.kind, incoming.seq, incoming.payload))
