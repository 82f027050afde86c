"""The HTTP listener of every service: uvicorn behind Wooly's own accept loop, which limits connections.

A connection is a stranger until a request on it had a valid token (`Connection.let_in`, called by `http_front`). If the table of
connections is full, the listener closes the oldest stranger and accepts the new connection. A client with a token sends it at
once, so a flood of idle connections cannot block it. TLS handshakes, heads, bodies and answers have deadlines.
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
from wooly_bus.limited_log import LimitedLog

log = logging.getLogger("wooly.http")
#: Descriptors of the process that are reserved for the database, NATS, files, and the next accepted connection.
DESCRIPTOR_RESERVE = 128
#: Connections that are reserved for operators and administrators.
OPERATOR_RESERVE = 64
#: If the process has no free descriptor: the number of connections to close. If there was no connection to close: the pause in
#: seconds, because the listener stays readable, and the loop must not spin.
FULL_SHED, FULL_PAUSE_S = 16, 0.1
#: Limits, in bytes and seconds, on reading and dropping the rest of a refused request's body. Without reading it, a client that
#: is still sending when its connection is closed never sees the answer.
DISCARD_BYTES, DISCARD_S = 4 << 20, 2.0
#: Minimum rate of a body in bytes per second, after `body_s`.
SLOWEST_BYTES_S = 64 << 10
#: Largest head of a request, in bytes.
HEAD_BYTES = 32 << 10
#: Ticks of uvicorn's main loop (0.1 s each) between two checks of deadlines.
LOOK_TICKS = 3
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpSettings(BaseSettings):
    """Limits of connections to any HTTP port; from WOOLY_HTTP_* variables, for every service that serves HTTP.

    Attributes:
        body_bytes: largest body of a request, in bytes, unless the route has a smaller limit; blobs have their own limit.
        header_s: deadline in seconds for a TLS handshake, and for the head of a request.
        body_s: deadline in seconds for the body of a request, plus one second for each 64 KiB of it. Also the longest time for
            which a client may not read an answer.
        idle_s: seconds after which a connection without a request is closed.
        connections: largest number of connections of one process. The limit of open files may lower it: 128 files are
            reserved.
        peer_connections: largest number of connections of one address without a valid token. A further connection closes the
            oldest of them.
        tenant_connections: largest number of connections of one tenant to one process, including event streams.
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
        """Largest number of connections, considering the limit of open files."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return self.connections
        return max(min(self.connections, limit - DESCRIPTOR_RESERVE), 2)


class Connection:
    """One accepted connection.

    Attributes:
        peer: address of the client; empty for a unix socket.
        tenant: the tenant whose token a request had; None: no tenant, or an operator.
        known: whether a request had a valid token.
        busy: whether a request is being answered.
    """

    def __init__(self, table: Table, peer: str, sock: socket.socket) -> None:
        self._table, self._sock = table, sock
        self.peer = peer
        self.tenant: str | None = None
        self.known = self.busy = False
        self.beginning: asyncio.Task[Any] | None = None
        self.protocol: _Protocol | None = None

    def let_in(self, tenant: str | None) -> None:
        """Record that a request on this connection had a valid token.

        Args:
            tenant: the tenant of the token; None: the token permits access to all tenants.

        Raises:
            RefusedError: the tenant has too many connections, or all tenants together have.
        """
        if self.known and self.tenant == tenant:
            return
        self._table.let_in(self, tenant)

    def close(self) -> None:
        """Close the connection at once, even during a request."""
        self._table.leave(self)
        if self.protocol is not None and self.protocol.transport is not None:
            self.protocol.transport.abort()
        elif self.beginning is not None:
            self.beginning.cancel()  # asyncio closes its transport and the socket

    def begun(self, _: object) -> None:
        """Called when uvicorn has the connection, or the handshake failed. In the latter case, close the socket."""
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
        """Add a new connection. Return None if the table is full and every connection in it has a token and a request."""
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
                    f"tenant {tenant} has {held} connections to this service; the limit is {limit} "
                    "(WOOLY_HTTP_TENANT_CONNECTIONS); close one and try again"
                )
            held, limit = self._tenants.total(), max(self._room - OPERATOR_RESERVE, 1)
            if held >= limit:
                raise self._refusal(
                    f"all tenants together have {held} connections to this service; the limit is {limit}, from "
                    "WOOLY_HTTP_CONNECTIONS and the limit of open files; try again later"
                )
        self._uncount(connection)
        connection.known, connection.tenant = True, tenant
        if tenant is not None:
            self._tenants[tenant] += 1

    def _refusal(self, message: str) -> RefusedError:
        return RefusedError(f"{self._service}.limit", message, retryable=True)

    def leave(self, connection: Connection) -> None:
        """Remove a connection that ended. A second call does nothing."""
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
        """Close a victim: a waiting stranger, else any stranger, else an idle connection. Returns False if there is none.

        Args:
            peer: consider only the strangers of this address.
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
    """uvicorn's protocol for h11, with deadlines for the client."""

    def __init__(self, connection: Connection, settings: HttpSettings, **given: Any) -> None:
        super().__init__(**given)
        self._connection, self._settings = connection, settings
        self._app, self.app = self.app, self._serve
        self._now = time.monotonic
        #: The part of a request that is awaited, since when, and the bytes received of it.
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
        """Update the awaited part. An idle connection awaits no part: uvicorn closes it after `idle_s`."""
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
        """The deadline that the client missed, in words; empty if it missed none."""
        limits = self._settings
        if self._stuck is not None and now - self._stuck > limits.body_s:
            return f"did not read the answer for {limits.body_s:g} s"
        if self.flow is not None and self.flow.read_paused:  # we have paused reading, so the time does not count
            self._since = now
        allowed = {
            "head": limits.header_s,
            "body": limits.body_s + self._bytes / SLOWEST_BYTES_S,
            "rest": DISCARD_S,
        }.get(self._part)
        if allowed is not None and now - self._since > allowed:
            return f"did not send the complete {self._part} of a request within {allowed:.0f} s"
        return ""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (signals belong to `until_signalled`), behind an accept loop with limits.

    Args:
        app: the ASGI application; it must contain `http_front.Front`.
        service: the service; prefix of the codes of refusals.
        tls: the TLS context; None: serve without encryption.
        settings: limits of connections.

    Attributes:
        closing: called at shutdown, to end requests that do not end by themselves, such as event streams.
        table: all connections.
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
                # Without a list of trusted proxies, any process on this machine could claim any client address.
                proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
                timeout_keep_alive=self.limits.idle_s,
                h11_max_incomplete_event_size=HEAD_BYTES,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a bad request of a client needs no warning
        self.table = Table(self.limits, service)
        self.closing: Callable[[], None] = lambda: None
        self._tls = tls
        self._accepting: list[asyncio.Task[None]] = []
        self._full_log = LimitedLog(log, "attempts to accept connections failed", lines=1)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit` is set, or until cancelled. Afterwards, nothing waits for these sockets any more."""
        try:
            await super().serve(sockets)
        finally:
            await self._stop_accepting()

    async def _stop_accepting(self) -> None:
        """End the accept loops, before their sockets are closed and other sockets get their numbers."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on these sockets."""
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._accepting.append(asyncio.create_task(self._accept(listener)))
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: returns whether to end the server. Raises the error of an accept loop that failed."""
        for task in self._accepting:
            if task.done():
                task.result()
        if counter % LOOK_TICKS == 0:
            self._close_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and wait for the requests that are being answered."""
        await self._stop_accepting()
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
                log.info("closed a connection from %s: the client %s", connection.peer or "a unix socket", late)
                connection.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Without a free descriptor, Linux fails an accept even if no connection waits; then a victim would be closed
            # needlessly.
            await _readable(listener)
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as e:
                if e.errno in _FULL:
                    count = sum([self.table.shed() for _ in range(FULL_SHED)])
                    self._full_log.warning(
                        f"cannot accept connections: {e}; closed {count} connections without a token or request; raise "
                        "`ulimit -n`"
                    )
                    await asyncio.sleep(
                        0 if count else FULL_PAUSE_S
                    )  # meanwhile, the descriptors of the closed sockets become free
                    continue
                if e.errno in (errno.EBADF, errno.EINVAL):
                    raise
                continue  # the connection was reset before it was accepted
            connection = self.table.admit(str(address[0]) if isinstance(address, tuple) else "", sock)
            if connection is None:
                sock.close()
                continue
            connection.beginning = asyncio.create_task(self._begin(connection, sock))
            connection.beginning.add_done_callback(connection.begun)

    async def _begin(self, connection: Connection, sock: socket.socket) -> None:
        """Do the TLS handshake, if any, and pass the connection to uvicorn."""

        def protocol() -> _Protocol:
            return _Protocol(connection, self.limits, config=self.config, server_state=self.server_state, app_state={})

        timeout = self.limits.header_s if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, sock, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except (OSError, TimeoutError) as e:  # ssl.SSLError is an OSError
            log.info("closed a connection from %s: %s", connection.peer or "a unix socket", e)


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
