"""Where strangers come in: accepts connections, shakes hands, reads one hello, has it checked, and hands over whoever may enter.

All of this runs in a thread of its own, so that the thread which serves sessions never waits for a stranger. A stranger is a
connection whose hello was not accepted yet. Strangers are limited in number, in all and per peer; each has one deadline for
handshake and hello together. Where there is no place for a new one, the peer with the most strangers loses its oldest: a client
that says hello at once gets in, also while somebody else opens connections as fast as possible.
"""

from __future__ import annotations

import contextlib
import errno
import logging
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
from wooly_bus.limited_log import LimitedLog
from wooly_bus.supervision import start_thread

log = logging.getLogger("wooly.channel")

#: Bytes of a hello: a signed token takes half a kilobyte.
MAX_HELLO = 64 << 10
#: Connections that the kernel keeps for us until they are accepted.
BACKLOG = 1024
#: Connections accepted before the strangers that are there get their turn again.
ACCEPTS_PER_TURN = 16
#: Connections accepted before the free descriptors are counted anew: counting takes as long as accepting several.
RECOUNT_AFTER = 32
#: Seconds for which nobody is accepted when no descriptor is free: connections wait in the kernel's backlog meanwhile.
PAUSE_S = 0.1
#: What `accept` says of a single connection, which is gone already. Any other error would come again at once.
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
    """What connections may take that have not shown a valid hello.

    Attributes:
        total: such connections at a time, in all.
        per_peer: of one network address, one unix socket, or one tenant's tunnels.
        hello_s: seconds from the accepted connection to the last byte of its hello, TLS handshake included.
        spare_descriptors: descriptors of the process that strangers never take: sessions need them for files and tunnels.
    """

    total: int = 256
    per_peer: int = 64
    hello_s: float = 10.0
    spare_descriptors: int = 64


@dataclass(frozen=True, slots=True)
class Guest:
    """A connection whose hello was accepted: frame 1 of the peer is read, nothing else, and nothing was answered.

    Attributes:
        sock: non-blocking.
        peer: where it came from, for messages.
        admitted: what the check of the hello returned.
    """

    sock: socket.socket
    peer: str
    admitted: Any


@dataclass(frozen=True, slots=True)
class _Listener:
    sock: socket.socket
    endpoint: Endpoint
    tls: ssl.SSLContext | None


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection, and how far its hello has come. `group`: whose limit it counts against."""

    sock: socket.socket
    peer: str
    group: str
    until: float
    handshaking: bool
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    payload: bytearray | None = None
    got: int = 0
    interest: int = 0


class _Gone(Exception):
    """A stranger went before it said anything: a port scan, a health check. Nobody needs to read of it."""


class Acceptor:
    """Owns the listeners and all strangers, from `start` to `close` in a thread of its own.

    Args:
        check: gets the payload of a hello, in the acceptor's thread; returns what the guest's session needs to know of it.
            Raises a `ProtocolError`, or another error with a `code`, whose words the stranger is told.
        refusal: makes the kind and the payload of the frame that tells a stranger why it may not enter, of a code and words.
        deliver: takes guests, in the acceptor's thread: `ChannelServer.enter`.
        hello: the kind of the first frame.
        limits: of strangers.
        clock: monotonic seconds.

    Attributes:
        limits: as given.
        turns: turns of the loop so far.
        accepted: connections accepted so far.
        welcomed: guests handed over so far.
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
        self._log = LimitedLog(log, "connections were turned away", clock=clock)
        self._selector = selectors.DefaultSelector()
        self._listeners: list[_Listener] = []
        self._strangers: dict[_Stranger, None] = {}  # by age: all have the same time
        self._groups: dict[str, dict[_Stranger, None]] = {}
        self._adopted: deque[tuple[socket.socket, str, str]] = deque()
        self._may_accept = 0
        self._paused_until: float | None = None
        self._lock = threading.Lock()  # of `_closing`, against `adopt`
        self._closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None

    # -- from other threads ------------------------------------------------------------------------------------------

    def listen(self, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> Endpoint:
        """Listen there; before `start`. Returns the endpoint with the port that was really taken.

        Raises:
            ChannelError: the address cannot be used.
        """
        try:
            if endpoint.scheme == "unix":
                sock, bound = _unix_listener(Path(endpoint.path)), endpoint
            elif endpoint.scheme in ("tcp", "tls"):
                if endpoint.scheme == "tls" and tls is None:
                    raise ChannelError(f"{endpoint}: a TLS context is needed")
                sock = socket.create_server((endpoint.host, endpoint.port))
                bound = Endpoint(endpoint.scheme, endpoint.host, sock.getsockname()[1])
            else:
                raise ChannelError(f"{endpoint}: cannot listen on this scheme")
        except OSError as e:
            raise ChannelError(f"cannot listen on {endpoint}: {e}") from e
        sock.listen(BACKLOG)
        sock.setblocking(False)
        listener = _Listener(sock, bound, tls if endpoint.scheme == "tls" else None)
        self._listeners.append(listener)
        self._selector.register(sock, selectors.EVENT_READ, listener)
        return bound

    def adopt(self, sock: socket.socket, peer: str, group: str = "") -> None:
        """Take in a socket that was connected elsewhere, as if it had come through a listener.

        Args:
            sock: a connected stream socket.
            peer: its name, for messages.
            group: whose limit of strangers it counts against; empty: `peer`'s own.
        """
        with self._lock:
            if not self._closing:
                self._adopted.append((sock, peer, group or peer))
                self._wake()
                return
        sock.close()

    def start(self) -> None:
        """Begin to accept."""
        self._thread = start_thread(self._run, "acceptor")

    def close(self) -> None:
        """Close the listeners and all strangers; guests that were handed over are not touched. Twice is once."""
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
        with contextlib.suppress(OSError):  # full of wake-ups, or closed
            self._wake_in.send(b"\0")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Accept until `close`. An unexpected error ends the process, which nobody could enter any more."""
        try:
            while not self._closing:
                self._turn()
        finally:
            with self._lock:
                self._closing = True
            self._release()

    def _turn(self) -> None:
        """Wait until something is to do, and do it: for the strangers that are there first, so that they make place."""
        self.turns += 1
        knocking = []
        for key, _ in self._selector.select(self._timeout()):
            if key.data is None:
                self._drain_wakes()
            elif isinstance(key.data, _Listener):
                knocking.append(key.data)
            elif key.data in self._strangers:
                self._advance(key.data)
        while self._adopted:
            self._take_in(*self._adopted.popleft(), None)
        for listener in knocking:
            self._accept(listener)
        now = self._clock()
        while self._strangers and (oldest := next(iter(self._strangers))).until <= now:
            self._refuse(oldest, "channel.timeout", f"no valid hello within {self.limits.hello_s:g} s")
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
                self._pause("no descriptor is free")
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
        """Whether there is a descriptor for a stranger. Strangers that are there give theirs back where sessions need them."""
        if self._may_accept > 0:
            self._may_accept -= 1
            return True
        short = self.limits.spare_descriptors + 1 - free_descriptors()
        while short > 0 and self._strangers:
            self._evict("this process has no descriptor for it")
            short -= 1
        self._may_accept = min(-short, RECOUNT_AFTER)
        return short <= 0

    def _pause(self, why: str) -> None:
        """Accept nobody for a while."""
        self._may_accept = 0
        self._paused_until = self._clock() + PAUSE_S
        for listener in self._listeners:
            self._selector.unregister(listener.sock)
        self._log.warning(
            f"new connections wait: {why} ({self.limits.spare_descriptors} are kept for sessions; `ulimit -n` raises the limit)"
        )

    def _take_in(self, sock: socket.socket, peer: str, group: str, tls: ssl.SSLContext | None) -> None:
        same = self._groups.get(group, {})
        if len(same) >= self.limits.per_peer:
            self._evict(f"{self.limits.per_peer} connections of {group} wait to be welcomed, no more may", group)
        elif len(self._strangers) >= self.limits.total:
            self._evict(f"{self.limits.total} connections wait to be welcomed here, no more may")
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
        """Take in what has come of a stranger's hello. Whatever goes wrong is that stranger's end alone."""
        try:
            if not self._receive(stranger):
                return
            assert stranger.payload is not None
            tune(
                stranger.sock, SOCKET_BUFFER
            )  # only now: a stranger fills no more memory than the kernel's defaults allow
            admitted = self._check(stranger.payload)
            self._forget(stranger)
            self._deliver(Guest(stranger.sock, stranger.peer, admitted))
            self.welcomed += 1
        except Exception as e:
            self._fail(stranger, e)

    def _receive(self, stranger: _Stranger) -> bool:
        """Whether all of the hello is there."""
        sock = stranger.sock
        try:
            if stranger.handshaking:
                assert isinstance(sock, ssl.SSLSocket)
                sock.do_handshake()
                stranger.handshaking = False
            while True:
                into = stranger.header if stranger.payload is None else stranger.payload
                if stranger.got < len(into):
                    n = sock.recv_into(memoryview(into)[stranger.got :])
                    if not n:
                        raise _Gone
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

    def _length(self, header: bytearray) -> int:
        """Bytes of a hello's payload.

        Raises:
            ProtocolError: this is no hello.
        """
        length, kind, _, seq = parse_header(header)
        if kind != self._hello:
            raise ProtocolError("the first frame must be HELLO")
        if seq != 1:
            raise ProtocolError(f"frame {seq} came where 1 was due")
        if length > MAX_HELLO:
            raise ProtocolError(f"HELLO of {length} bytes, at most {MAX_HELLO}")
        return length

    def _fail(self, stranger: _Stranger, error: Exception) -> None:
        """End a stranger because of an error."""
        code = getattr(error, "code", None)
        if isinstance(error, _Gone):
            self._end(stranger)
        elif isinstance(code, str):
            self._refuse(stranger, code, str(error))
        elif isinstance(error, OSError) and stranger.handshaking:
            self._refuse(stranger, "", f"TLS handshake failed: {error}")
        elif isinstance(error, OSError):
            self._refuse(stranger, "", f"the connection broke: {error}")
        else:
            log.debug("a hello failed", exc_info=error)
            self._refuse(stranger, "channel.hello", f"its hello failed: {type(error).__name__}: {error}")

    def _evict(self, why: str, group: str = "") -> None:
        """End the oldest stranger of a group, or of that with the most."""
        of = self._groups[group] if group else max(self._groups.values(), key=len)
        self._refuse(next(iter(of)), "channel.busy", f"{why}, and this one is the oldest")

    def _refuse(self, stranger: _Stranger, code: str, why: str) -> None:
        """End a stranger. It is told why, where it can be and there is a code to tell; once, if it reads it."""
        self._log.warning(f"{stranger.peer} is turned away: {why}")
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
        """It is no stranger any more. Twice is once."""
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
    """A socket that listens at a path, which is there only once a client can connect to it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = path.with_name(f".{secrets.token_hex(3)}")
    try:
        sock.bind(str(new))
        new.chmod(0o600)
        sock.listen(BACKLOG)
        new.rename(path)
    except OSError:
        sock.close()
        new.unlink(missing_ok=True)
        raise
    return sock
