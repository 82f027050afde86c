"""The HTTP listener of every service: uvicorn behind an accept loop of ours that bounds what connections may take.

A connection is a stranger's until a request on it showed a valid token (`Connection.let_in`, called by `http_front`). Where the
table of connections is full, the newest connection comes in and the stranger who has waited longest goes: whoever holds a token
shows it at once, so a flood of idle connections shuts nobody out. TLS handshakes, heads, bodies and answers have deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from uvicorn.protocols.http.h11_impl import H11Protocol

from wooly_bus.errors import RefusedError

log = logging.getLogger("wooly.http")
#: Descriptors of the process that connections never take: database, NATS, files, and the next accepted connection.
DESCRIPTOR_RESERVE = 128
#: Connections that tenants leave to operators and administrators.
OPERATOR_RESERVE = 64
#: Connections that are closed where the table of descriptors is full; where there was none to close, seconds without an accept:
#: the listener stays readable, and must not spin.
FULL_SHED, FULL_PAUSE_S = 16, 0.1
#: Bytes and seconds for which the rest of a refused request's body is read and dropped: a client that is still sending when its
#: connection is closed never sees the answer.
DISCARD_BYTES, DISCARD_S = 4 << 20, 2.0
#: Bytes a second below which a body is too slow, once `body_s` is over.
SLOWEST_BYTES_S = 64 << 10
#: Bytes of a request's head.
HEAD_BYTES = 32 << 10
#: Ticks of uvicorn's main loop (0.1 s each) between two looks for connections that are late.
LOOK_TICKS = 3
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpSettings(BaseSettings):
    """What a connection to any HTTP port may take; from WOOLY_HTTP_* variables, for every service that serves HTTP.

    Attributes:
        body_bytes: bytes of a request's body, where its route has no smaller limit; blobs have a limit of their own.
        header_s: seconds for a TLS handshake, and again for a request's head.
        body_s: seconds for a request's body, and one more for each 64 KiB of it; and for which an answer may stand still because
            its reader does not read.
        idle_s: seconds that a connection is kept without a request.
        connections: connections of one process in all. Fewer where the limit of open files leaves fewer: 128 files are
            kept free.
        peer_connections: connections of one address on which no valid token was shown. The next one ends the oldest of them.
        tenant_connections: connections of one tenant at a time on one process; event streams are among them.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_HTTP_", env_ignore_empty=True)

    body_bytes: int = Field(default=1 << 20, ge=1024)
    header_s: float = Field(default=10.0, gt=0)
    body_s: float = Field(default=30.0, gt=0)
    idle_s: int = Field(default=15, ge=1)
    connections: int = Field(default=1024, ge=2 * OPERATOR_RESERVE)
    peer_connections: int = Field(default=256, ge=1)
    tenant_connections: int = Field(default=64, ge=1)

    def room(self) -> int:
        """Connections that the process has descriptors for."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return self.connections
        return max(min(self.connections, limit - DESCRIPTOR_RESERVE), 2)


class Connection:
    """One connection, from its accept on.

    Attributes:
        peer: its address; empty: a unix socket.
        tenant: whose token was shown on it; None: nobody's, or an operator's.
        known: whether a valid token was shown on it.
        busy: whether a request on it is being answered.
    """

    def __init__(self, table: Table, peer: str, sock: socket.socket) -> None:
        self._table, self._sock = table, sock
        self.peer = peer
        self.tenant: str | None = None
        self.known = self.busy = False
        self.beginning: asyncio.Task[Any] | None = None
        self.protocol: _Protocol | None = None

    def let_in(self, tenant: str | None) -> None:
        """A request on it showed a valid token: a tenant's, or (None) that of somebody who sees all tenants.

        Raises:
            RefusedError: the tenant has too many connections, or all tenants have.
        """
        if self.known and self.tenant == tenant:
            return
        self._table.let_in(self, tenant)

    def close(self) -> None:
        """End it at once, whatever it is doing."""
        self._table.leave(self)
        if self.protocol is not None and self.protocol.transport is not None:
            self.protocol.transport.abort()
        elif self.beginning is not None:
            self.beginning.cancel()  # asyncio closes what it has made of the socket

    def begun(self, _: object) -> None:
        """It is uvicorn's now, or came to nothing: the socket is closed where nobody else would."""
        if self.protocol is None:
            self._sock.close()
        if self.protocol is None or self.protocol.transport is None:
            self._table.leave(self)


class Table:
    """All connections of a process, oldest first, and their limits."""

    def __init__(self, settings: HttpSettings, service: str) -> None:
        self._settings, self._service = settings, service
        self._room = settings.room()
        self._all: dict[Connection, None] = {}
        self._strangers: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all))

    def admit(self, peer: str, sock: socket.socket) -> Connection | None:
        """A new connection. None, and it is not there, if all others are those of callers who are being answered."""
        if self._strangers[peer] >= self._settings.peer_connections:
            self.shed(peer)
        if len(self._all) >= self._room and not self.shed():
            return None
        connection = Connection(self, peer, sock)
        self._all[connection] = None
        self._strangers[peer] += 1
        return connection

    def let_in(self, connection: Connection, tenant: str | None) -> None:
        """See `Connection.let_in`."""
        if tenant is not None:
            held, limit = self._tenants[tenant], self._settings.tenant_connections
            if held >= limit:
                raise self._refusal(
                    f"tenant {tenant} has {held} connections to this service, and may have {limit} "
                    "(WOOLY_HTTP_TENANT_CONNECTIONS); close one"
                )
            held, limit = self._tenants.total(), max(self._room - OPERATOR_RESERVE, 1)
            if held >= limit:
                raise self._refusal(f"all tenants have {held} connections to this service, and may have {limit}")
        self._uncount(connection)
        connection.known, connection.tenant = True, tenant
        if tenant is not None:
            self._tenants[tenant] += 1

    def _refusal(self, message: str) -> RefusedError:
        return RefusedError(f"{self._service}.limit", message, retryable=True)

    def leave(self, connection: Connection) -> None:
        """It is over. Twice is no error."""
        if connection in self._all:
            del self._all[connection]
            self._uncount(connection)

    def _uncount(self, connection: Connection) -> None:
        counter, name = (self._tenants, connection.tenant) if connection.known else (self._strangers, connection.peer)
        if name is None:
            return
        counter[name] -= 1
        if not counter[name]:
            del counter[name]

    def shed(self, peer: str | None = None) -> bool:
        """End the connection that is missed least: a stranger's that waits, a stranger's, one that idles. False if there is none.

        Args:
            peer: look at the strangers of this address alone.
        """
        if peer is None and self._strangers:
            peer, _ = self._strangers.most_common(1)[0]
        strangers = [c for c in self._all if not c.known and c.peer == peer]
        idle = [c for c in self._all if c.known and not c.busy]
        victim = next((c for c in strangers if not c.busy), None) or next(iter(strangers or idle), None)
        if victim is None:
            return False
        victim.close()
        return True


class _Protocol(H11Protocol):
    """uvicorn's, which knows its connection and since when it waits for its peer."""

    def __init__(self, connection: Connection, settings: HttpSettings, **given: Any) -> None:
        super().__init__(**given)
        self._connection, self._settings = connection, settings
        self._app, self.app = self.app, self._serve
        self._now = time.monotonic
        #: Which part of a request is awaited, since when, and how much of it has come.
        self._part, self._since, self._bytes = "head", self._now(), 0
        self._stuck: float | None = None
        connection.protocol = self

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["connection"] = self._connection
        self._connection.busy = True
        try:
            await self._app(scope, receive, send)
        finally:
            self._connection.busy = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.busy = False
        self._connection._table.leave(self._connection)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._part:
            self._await("head")
        self._bytes += len(data)
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        self._part = ""
        super().on_response_complete()
        self._note(idle=True)

    def _note(self, *, idle: bool = False) -> None:
        """Which part is awaited now. A connection that idles awaits none: uvicorn closes it after `idle_s`."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            answered = self.cycle is not None and self.cycle.response_complete
            self._await("rest" if answered else "body")
            if answered and self._bytes > DISCARD_BYTES:
                self._connection.close()
        elif state is not h11.IDLE or idle:
            self._part = ""

    def _await(self, part: str) -> None:
        if part != self._part:
            self._part, self._since, self._bytes = part, self._now(), 0

    def pause_writing(self) -> None:
        self._stuck = self._now()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    def late(self, now: float) -> str:
        """What its peer has not done in time; empty: nothing."""
        limits = self._settings
        if self._stuck is not None and now - self._stuck > limits.body_s:
            return f"read nothing of an answer for {limits.body_s:g} s"
        if self.flow is not None and self.flow.read_paused:  # we do not read: the time is ours
            self._since = now
        allowed = {
            "head": limits.header_s,
            "body": limits.body_s + self._bytes / SLOWEST_BYTES_S,
            "rest": DISCARD_S,
        }.get(self._part)
        if allowed is not None and now - self._since > allowed:
            return f"sent no whole {self._part} of a request within {allowed:.0f} s"
        return ""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (signals belong to `until_signalled`), behind an accept loop with limits.

    Args:
        app: what answers; `http_front.Front` is to be in it.
        service: whose codes refusals have.
        tls: what it shows; None: it is not encrypted.
        settings: limits.

    Attributes:
        closing: called as it ends, to end what would not end by itself.
        table: its connections.
    """

    def __init__(
        self, app: Any, service: str, *, tls: ssl.SSLContext | None = None, settings: HttpSettings | None = None
    ) -> None:
        self.limits = settings or HttpSettings()
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                interface="asgi3",
                lifespan="off",
                http=_Protocol,
                ws="none",
                # Whoever is on this machine could say to be from any address, unless somebody names the proxies.
                proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
                timeout_keep_alive=self.limits.idle_s,
                h11_max_incomplete_event_size=HEAD_BYTES,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a stranger's bad request is no warning of ours
        self.table = Table(self.limits, service)
        self.closing: Callable[[], None] = lambda: None
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None of uvicorn's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on these sockets."""
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end. An accept loop that failed ends the server, too."""
        for task in self._accepting:
            if task.done():
                task.result()
        if counter % LOOK_TICKS == 0:
            self._close_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and let what is being answered end."""
        for task in self._accepting:
            task.cancel()
        for connection in self.table:
            if connection.protocol is None:
                connection.close()
        self.closing()
        await super().shutdown(sockets)

    def _close_late(self) -> None:
        now = time.monotonic()
        for connection in self.table:
            late = connection.protocol.late(now) if connection.protocol is not None else ""
            if late:
                log.info("a connection from %s is closed: it %s", connection.peer or "a unix socket", late)
                connection.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # With no descriptor left Linux fails an accept even if no connection waits, and one would be closed for nothing.
            await _readable(listener)
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as e:
                if e.errno in _FULL:
                    count = sum([self.table.shed() for _ in range(FULL_SHED)])
                    log.warning(
                        "no connection can be accepted: %s; %d without a token or request were closed", e, count
                    )
                    await asyncio.sleep(0 if count else FULL_PAUSE_S)  # closed sockets end their descriptors meanwhile
                    continue
                if e.errno in (errno.EBADF, errno.EINVAL):
                    raise
                continue  # that one was reset before we took it
            connection = self.table.admit(str(address[0]) if isinstance(address, tuple) else "", sock)
            if connection is None:
                sock.close()
                continue
            connection.beginning = asyncio.create_task(self._begin(connection, sock))
            connection.beginning.add_done_callback(connection.begun)

    async def _begin(self, connection: Connection, sock: socket.socket) -> None:
        """Shake hands, where there is TLS, and hand the connection to uvicorn."""

        def protocol() -> _Protocol:
            return _Protocol(connection, self.limits, config=self.config, server_state=self.server_state, app_state={})

        timeout = self.limits.header_s if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except (OSError, TimeoutError) as e:  # ssl.SSLError is an OSError
            log.info("a connection from %s is closed: %s", connection.peer or "a unix socket", e)


async def _readable(listener: socket.socket) -> None:
    """Wait until a connection can be accepted."""
    loop = asyncio.get_running_loop()
    there: asyncio.Future[None] = loop.create_future()

    def found() -> None:
        if not there.done():
            there.set_result(None)

    loop.add_reader(listener, found)
    try:
        await there
    finally:
        loop.remove_reader(listener)
