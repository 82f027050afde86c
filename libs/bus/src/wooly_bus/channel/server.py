"""The executor's end of all data channels: one thread and non-blocking sockets; `poll` returns events.

Every connection comes from an `Acceptor`, which has checked its hello. The owner calls `poll` in a loop. Bulk frames are received
directly into memory that the owner supplies. While the owner pauses a connection, the server does not read from it, so that only
its socket buffers fill. A hostile or broken connection is closed; its error does not leave `poll` and does not affect others.
"""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wooly_wis.frames import MAX_CHUNK

from wooly_bus.channel.acceptor import Guest
from wooly_bus.channel.busy_wait import BusyWait
from wooly_bus.channel.framing import (
    ACK,
    END,
    HEADER,
    MAX_FRAME,
    MAX_REASON,
    PASSING,
    SHARED,
    ChannelClosedError,
    ProtocolError,
    parse_header,
)
from wooly_bus.channel.peer_process import process_of
from wooly_bus.channel.segment import PLACE, RING, SERVER_PIECE, SHARED_FROM, Ring, Segment

log = logging.getLogger("wooly.channel")
#: Bytes read from a connection per poll if it is the only one. Reading a mebibyte takes the owner's thread up to 2 ms.
READ_PER_POLL = 4 << 20
#: Bytes copied from or to shared memory at a time. Meanwhile, no other thread executes Python code.
COPIED_AT_ONCE = 512 << 10
#: Copying so many bytes from or to shared memory takes as long as receiving one byte.
COPIED_PER_RECEIVED = 4
#: Bytes read from a connection per poll if there are several.
READ_PER_TURN = 512 << 10
#: Bytes that each frame adds to its size in this budget: after 64 small frames, the next connection is read.
FRAME_COST = READ_PER_TURN // 64
#: Bytes that one receive may read ahead: several small frames arrive with one call of the system. Longer payloads are received
#: without a copy.
AHEAD = 4096
#: Waits below so many seconds are exact. `epoll` waits for whole milliseconds, rounded up. `select` takes descriptors below 1024.
_EXACT_S, _SELECTABLE = 0.02, 1024
#: Number of pieces that one call of the system sends.
_PIECES_AT_ONCE = 16
#: Errors of a send after the other end closed the connection.
HUNG_UP = (BrokenPipeError, ConnectionResetError)
_READING = selectors.EVENT_READ
_HEADER_SIZE = HEADER.size
_read_header = HEADER.unpack_from


class Connected(NamedTuple):
    """A connection whose hello was accepted. The hello (frame 1) is neither acknowledged nor answered yet.

    Attributes:
        conn: the connection.
        admitted: the result of the check of the hello.
    """

    conn: Connection
    admitted: Any


class FrameReceived(NamedTuple):
    """A whole frame was received. For a bulk frame, `payload` is its prefix, and the data is in the memory from the sink."""

    conn: Connection
    kind: int
    seq: int
    payload: bytearray


class Disconnected(NamedTuple):
    """A connection ended. `reason` is empty if it ended normally. `hung_up`: the other end's system has closed it, as it does if
    the process there ends.
    """

    conn: Connection
    reason: str
    hung_up: bool = False


Event = Connected | FrameReceived | Disconnected
#: (connection, kind, prefix, number of data bytes) -> memory for the data; None: call the sink again after `resume`.
BulkSink = Callable[["Connection", int, bytes, int], memoryview | None]


@dataclass(slots=True)
class _Incoming:
    """The frame that is being received. `source`: where its data is, in shared memory; None: it comes through the socket."""

    kind: int
    seq: int
    payload: bytearray
    got: int = 0
    data_len: int = 0
    data: memoryview | None = None
    data_got: int = 0
    shared: bool = False
    source: memoryview | None = None


@dataclass(slots=True)
class _Outgoing:
    """Data that will be copied to shared memory, and the frame that then says so.

    Attributes:
        kind, seq: the frame.
        data: the data.
        at: where in the shared memory it belongs; None: in the ring, which has had no room so far.
        done: bytes that were copied.
    """

    kind: int
    seq: int
    data: memoryview
    at: int | None = None
    done: int = 0


@dataclass(eq=False)
class Connection:
    """One connection of a client.

    Attributes:
        peer: address of the client, for messages.
        segment: memory that the client shares; None: all data passes through the socket.
        owner: data that the owner of the server attaches to the connection.
        process: id of the client's process; 0: it is not known (`peer_process`).
    """

    sock: socket.socket
    peer: str
    server: ChannelServer
    segment: Segment | None = None
    owner: Any = None
    process: int = 0
    closed: bool = False
    paused: bool = False
    waiting_for_sink: bool = False
    _header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    _header_got: int = 0
    _incoming: _Incoming | None = None
    _ahead: memoryview = field(default_factory=lambda: memoryview(bytearray(AHEAD)))
    _ahead_at: int = 0
    _ahead_end: int = 0
    _drained: bool = False
    _received: int = 1  # the hello
    _sent: int = 0
    _out: deque[memoryview | _Outgoing] = field(default_factory=deque)
    _copies: int = 0  # number of _Outgoing in _out
    _ring: Ring = field(default_factory=lambda: Ring(RING, RING))
    _ring_full: bool = False
    _ack: int = 0
    _acked: int = 0
    _last_ack: memoryview | None = None
    _held: bool = False
    _interest: int = 0
    _in_events: bool = False
    queued_bytes: int = 0

    def send(self, kind: int, *buffers: bytes | bytearray | memoryview) -> int:
        """Queue one frame, and return its sequence number.

        The buffers are not copied: keep them unchanged until `queued_bytes` is 0.
        """
        if self.closed:
            return 0
        size = 0
        for b in buffers:
            size += len(b)
        if size > AHEAD and self._ack > self._acked:  # otherwise one acknowledgement behind the frame is enough
            self._queue_ack()
        self._sent += 1
        self._out.append(memoryview(HEADER.pack(size, kind, 0, 0, self._sent)))
        for b in buffers:
            if len(b):
                self._out.append(memoryview(b))
        self.queued_bytes += size + _HEADER_SIZE
        self.server._answered = True
        self.server._dirty[self] = None
        return self._sent

    @property
    def bulk_bytes(self) -> int:
        """Bytes of data that one bulk frame had best."""
        return MAX_CHUNK if self.segment is None else SERVER_PIECE

    def send_bulk(self, kind: int, data: memoryview, place: int | None = None) -> int:
        """Queue one frame, as `send` does. Large data goes through shared memory, if there is any.

        Args:
            kind: kind of the frame.
            data: its payload.
            place: where in the shared memory the client wants the data; None: anywhere.
        """
        if self.segment is None or not SHARED_FROM <= len(data) <= RING // 2 or self.closed:
            return self.send(kind, data)
        self._queue_ack()
        self._sent += 1
        self._copies += 1
        self._out.append(_Outgoing(kind, self._sent, data, place))
        self.queued_bytes += len(data)
        self.server._answered = True
        self.server._dirty[self] = None
        return self._sent

    @property
    def queued_pieces(self) -> int:
        """Number of headers and payloads that wait to be written."""
        return len(self._out)

    @property
    def shared_bytes(self) -> int:
        """Bytes of host memory that the shared memory takes."""
        return 0 if self.segment is None else self.segment.resident

    @property
    def receiving_bytes(self) -> int:
        """Bytes allocated for a frame that is not complete yet."""
        return 0 if self._incoming is None else len(self._incoming.payload)

    def ack(self, seq: int) -> None:
        """Acknowledge all frames up to `seq`. The acknowledgement is sent with the next frame or at the next poll."""
        if seq > self._ack:
            self._ack = seq
            self.server._dirty[self] = None

    def _queue_ack(self) -> None:
        if self._ack > self._acked:
            self._acked = self._ack
            ack = memoryview(HEADER.pack(0, ACK, 0, 0, self._ack))
            # The client does not read: replace the queued acknowledgement. Keep the first element, which TLS may have half sent.
            if len(self._out) > 1 and self._out[-1] is self._last_ack:
                self._out[-1] = ack
            else:
                self._out.append(ack)
                self.queued_bytes += HEADER.size
            self._last_ack = ack

    def pause(self) -> None:
        """Stop reading this connection."""
        self.paused = True
        self.server._watch(self)

    def resume(self) -> None:
        """Read from this connection again. If the bulk sink returned None, call it again."""
        self.paused = False
        self.server._resumed[self] = None
        self.server._watch(self)

    def close(self, reason: str = "", *, passing: bool = False) -> None:
        """Close at once. A `Disconnected` event follows. The client gets the reason if the socket buffer has room for it.

        Args:
            reason: why.
            passing: the session may go on over another connection.
        """
        self.server._close(self, reason, passing=passing)


class ChannelServer:
    """Serves the connections whose hello was accepted, and turns their input into events.

    Args:
        bulk: for each kind of bulk frame, the length of the prefix that stays in the payload, in bytes.
        sink: supplies the memory for the data of a bulk frame.
        fatal: errors of `sink` that no connection caused; `poll` raises them.
        asks: kinds of frames whose client waits for the answer.

    Attributes:
        busy: decides whether `poll` looks for input before it blocks, after an answer was sent.
    """

    def __init__(
        self,
        bulk: dict[int, int] | None = None,
        sink: BulkSink | None = None,
        *,
        fatal: tuple[type[Exception], ...] = (),
        asks: Collection[int] = (),
    ) -> None:
        self._asks = frozenset(asks)
        self._bulk = bulk or {}
        self._sink = sink
        self._fatal = fatal
        self._selector = selectors.EpollSelector()
        self._descriptor = self._selector.fileno()
        self.busy = BusyWait()
        #: Whether a frame was sent since the last wait.
        self._answered = False
        self._connections: dict[Connection, None] = {}
        self._guests: deque[Guest] = deque()
        self._lock = threading.Lock()  # guards `_closed` and `_guests` in `enter`
        self._closed = False
        self._dirty: dict[Connection, None] = {}
        self._resumed: dict[Connection, None] = {}
        self._events: list[Event] = []
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)

    # -- from other threads ------------------------------------------------------------------------------------------

    def enter(self, guest: Guest) -> None:
        """Serve a guest from the next `poll` on. Any thread may call this.

        Raises:
            ChannelClosedError: the server is closed.
        """
        with self._lock:
            if self._closed:
                raise ChannelClosedError("the executor is stopping")
            self._guests.append(guest)
        self.wake()

    def wake(self) -> None:
        """Make a waiting `poll` return. Any thread may call this, even after `close`."""
        with contextlib.suppress(OSError):  # the socket is full of wake-ups, or closed
            self._wake_in.send(b"\0")

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            self._closed = True
        self._take_guests()
        for conn in list(self._connections):
            self._close(conn, "the executor is stopping", passing=True)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait up to `timeout` seconds (None: without limit) and return the events."""
        if self._dirty:
            self._flush_dirty(hold=timeout == 0)
        if self._resumed:
            for conn in list(self._resumed):
                del self._resumed[conn]
                if not conn.closed and not conn.paused:
                    self._readable(conn)
        for key, mask in self._select(0 if self._events or self._resumed else timeout):
            if key.data is None:
                self._drain_wakes()
                self._take_guests()
            else:
                if mask & selectors.EVENT_WRITE:
                    self._writable(key.data)
                if mask & selectors.EVENT_READ and not key.data.closed and not key.data.paused:
                    self._readable(key.data)
        events, self._events = self._events, []
        for event in events:
            event.conn._in_events = False
        return events

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        look = self._selector.select
        answered, self._answered = self._answered, self._answered and timeout == 0
        if timeout == 0:
            return look(0)
        if not answered:  # no client waits for this process, so its next frame is not urgent, and looking would slow it
            return self._wait(timeout)
        busy = self.busy
        begun, until = busy.begin()
        now = begun
        while not (found := look(0)):
            now = busy.go_on(now, until)
            if not now:
                found = self._wait(timeout)
                break
        busy.end(begun, until, blocked=not now)
        return found

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and 0 < timeout < _EXACT_S and self._descriptor < _SELECTABLE:
            select.select([self._descriptor], [], [], timeout)
            timeout = 0
        return self._selector.select(timeout)

    def waiting(self) -> bool:
        """Whether `poll` would return events at once. This call takes a fifth of the time of `poll`."""
        return bool(self._events or self._resumed or self._selector.select(0))

    def flush(self) -> None:
        """Write the queued frames now, not in the next `poll`."""
        for conn in list(self._dirty):
            if conn._out:
                del self._dirty[conn]
                conn._held = False
                if conn._ack > conn._acked:
                    conn._queue_ack()
                self._writable(conn)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_out.recv(4096):
                continue
        except BlockingIOError:
            return

    def _take_guests(self) -> None:
        while self._guests:
            guest = self._guests.popleft()
            conn = Connection(guest.sock, guest.peer, self, guest.segment, process=process_of(guest.sock))
            self._connections[conn] = None
            self._events.append(Connected(conn, guest.admitted))
            self._resumed[conn] = None  # TLS may have read more than the hello
            self._watch(conn)

    def _watch(self, conn: Connection) -> None:
        if conn.closed:
            return
        want = 0
        if not conn.paused and not conn.waiting_for_sink:
            want |= selectors.EVENT_READ
        if conn._out and not conn._ring_full:
            want |= selectors.EVENT_WRITE
        if want == conn._interest:
            return
        try:
            if not conn._interest:
                self._selector.register(conn.sock, want, conn)
            elif not want:
                self._selector.unregister(conn.sock)
            else:
                self._selector.modify(conn.sock, want, conn)
        except (OSError, ValueError, KeyError) as e:
            self._close(conn, f"the selector cannot watch the connection: {e}")
            return
        conn._interest = want

    def _close(self, conn: Connection, reason: str, *, passing: bool = False, hung_up: bool = False) -> None:
        if conn.closed:
            return
        if conn._out and not reason:
            self._writable(conn)
            if conn.closed:
                return  # the write failed and closed the connection
        conn.closed = True
        if reason:
            why = reason.encode(errors="replace")[:MAX_REASON]
            conn._out += [memoryview(HEADER.pack(len(why), END, 0, 0, PASSING if passing else 0)), memoryview(why)]
            self._writable(conn)
        if conn._interest:
            conn._interest = 0
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._selector.unregister(conn.sock)
        self._connections.pop(conn, None)
        self._dirty.pop(conn, None)
        self._resumed.pop(conn, None)
        conn._out.clear()
        conn.queued_bytes = 0
        with contextlib.suppress(OSError):
            conn.sock.close()
        if conn.segment is not None:
            conn._incoming = None
            conn.segment.close()
            conn.segment = None
        self._events.append(Disconnected(conn, reason, hung_up))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _flush_dirty(self, *, hold: bool) -> None:
        """Write the queued frames. With `hold`, a lone acknowledgement waits for one more poll, to be sent with an answer."""
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
            if out and not conn._copies and len(out) <= _PIECES_AT_ONCE and not isinstance(conn.sock, ssl.SSLSocket):
                n = conn.sock.sendmsg(out)  # type: ignore[arg-type] # without copies, all pieces are memory
                if n == conn.queued_bytes:  # the usual case: the client reads its answers
                    out.clear()
                    conn.queued_bytes = 0
                else:
                    self._sent_some(conn, n)
            budget = self._budget if out else 0
            while out:
                head = out[0]
                if isinstance(head, _Outgoing):
                    if budget <= 0 or not (copied := self._copy_out(conn, head)):
                        break
                    budget -= copied // COPIED_PER_RECEIVED
                    continue
                if isinstance(conn.sock, ssl.SSLSocket):
                    n = conn.sock.send(head)
                else:
                    n = conn.sock.sendmsg(_first_pieces(out))
                self._sent_some(conn, n)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._watch(conn)
            return
        except Exception as e:
            out.clear()
            if isinstance(e, HUNG_UP) and not (conn.closed or conn.paused or conn.waiting_for_sink):
                self._readable(conn)  # what arrived before: it may say why the other end closed the connection
            if not conn.closed and conn not in self._resumed:
                self._broke(conn, e)
            return
        if conn._interest != _READING or conn.paused or conn.waiting_for_sink or out:
            self._watch(conn)

    @staticmethod
    def _sent_some(conn: Connection, n: int) -> None:
        """Remove the first `n` bytes of what is queued."""
        conn.queued_bytes -= n
        out = conn._out
        while n:
            head = out[0]
            assert isinstance(head, memoryview)
            if n >= len(head):
                n -= len(head)
                out.popleft()
            else:
                out[0] = head[n:]
                n = 0

    def _copy_out(self, conn: Connection, head: _Outgoing) -> int:
        """Copy the next bytes of the first queued data to shared memory. Returns their number; 0: the client must read first."""
        assert conn.segment is not None
        data = head.data
        if head.at is None:
            head.at = conn._ring.take(len(data), head.seq)
            if head.at is None:
                conn._ring_full = True
                return 0
        done = head.done
        n = min(len(data) - done, COPIED_AT_ONCE)
        at = head.at + done
        conn.segment.view[at : at + n] = data[done : done + n]
        head.done = done + n
        conn.queued_bytes -= n
        if head.done == len(data):
            frame = HEADER.pack(PLACE.size, head.kind, SHARED, 0, head.seq) + PLACE.pack(head.at, len(data))
            conn._out[0] = memoryview(frame)
            conn._copies -= 1
            conn.queued_bytes += len(frame)
        return n

    def _broke(self, conn: Connection, error: Exception) -> None:
        """Close a connection because of its error. Other connections are not affected."""
        if not isinstance(error, OSError):
            log.error(
                "%s: the channel failed with an unexpected error; its connection is closed", conn.peer, exc_info=error
            )
            self._close(conn, f"the channel failed: {type(error).__name__}: {error}")
        else:
            self._close(conn, f"the connection broke: {error}", hung_up=isinstance(error, HUNG_UP))

    # -- reading -----------------------------------------------------------------------------------------------------

    def _readable(self, conn: Connection) -> None:
        budget = self._budget
        try:
            if conn._incoming is None and not conn._header_got and not conn.closed:
                budget -= self._take_small(conn, budget)
                if conn._drained and budget > 0:
                    return
            while budget > 0 and not conn.closed and not conn.paused:
                n = self._advance(conn)
                if n is None:
                    return
                budget -= n
            if budget <= 0 and not conn.closed and self._has_input(conn):
                self._resumed[conn] = None
        except MemoryError:
            self._close(conn, "the executor has no memory left to receive the frame; try again later")
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ProtocolError as e:
            self._close(conn, str(e))
        except self._fatal:
            raise
        except Exception as e:
            self._broke(conn, e)

    @property
    def _budget(self) -> int:
        """Bytes that are read from one connection per poll, and bytes that are copied for it to shared memory."""
        return READ_PER_POLL if len(self._connections) == 1 else READ_PER_TURN

    @staticmethod
    def _has_input(conn: Connection) -> bool:
        """Whether there is input that the selector does not see."""
        if conn._ahead_at < conn._ahead_end:
            return True
        if isinstance(conn.sock, ssl.SSLSocket):
            return bool(conn.sock.pending())
        incoming = conn._incoming
        return incoming is not None and incoming.source is not None and incoming.data is not None

    def _advance(self, conn: Connection) -> int | None:
        """Receive bytes for the current header, payload or data.

        Returns their number, or None if the connection cannot be read now.
        """
        incoming = conn._incoming
        if incoming is None:
            n = self._receive(conn, memoryview(conn._header)[conn._header_got :])
            if not n:
                self._close(conn, "the connection ended inside a frame" if conn._header_got else "", hung_up=True)
                return None
            conn._header_got += n
            if conn._header_got == HEADER.size:
                conn._header_got = 0
                self._begin(conn)
                return n + FRAME_COST
            return n
        if incoming.got < len(incoming.payload):
            n = self._receive(conn, memoryview(incoming.payload)[incoming.got :])
            if not n:
                self._close(conn, "the connection ended inside a frame", hung_up=True)
                return None
            incoming.got += n
            if incoming.got == len(incoming.payload):
                self._payload_complete(conn, incoming)
            return n
        if incoming.data is None:
            return 0 if self._ask_sink(conn, incoming) else None  # waiting for the owner
        if incoming.source is not None:
            at = incoming.data_got
            n = min(incoming.data_len - at, COPIED_AT_ONCE)
            incoming.data[at : at + n] = incoming.source[at : at + n]
        else:
            n = self._receive(conn, incoming.data[incoming.data_got :])
        if not n:
            self._close(conn, "the connection ended inside a frame", hung_up=True)
            return None
        incoming.data_got += n
        received = n if incoming.source is None else n // COPIED_PER_RECEIVED
        if incoming.data_got == incoming.data_len:
            self._deliver(conn, incoming)
        return received

    def _take_small(self, conn: Connection, budget: int) -> int:
        """Receive once, and deliver the small frames that arrived whole. `_advance` handles what comes after them.

        Returns the part of the budget that these frames used. Sets `conn._drained` if nothing more has arrived.
        """
        ahead, at, end = conn._ahead, conn._ahead_at, conn._ahead_end
        conn._drained = False
        if at == end:
            end = conn.sock.recv_into(ahead)
            if not end:
                self._close(conn, "", hung_up=True)
                return 0
            at = 0
        begun, bulk, events, received = at, self._bulk, self._events, conn._received
        cost, kind = 0, ACK
        while end - at >= _HEADER_SIZE and cost < budget:
            length, kind, flags, zero, seq = _read_header(ahead, at)
            payload = at + _HEADER_SIZE
            after = payload + length
            if after > end or flags or zero or kind == ACK or kind in bulk or seq != received + 1:
                break
            received = seq
            events.append(FrameReceived(conn, kind, seq, bytearray(ahead[payload:after])))
            at = after
            cost += FRAME_COST
        if at != begun:
            conn._received, conn._in_events = received, True
        conn._ahead_at, conn._ahead_end = at, end
        # A socket that gives less than was asked for has no more, and a client that waits neither sends nor leaves. A TLS
        # connection may keep decrypted bytes.
        conn._drained = kind in self._asks and at == end < AHEAD and not isinstance(conn.sock, ssl.SSLSocket)
        return cost + at - begun

    @staticmethod
    def _receive(conn: Connection, into: memoryview) -> int:
        """Receive what has arrived. Returns the number of bytes; 0: the other end has closed the connection.

        Raises:
            BlockingIOError: nothing has arrived.
        """
        at, end = conn._ahead_at, conn._ahead_end
        if at == end:
            if len(into) >= AHEAD:
                return conn.sock.recv_into(into)
            end = conn.sock.recv_into(conn._ahead)
            if not end:
                return 0
            at = 0
        n = min(len(into), end - at)
        into[:n] = conn._ahead[at : at + n]
        conn._ahead_at, conn._ahead_end = at + n, end
        return n

    def _begin(self, conn: Connection) -> None:
        length, kind, flags, seq = parse_header(conn._header)
        if kind == ACK:
            conn._ring.give_back(seq)
            if conn._ring_full:
                conn._ring_full = False
                self._writable(conn)
            return
        if seq != conn._received + 1:
            raise ProtocolError(f"received frame {seq}, but expected frame {conn._received + 1}")
        conn._received = seq
        prefix = self._bulk.get(kind)
        if flags:
            if conn.segment is None or prefix is None or length != prefix + PLACE.size:
                raise ProtocolError(
                    f"a frame of kind {kind} with {length} bytes cannot have its data in shared memory here"
                )
            conn._incoming = _Incoming(kind, seq, bytearray(length), shared=True)
        elif prefix is None:
            conn._incoming = _Incoming(kind, seq, bytearray(length))
        else:
            if length < prefix:
                raise ProtocolError(f"the bulk frame has {length} bytes; its prefix alone has {prefix}")
            conn._incoming = _Incoming(kind, seq, bytearray(prefix), data_len=length - prefix)
        if not conn._incoming.payload:
            self._payload_complete(conn, conn._incoming)

    def _payload_complete(self, conn: Connection, incoming: _Incoming) -> None:
        if incoming.shared:
            self._locate(conn, incoming)
        if incoming.kind in self._bulk:
            self._ask_sink(conn, incoming)
        else:
            self._deliver(conn, incoming)

    def _locate(self, conn: Connection, incoming: _Incoming) -> None:
        """Find the data of a frame in shared memory.

        Raises:
            ProtocolError: it is not in the memory, or is too large.
        """
        assert conn.segment is not None
        at, nbytes = PLACE.unpack_from(incoming.payload, len(incoming.payload) - PLACE.size)
        if nbytes > MAX_FRAME:
            raise ProtocolError(f"the frame has {nbytes} bytes in shared memory; the limit is {MAX_FRAME}")
        incoming.source, incoming.data_len = conn.segment.part(at, nbytes), nbytes
        del incoming.payload[-PLACE.size :]
        incoming.got = len(incoming.payload)

    def _ask_sink(self, conn: Connection, incoming: _Incoming) -> bool:
        assert self._sink is not None
        if conn._in_events:
            # The owner has not processed the earlier frames yet, so it cannot supply memory for this one.
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


def _first_pieces(out: deque[memoryview | _Outgoing]) -> list[memoryview]:
    """The first pieces that can be sent through the socket, at most `_PIECES_AT_ONCE`."""
    found: list[memoryview] = []
    for piece in out:
        if isinstance(piece, _Outgoing) or len(found) == _PIECES_AT_ONCE:
            break
        found.append(piece)
    return found
