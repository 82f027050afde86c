"""Accepts connections, does the TLS handshake, reads the hello, checks it, and hands valid connections over to the server.

All of this runs in a separate thread, so that the thread that serves sessions never waits for a stranger. A stranger is a
connection whose hello was not accepted yet. The number of strangers is limited, in total and per peer. Each stranger has one
deadline for handshake and hello together. If there is no place for a new stranger, the acceptor closes the oldest stranger of the
peer that has the most. So a client that sends its hello at once is served, even while a hostile peer opens many connections.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wooly_bus.channel.descriptors import free_descriptors
from wooly_bus.channel.endpoint import Endpoint, tune
from wooly_bus.channel.framing import HEADER, SOCKET_BUFFER, ChannelError, ProtocolError, parse_header
from wooly_bus.channel.segment import LEAST, Segment, accepted
from wooly_bus.channel.sockets import receive_with_descriptors, unix_address
from wooly_bus.limited_log import LimitedLog
from wooly_bus.supervision import start_thread

log = logging.getLogger("wooly.channel")

#: Largest hello, in bytes. A signed token takes half a kilobyte of it.
MAX_HELLO = 64 << 10
#: Connections that the kernel queues until the acceptor accepts them.
BACKLOG = 1024
#: Connections accepted per turn of the loop, before the present strangers are served again.
ACCEPTS_PER_TURN = 16
#: Connections accepted between two counts of the free descriptors: one count takes as long as accepting several connections.
RECOUNT_AFTER = 32
#: Pause in seconds if no descriptor is free. Meanwhile, new connections wait in the kernel's backlog.
PAUSE_S = 0.1
#: Errors of `accept` that concern a single connection, which is closed already. Any other error would occur again at once.
_OF_ONE_CONNECTION = frozenset(
    (
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EINTR,
        errno.EPERM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.ETIMEDOUT,
    )
)


@dataclass(frozen=True, slots=True)
class StrangerLimits:
    """Limits on strangers: connections without a valid hello.

    Attributes:
        total: strangers at the same time.
        per_peer: strangers at the same time from one network address, one unix socket, or one tenant's tunnels.
        hello_s: seconds from accepting a connection to the last byte of its hello, including the TLS handshake.
        spare_descriptors: descriptors of the process that are reserved for the files and tunnels of sessions.
        segment: bytes of memory that one client may share with this process; 0: none.
        segments: the same for all clients; those above it share none.
    """

    total: int = 256
    per_peer: int = 64
    hello_s: float = 10.0
    spare_descriptors: int = 64
    segment: int = 256 << 20
    segments: int = 4 << 30


@dataclass(frozen=True, slots=True)
class Guest:
    """A connection whose hello was accepted. Only frame 1 (the hello) was read, and it was not answered yet.

    Attributes:
        sock: the socket, non-blocking.
        peer: address of the client, for messages.
        admitted: the result of the check of the hello.
        segment: memory that the client shares; None: it offered none, or none is accepted.
    """

    sock: socket.socket
    peer: str
    admitted: Any
    segment: Segment | None = None


@dataclass(frozen=True, slots=True)
class _Listener:
    sock: socket.socket
    endpoint: Endpoint
    tls: ssl.SSLContext | None


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection without an accepted hello.

    Attributes:
        sock: the socket, non-blocking.
        peer: address of the client, for messages.
        group: the peer whose limit the connection counts against.
        until: deadline of the hello, on the acceptor's clock.
        handshaking: the TLS handshake is not complete.
        header: header of the hello.
        payload: payload of the hello; None: the header is not complete.
        got: bytes received of the header or payload.
        interest: events for which the selector watches the socket.
        descriptor: descriptor that came with the hello.
    """

    sock: socket.socket
    peer: str
    group: str
    until: float
    handshaking: bool
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    payload: bytearray | None = None
    got: int = 0
    interest: int = 0
    descriptor: int | None = None


class _ClosedEarly(Exception):
    """A stranger closed its connection without a hello, as port scans and health checks do. It is not logged."""


class Acceptor:
    """Owns the listeners and all strangers. Its own thread runs from `start` to `close`.

    Args:
        check: called with the payload of a hello, in the acceptor's thread. Returns the data that the server needs about the
            guest. Raises a `ProtocolError`, or another error with a `code`; the stranger gets its message.
        refusal: makes the kind and the payload of the frame that reports an error to a stranger, from a code and a message.
        deliver: called with each guest, in the acceptor's thread: `ChannelServer.enter`.
        hello: the kind of the first frame.
        limits: limits on strangers.
        clock: returns monotonic seconds.

    Attributes:
        limits: limits on strangers.
        turns: number of turns of the loop so far.
        accepted: number of connections accepted so far.
        welcomed: number of guests handed over so far.
    """

    def __init__(
        self,
        check: Callable[[bytearray], Any],
        refusal: Callable[[str, str], tuple[int, bytes]],
        deliver: Callable[[Guest], None],
        *,
        hello: int,
        limits: StrangerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = check
        self._refusal = refusal
        self._deliver = deliver
        self._hello = hello
        self.limits = limits or StrangerLimits()
        self._clock = clock
        self.turns = self.accepted = self.welcomed = 0
        self._log = LimitedLog(log, "connections were refused", clock=clock)
        self._selector = selectors.DefaultSelector()
        self._listeners: list[_Listener] = []
        self._strangers: dict[_Stranger, None] = {}  # oldest first: all have the same timeout
        self._groups: dict[str, dict[_Stranger, None]] = {}
        self._adopted: deque[tuple[socket.socket, str, str]] = deque()
        self._may_accept = 0
        self._segments: list[Segment] = []
        self._paused_until: float | None = None
        self._lock = threading.Lock()  # guards `_closing` and `_adopted` in `adopt`
        self._closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None

    # -- from other threads ------------------------------------------------------------------------------------------

    def listen(self, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> Endpoint:
        """Listen on an endpoint; call this before `start`. Returns the endpoint with the actual port.

        Raises:
            ChannelError: the acceptor cannot listen on the endpoint.
        """
        try:
            if endpoint.scheme == "unix":
                sock, bound = _unix_listener(Path(endpoint.path)), endpoint
            elif endpoint.scheme in ("tcp", "tls"):
                if endpoint.scheme == "tls" and tls is None:
                    raise ChannelError(f"cannot listen on {endpoint}: no TLS context is given")
                sock = socket.create_server((endpoint.host, endpoint.port))
                bound = Endpoint(endpoint.scheme, endpoint.host, sock.getsockname()[1])
            else:
                raise ChannelError(f"cannot listen on {endpoint}: the scheme must be unix, tcp or tls")
        except OSError as e:
            raise ChannelError(f"cannot listen on {endpoint}: {e}") from e
        sock.listen(BACKLOG)
        sock.setblocking(False)
        listener = _Listener(sock, bound, tls if endpoint.scheme == "tls" else None)
        self._listeners.append(listener)
        self._selector.register(sock, selectors.EVENT_READ, listener)
        return bound

    def adopt(self, sock: socket.socket, peer: str, group: str = "") -> None:
        """Treat a connected socket as a connection that a listener accepted. Any thread may call this.

        Args:
            sock: a connected stream socket.
            peer: name of the client, for messages.
            group: the peer whose limit of strangers the connection counts against; empty: `peer`.
        """
        with self._lock:
            if not self._closing:
                self._adopted.append((sock, peer, group or peer))
                self._wake()
                return
        sock.close()

    def start(self) -> None:
        """Start the thread that accepts connections."""
        self._thread = start_thread(self._run, "acceptor")

    def close(self) -> None:
        """Close the listeners and all strangers, but not the guests that were handed over. A second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        else:
            self._release()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the socket is full of wake-ups, or closed
            self._wake_in.send(b"\0")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the loop until `close`. An unexpected error ends the process, because it could not accept connections any more."""
        try:
            while not self._closing:
                self._turn()
        finally:
            with self._lock:
                self._closing = True
            self._release()

    def _turn(self) -> None:
        """Wait for events and handle them. Present strangers come first, so that places become free for new connections."""
        self.turns += 1
        ready = []
        for key, _ in self._selector.select(self._timeout()):
            if key.data is None:
                self._drain_wakes()
            elif isinstance(key.data, _Listener):
                ready.append(key.data)
            elif key.data in self._strangers:
                self._advance(key.data)
        while self._adopted:
            self._take_in(*self._adopted.popleft(), None)
        for listener in ready:
            self._accept(listener)
        now = self._clock()
        while self._strangers and (oldest := next(iter(self._strangers))).until <= now:
            self._refuse(oldest, "channel.timeout", f"received no valid hello within {self.limits.hello_s:g} s")
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            for listener in self._listeners:
                self._selector.register(listener.sock, selectors.EVENT_READ, listener)
        self._log.settle()

    def _timeout(self) -> float | None:
        due = [next(iter(self._strangers)).until if self._strangers else None, self._paused_until, self._log.due]
        first = min([at for at in due if at is not None], default=None)
        return None if first is None else max(first - self._clock(), 0.0)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_out.recv(4096):
                continue
        except BlockingIOError:
            return

    def _release(self) -> None:
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.sock.close()
        while self._adopted:
            self._adopted.popleft()[0].close()
        for listener in self._listeners:
            listener.sock.close()
            if listener.endpoint.scheme == "unix":
                Path(listener.endpoint.path).unlink(missing_ok=True)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # -- accepting ---------------------------------------------------------------------------------------------------

    def _accept(self, listener: _Listener) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._paused_until is not None:
                return
            if not self._make_room():
                self._pause("this process has no free file descriptor")
                return
            try:
                sock, address = listener.sock.accept()
            except BlockingIOError:
                return
            except (OSError, MemoryError) as e:
                if isinstance(e, OSError) and e.errno in _OF_ONE_CONNECTION:
                    continue
                self._pause(str(e))
                return
            self.accepted += 1
            group = str(listener.endpoint) if listener.endpoint.scheme == "unix" else str(address[0])
            peer = group if listener.endpoint.scheme == "unix" else f"{address[0]}:{address[1]}"
            self._take_in(sock, peer, group, listener.tls)

    def _make_room(self) -> bool:
        """Whether a descriptor is free for a stranger. If sessions need descriptors, evict strangers."""
        if self._may_accept > 0:
            self._may_accept -= 1
            return True
        # one descriptor for the new connection, and one for the next count
        short = self.limits.spare_descriptors + 2 - free_descriptors()
        while short > 0 and self._strangers:
            self._evict("the executor has no free file descriptor")
            short -= 1
        self._may_accept = min(-short, RECOUNT_AFTER)
        return short <= 0

    def _pause(self, why: str) -> None:
        """Stop accepting for `PAUSE_S` seconds."""
        self._may_accept = 0
        self._paused_until = self._clock() + PAUSE_S
        for listener in self._listeners:
            self._selector.unregister(listener.sock)
        self._log.warning(
            f"new connections must wait: {why}; {self.limits.spare_descriptors} descriptors are reserved for sessions; "
            "raise the limit with `ulimit -n`"
        )

    def _take_in(self, sock: socket.socket, peer: str, group: str, tls: ssl.SSLContext | None) -> None:
        same = self._groups.get(group, {})
        if len(same) >= self.limits.per_peer:
            self._evict(
                f"{self.limits.per_peer} connections of {group} have not sent a valid hello, which is the limit for one peer",
                group,
            )
        elif len(self._strangers) >= self.limits.total:
            self._evict(f"{self.limits.total} connections have not sent a valid hello, which is the limit")
        stranger = _Stranger(sock, peer, group, self._clock() + self.limits.hello_s, tls is not None)
        self._strangers[stranger] = None
        self._groups.setdefault(group, {})[stranger] = None
        try:
            sock.setblocking(False)
            if tls is not None:
                stranger.sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._watch(stranger, selectors.EVENT_READ)
        except Exception as e:
            self._fail(stranger, e)

    # -- strangers ---------------------------------------------------------------------------------------------------

    def _watch(self, stranger: _Stranger, interest: int) -> None:
        if not stranger.interest:
            self._selector.register(stranger.sock, interest, stranger)
        elif interest != stranger.interest:
            self._selector.modify(stranger.sock, interest, stranger)
        stranger.interest = interest

    def _advance(self, stranger: _Stranger) -> None:
        """Receive more of a stranger's hello, and check it when it is complete. An error ends this stranger only."""
        try:
            if not self._receive(stranger):
                return
            assert stranger.payload is not None
            segment = self._segment(stranger)
            # Not earlier: a stranger must not fill more memory than the kernel's default buffers.
            tune(stranger.sock, SOCKET_BUFFER)
            try:
                admitted = self._check(stranger.payload)
                self._forget(stranger)
                self._deliver(Guest(stranger.sock, stranger.peer, admitted, segment))
            except BaseException:
                if segment is not None:
                    segment.close()
                raise
            self.welcomed += 1
        except Exception as e:
            self._fail(stranger, e)

    def _receive(self, stranger: _Stranger) -> bool:
        """Receive bytes of the hello. Returns whether the hello is complete."""
        sock = stranger.sock
        try:
            if stranger.handshaking:
                assert isinstance(sock, ssl.SSLSocket)
                sock.do_handshake()
                stranger.handshaking = False
            while True:
                into = stranger.header if stranger.payload is None else stranger.payload
                if stranger.got < len(into):
                    n = self._receive_some(stranger, memoryview(into)[stranger.got :])
                    if not n:
                        raise _ClosedEarly
                    stranger.got += n
                elif stranger.payload is not None:
                    return True
                else:
                    stranger.payload, stranger.got = bytearray(self._length(stranger.header)), 0
        except (BlockingIOError, ssl.SSLWantReadError):
            self._watch(stranger, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(stranger, selectors.EVENT_WRITE)
        return False

    def _receive_some(self, stranger: _Stranger, into: memoryview) -> int:
        """Receive bytes of a hello, and the descriptor that may come with them. Returns the number of bytes.

        Raises:
            ProtocolError: several descriptors came.
        """
        if stranger.sock.family != socket.AF_UNIX:
            return stranger.sock.recv_into(into)
        n, descriptors = receive_with_descriptors(stranger.sock, into)
        for descriptor in descriptors:
            self._may_accept -= 1
            if stranger.descriptor is None:
                stranger.descriptor = descriptor
            else:
                os.close(descriptor)
                raise ProtocolError("several file descriptors came with the hello; send one, of shared memory")
        return n

    def _segment(self, stranger: _Stranger) -> Segment | None:
        """The memory that a stranger shares; None: it offers none, or this process shares no more.

        Raises:
            SegmentError: the memory cannot be shared.
        """
        descriptor, most = stranger.descriptor, self.limits.segment
        if descriptor is None or most < LEAST:
            return None
        self._segments = [segment for segment in self._segments if segment.descriptor >= 0]
        shared = sum([segment.nbytes for segment in self._segments])
        if shared + most > self.limits.segments:
            log.info("%s shares no memory, because other clients share %d bytes", stranger.peer, shared)
            return None
        stranger.descriptor = None
        segment = accepted(descriptor, most)
        self._segments.append(segment)
        return segment

    def _length(self, header: bytearray) -> int:
        """Length of a hello's payload, in bytes.

        Raises:
            ProtocolError: the header is not that of a hello.
        """
        length, kind, flags, seq = parse_header(header)
        if kind != self._hello:
            raise ProtocolError("the first frame must be HELLO")
        if flags:
            raise ProtocolError(f"reserved header bits are set in the hello (flags {flags:#x})")
        if seq != 1:
            raise ProtocolError(f"received frame {seq}, but expected frame 1")
        if length > MAX_HELLO:
            raise ProtocolError(f"the HELLO frame has {length} bytes; the limit is {MAX_HELLO}")
        return length

    def _fail(self, stranger: _Stranger, error: Exception) -> None:
        """Close a stranger because of an error."""
        code = getattr(error, "code", None)
        if isinstance(error, _ClosedEarly):
            self._end(stranger)
        elif isinstance(code, str):
            self._refuse(stranger, code, str(error))
        elif isinstance(error, OSError) and stranger.handshaking:
            self._refuse(stranger, "", f"TLS handshake failed: {error}")
        elif isinstance(error, OSError):
            self._refuse(stranger, "", f"the connection broke: {error}")
        else:
            log.debug("the check of a hello failed with an unexpected error", exc_info=error)
            self._refuse(stranger, "channel.hello", f"the check of the hello failed: {type(error).__name__}: {error}")

    def _evict(self, why: str, group: str = "") -> None:
        """Close the oldest stranger of `group`. Without a group, take the group with the most strangers."""
        of = self._groups[group] if group else max(self._groups.values(), key=len)
        self._refuse(next(iter(of)), "channel.busy", f"{why}; this one is the oldest, so it was closed")

    def _refuse(self, stranger: _Stranger, code: str, why: str) -> None:
        """Close a stranger. If there is a code and no handshake is in progress, try once to send the reason."""
        self._log.warning(f"refused the connection of {stranger.peer}: {why}")
        if code and not stranger.handshaking:
            with contextlib.suppress(OSError, ValueError):
                kind, payload = self._refusal(code, why)
                stranger.sock.send(HEADER.pack(len(payload), kind, 0, 0, 1) + payload)
        self._end(stranger)

    def _end(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        """Remove a connection from the strangers, and close its descriptor. A second call does nothing."""
        if stranger.descriptor is not None:
            os.close(stranger.descriptor)
            stranger.descriptor = None
        if stranger.interest:
            stranger.interest = 0
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._selector.unregister(stranger.sock)
        self._strangers.pop(stranger, None)
        of = self._groups.get(stranger.group)
        if of is not None:
            of.pop(stranger, None)
            if not of:
                del self._groups[stranger.group]


def _unix_listener(path: Path) -> socket.socket:
    """Create a listening unix socket. Its path appears only when clients can connect to it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f".{secrets.token_hex(3)}")
    try:
        with unix_address(new) as address:
            sock.bind(address)
        new.chmod(0o600)
        sock.listen(BACKLOG)
        new.rename(path)
    except OSError:
        sock.close()
        new.unlink(missing_ok=True)
        raise
    return sock
