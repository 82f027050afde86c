"""A byte stream through NATS, for a data channel where no route exists. It knows bytes only: no frames, no sessions.

Each end joins its inbox to a socket pair. The near socket goes to the ordinary `ChannelClient` or `Acceptor`, so that
framing and everything above are the same as on any other transport; the far one is pumped by a `_Tunnel`.

A message is ``<8sBQ`` = key of the tunnel, kind, number; then data:

| kind | number | data |
|---|---|---|
| 1 DATA | 1, 2, 3, … | bytes of the stream |
| 2 CREDIT | bytes that left the receiver's hands so far; at most `window` more may be sent | none |
| 3 BEAT | DATA messages sent so far; once a second | none |
| 4 END | DATA messages sent so far | why, in words; nothing where the stream just ended |

Whatever does not carry the key comes from somebody else and is dropped. NATS keeps one sender's order, so a number that does not
fit means that messages were lost: the tunnel ends, it does not repeat. Every end has a NATS connection of its own: what waits in
it is at most the window, far below the point at which the server gives a slow consumer up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.msg import Msg

from wooly_bus import contracts, subjects
from wooly_bus.access import Access, options
from wooly_bus.channel.endpoint import Endpoint, EndpointError, tune
from wooly_bus.channel.framing import SOCKET_BUFFER, ChannelClosedError, ChannelError, ChannelTimeoutError
from wooly_bus.channel.tls import ChannelTlsError
from wooly_bus.channel.tunnel_places import TunnelLimits, TunnelPlaces
from wooly_bus.contract_types import Rpc
from wooly_bus.envelope import decode_reply, encode
from wooly_bus.errors import BusError, BusTimeoutError, RefusedError, shown
from wooly_bus.nats_client import NatsClient
from wooly_bus.rpc import CLOSE_S, nats_errors, settled
from wooly_bus.supervision import start_errand, start_thread
from wooly_bus.tunnel_messages import OpenTunnelReply, OpenTunnelRequest

log = logging.getLogger("wooly.tunnel")

HEAD = struct.Struct("<8sBQ")
DATA, CREDIT, BEAT, END = 1, 2, 3, 4
#: Bytes that one end takes from the other before they are in its socket.
WINDOW = 8 << 20
#: Bytes per message, where the server allows so many: large enough for speed, small enough to be a sign of life on a slow line.
CHUNK = 256 << 10
BEAT_S = 1.0
#: Beats without a word from the other end after which it is dead.
SILENT_BEATS = 5
OPEN_TIMEOUT_S = 5.0
#: Seconds that closing waits until what was sent is on its way.
LINGER_S = 5.0
NATS_PORT = 4222
_NO_RESPONDERS = "503"
_REASON_LIMIT = 500
_SMALL = 16 << 10
#: How a client asks one executor for a tunnel.
OpenTunnel = Rpc[OpenTunnelRequest, OpenTunnelReply]


class _Fate:
    """Why a tunnel ended, as its near socket has to tell. Empty: in order."""

    def __init__(self) -> None:
        self.reason = ""


class TunnelSocket(socket.socket):
    """The near end of a tunnel: a stream socket whose end of stream says why, where the tunnel did not end in order."""

    def __init__(self, fileno: int, fate: _Fate, thread: threading.Thread | None = None) -> None:
        super().__init__(fileno=fileno)
        self._fate = fate
        self._thread = thread

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of any socket.

        Raises:
            ConnectionAbortedError: the tunnel broke; the words say how.
        """
        n = super().recv_into(buffer, nbytes, flags)
        if not n and self._fate.reason:
            raise ConnectionAbortedError(self._fate.reason)
        return n

    def sendmsg(self, *args: Any) -> int:
        """As of any socket.

        Raises:
            ConnectionAbortedError: the tunnel broke; the words say how.
        """
        try:
            return super().sendmsg(*args)
        except ConnectionError as e:
            if self._fate.reason:
                raise ConnectionAbortedError(self._fate.reason) from e
            raise

    def close(self) -> None:
        """Close it, and see that what was sent leaves this process."""
        with contextlib.suppress(OSError):  # not connected any more
            self.shutdown(socket.SHUT_RDWR)  # also where a forked process holds a copy
        super().close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LINGER_S)


class _Tunnel:
    """One end, in the event loop that made it."""

    def __init__(self, access: Access, key: str) -> None:
        self._access = access
        self._tenant: str | None = None
        self._key = bytes.fromhex(key)
        self._client = NatsClient()
        self._fate = _Fate()
        self._last_error = ""
        self._ends: float | None = None
        self._to = ""
        self._far: socket.socket | None = None
        self._over = asyncio.Event()
        self._wake_up = asyncio.Event()
        self._wake_down = asyncio.Event()
        self._heard = False
        self._silent_beats = 0
        # what goes out
        self._sent_chunks = 0
        self._sent_bytes = 0
        self._their_window = 0
        self._may_send = 0
        # what comes in
        self._got_chunks = 0
        self._got_bytes = 0
        self._passed_on = 0
        self._waiting: deque[memoryview | bytearray] = deque()
        self._peer_ended = False
        self.inbox = ""

    async def connect(self, timeout: float, under: str = "") -> None:
        """Connect to NATS and listen on an inbox of this tunnel's own.

        Args:
            timeout: seconds.
            under: where that inbox has to be; without, where our credentials have theirs.

        Raises:
            ChannelError: no server answers.
            CredentialsError: there are no credentials to show.
        """
        held = None if self._access.credentials is None else self._access.credentials()
        self._tenant = None if held is None else held.tenant
        self._ends = None if held is None else held.expires_at
        try:
            async with asyncio.timeout(timeout):
                await self._client.connect(
                    [server.strip() for server in self._access.url.split(",")],
                    name="wooly-tunnel",
                    allow_reconnect=False,  # what was under way is lost: the stream could not go on
                    connect_timeout=max(1, int(timeout)),
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # it sleeps so long; annotated int
                    pending_size=4
                    * WINDOW,  # never reached; nats-py would wait, and give up, in the middle of a publish
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    **options(held, self._access.tls()),
                )
                self.inbox = f"{under}.{secrets.token_hex(11)}" if under else self._client.new_inbox()
                await self._client.subscribe(self.inbox, cb=self._on_message)
                await settled(self._client)
        except TimeoutError as e:
            await self._disconnect(CLOSE_S)
            raise ChannelTimeoutError(f"no NATS server answers at {self._access} within {timeout:g} s") from e
        except (OSError, ValueError, nats.errors.Error) as e:
            await self._disconnect(CLOSE_S)
            if isinstance(e, ssl.SSLCertVerificationError):
                raise ChannelTlsError(
                    f"NATS at {self._access} has a certificate that is not trusted: {e.verify_message}"
                ) from e
            raise ChannelClosedError(f"no NATS server for the tunnel at {self._access}: {self._last_error or e}") from e

    async def ask(self, rpc: OpenTunnel, request: OpenTunnelRequest, timeout: float) -> OpenTunnelReply:
        """Ask for the other end.

        Raises:
            BusError: nobody answers, or refuses.
        """
        data, headers = encode(request)
        subject = rpc.subject if self._tenant is None else rpc.for_tenant(self._tenant)
        with nats_errors(str(self._access), subject, timeout):
            answer = await self._client.request(subject, data, timeout=timeout, headers=headers)
        return decode_reply(answer.data, answer.headers, rpc.reply)

    def join(self, inbox: str, window: int, thread: threading.Thread | None = None) -> TunnelSocket:
        """Bind to the other end. Returns the near socket; nothing moves before `run`."""
        self._to = inbox
        self._may_send = self._their_window = min(window, WINDOW)
        near, far = socket.socketpair()
        for sock in (near, far):
            tune(sock, SOCKET_BUFFER)
        far.setblocking(False)
        self._far = far
        return TunnelSocket(near.detach(), self._fate, thread)

    async def run(self) -> str:
        """Pump until either side ends it or it breaks. Returns why it broke, or nothing."""
        tasks = [start_errand(part(), "a tunnel") for part in (self._up, self._down, self._beat)]
        for task in tasks:
            task.add_done_callback(self._on_part_done)
        try:
            await self._over.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._see_off()
            await self.abandon()
        return self._fate.reason

    def _on_part_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fate.reason = f"the tunnel broke: {type(fault).__name__}: {fault}"
            self._over.set()

    async def _see_off(self) -> None:
        """Wait until the server has all that was said: closing at once could reset the connection and lose the end of it."""
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
            if self._client.is_connected and not self._peer_ended:
                async with asyncio.timeout(LINGER_S):
                    await settled(self._client)

    async def abandon(self) -> None:
        """Give back everything that is held."""
        if self._far is not None:
            self._far.close()
        self._waiting.clear()
        await self._disconnect()

    async def _disconnect(self, timeout: float = LINGER_S) -> None:
        # An assertion of nats-py says that there is nothing to close yet; a server that is frozen takes in nothing more.
        with contextlib.suppress(OSError, nats.errors.Error, AssertionError, TimeoutError):
            async with asyncio.timeout(timeout):
                await self._client.close()

    async def end(self, reason: str) -> None:
        """End it here and tell the other side."""
        if self._over.is_set():
            return
        self._fate.reason = self._fate.reason or reason
        self._over.set()
        if self._to and not self._peer_ended:
            with contextlib.suppress(OSError, nats.errors.Error):
                await self._say(END, self._sent_chunks, reason.encode()[:_REASON_LIMIT])

    # -- out ---------------------------------------------------------------------------------------------------------

    async def _say(self, kind: int, number: int, data: bytes | bytearray | memoryview = b"", reply: str = "") -> None:
        await self._client.publish(self._to, HEAD.pack(self._key, kind, number) + data, reply)

    async def _up(self) -> None:
        loop, far = asyncio.get_running_loop(), self._far
        assert far is not None
        chunk = max(1, min(CHUNK, self._client.max_payload - HEAD.size))
        view = memoryview(bytearray(chunk))
        try:
            while True:
                while self._sent_bytes >= self._may_send and not self._peer_ended:
                    self._wake_up.clear()
                    await self._wake_up.wait()
                room = chunk if self._peer_ended else min(chunk, self._may_send - self._sent_bytes)
                n = await loop.sock_recv_into(far, view[:room])
                if not n:
                    await self.end("")
                    return
                if self._peer_ended:
                    continue  # nobody is left to read it; taken so that our writer comes to read what is left for it
                self._sent_chunks += 1
                self._sent_bytes += n
                await self._say(DATA, self._sent_chunks, view[:n])
                await asyncio.sleep(0)  # let it leave: neither call above waits while there is work
        except ConnectionResetError:
            await self.end("")  # our side closed its socket without having read all that was there
        except (OSError, nats.errors.Error) as e:
            await self.end(f"the tunnel broke: {e}")

    async def _beat(self) -> None:
        # Beats are counted, not seconds: if this process was stopped, the other end has not been silent.
        while not self._peer_ended:
            if self._silent_beats > SILENT_BEATS:
                await self.end(f"the other end of the tunnel has been silent for {SILENT_BEATS * BEAT_S:g} s")
                return
            self._silent_beats += 1
            with contextlib.suppress(OSError, nats.errors.Error):  # `closed_cb` tells
                await self._say(BEAT, self._sent_chunks, reply=self.inbox)
            await asyncio.sleep(BEAT_S)

    # -- in ----------------------------------------------------------------------------------------------------------

    async def _on_message(self, message: Msg) -> None:
        """Never waits: beats and credit must not queue behind data that nobody takes."""
        data = message.data
        if self._over.is_set() or self._peer_ended:
            return
        if len(data) < HEAD.size or data[:8] != self._key:
            # The server's own answer to a beat that nobody listens to. Before the other end was heard once, it may be early.
            if not data and message.headers and message.headers.get("Status") == _NO_RESPONDERS and self._heard:
                await self.end("the other end of the tunnel is gone")
            return
        self._heard, self._silent_beats = True, 0
        _, kind, number = HEAD.unpack_from(data)
        if kind == DATA:
            await self._take(number, data)
        elif kind == CREDIT:
            if not self._may_send - self._their_window <= number <= self._sent_bytes:
                await self.end("the other end of the tunnel broke its rules: credit for what was never sent")
                return
            self._may_send = number + self._their_window
            self._wake_up.set()
        elif kind in (BEAT, END):
            if number != self._got_chunks:
                await self.end(f"the tunnel lost data: {number} messages were sent, {self._got_chunks} came")
                return
            if kind == END:
                self._fate.reason = data[HEAD.size : HEAD.size + _REASON_LIMIT].decode(errors="replace")
                self._peer_ended = True
                self._wake_up.set()
                self._wake_down.set()
        else:
            await self.end(f"the other end of the tunnel broke its rules: message of kind {kind}")

    async def _take(self, number: int, data: bytes) -> None:
        if number != self._got_chunks + 1:
            await self.end(f"the tunnel lost data: message {number} came where {self._got_chunks + 1} was due")
            return
        size = len(data) - HEAD.size
        self._got_chunks = number
        self._got_bytes += size
        if not size or self._got_bytes - self._passed_on > WINDOW:
            await self.end(
                f"the other end of the tunnel broke its rules: {size} bytes where it had no leave to send them"
            )
            return
        last = self._waiting[-1] if self._waiting else None
        if size > _SMALL:
            self._waiting.append(memoryview(data)[HEAD.size :])
        elif isinstance(last, bytearray) and len(last) < CHUNK:
            last += data[HEAD.size :]  # many little ones must not take more memory than the window
        else:
            self._waiting.append(bytearray(data[HEAD.size :]))
        self._wake_down.set()

    async def _down(self) -> None:
        loop, far = asyncio.get_running_loop(), self._far
        assert far is not None
        told = 0
        try:
            while True:
                while self._waiting:
                    data = self._waiting.popleft()
                    await loop.sock_sendall(far, data)
                    self._passed_on += len(data)
                    if self._passed_on - told >= WINDOW // 4 and not self._peer_ended:
                        told = self._passed_on
                        await self._say(CREDIT, told)
                if self._peer_ended:
                    self._over.set()
                    return
                self._wake_down.clear()
                await self._wake_down.wait()
        except nats.errors.Error as e:
            await self.end(f"the tunnel broke: {e}")
        except OSError:
            await self.end("")  # our side closed its socket with data on the way to it

    # -- what NATS says ----------------------------------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        self._last_error = what = str(error) or type(error).__name__
        if self._to:
            await self.end(f"the tunnel broke: the connection to NATS at {self._access} failed: {what}{self._cure()}")

    async def _on_closed(self) -> None:
        if self._to:
            await self.end(f"the tunnel broke: the connection to NATS at {self._access} is gone{self._cure()}")

    def _cure(self) -> str:
        if self._ends is None or time.time() < self._ends - 1:
            return ""
        return (
            "; its credentials have ended, and a tunnel cannot be moved to others: begin again, or have the router give sessions "
            "longer ones (WOOLY_ROUTER_SESSION_CREDENTIALS_S)"
        )


# -- the client ------------------------------------------------------------------------------------------------------


def open_tunnel(there: str | Access, rpc: OpenTunnel, *, timeout: float = OPEN_TIMEOUT_S) -> TunnelSocket:
    """A connected stream socket whose other end is at the executor that serves `rpc` on the NATS server there.

    One daemon thread pumps it, and ends when the socket is closed or the tunnel breaks.

    Raises:
        ChannelClosedError: no NATS server answers, or nobody serves the subject.
        ChannelTimeoutError: no answer within `timeout` seconds.
        ChannelError: the other side refuses.
    """
    opened: concurrent.futures.Future[TunnelSocket] = concurrent.futures.Future()
    thread = start_thread(lambda: asyncio.run(_client_end(Access.of(there), rpc, timeout, opened)), "wooly-tunnel")
    try:
        return opened.result()
    except BaseException:
        if opened.done() and opened.exception() is not None:
            thread.join(LINGER_S)
        raise


async def _client_end(
    access: Access, rpc: OpenTunnel, timeout: float, opened: concurrent.futures.Future[TunnelSocket]
) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    request = OpenTunnelRequest.model_construct(inbox="", key=secrets.token_hex(8), window=WINDOW)
    tunnel = _Tunnel(access, request.key)
    try:
        await tunnel.connect(timeout)
        request = request.model_copy(update={"inbox": tunnel.inbox})
        try:
            reply = await tunnel.ask(rpc, request, max(0.1, deadline - loop.time()))
        except BusError as e:
            raise _channel_error(e, rpc.subject, timeout) from e
        near = tunnel.join(reply.inbox, reply.window, threading.current_thread())
    except BaseException as e:
        await tunnel.abandon()
        opened.set_exception(e)
        return
    opened.set_result(near)
    await tunnel.run()


def _channel_error(error: BusError, subject: str, timeout: float) -> ChannelError:
    if isinstance(error, BusTimeoutError):
        return ChannelTimeoutError(f"no answer from the tunnel's other end ({subject}) within {timeout:g} s")
    if isinstance(error, RefusedError):
        return ChannelError(f"the tunnel is refused: {error}")
    return ChannelClosedError(f"no tunnel to {subject}: {error}")


# -- the executor ----------------------------------------------------------------------------------------------------


def tunnel_endpoint(url: str, executor_id: str) -> Endpoint:
    """Where the tunnels of an executor begin that is on the NATS server at `url` (the first, if it names several).

    Raises:
        EndpointError: that is no such URL.
    """
    first = url.split(",")[0].strip()
    parts = urlsplit(first if "://" in first else f"nats://{first}")
    if not parts.hostname:
        raise EndpointError(f"{shown(url)} is not the URL of a NATS server")
    return Endpoint(
        "nats", parts.hostname, parts.port or NATS_PORT, contracts.EXECUTOR_TUNNEL_OPEN.at(executor_id).subject
    )


class TunnelListener:
    """The executor's end of all tunnels, in the event loop of its control side.

    Args:
        there: NATS.
        deliver: gets the near socket of every new tunnel, a name for its peer, and one that all tunnels of a tenant share.
        limits: of tunnels.
    """

    def __init__(
        self,
        there: str | Access,
        deliver: Callable[[socket.socket, str, str], object],
        *,
        limits: TunnelLimits | None = None,
    ) -> None:
        self._access = Access.of(there)
        self._deliver = deliver
        self._places = TunnelPlaces(limits or TunnelLimits())
        self._tunnels: dict[_Tunnel, asyncio.Task[None]] = {}

    @property
    def open(self) -> int:
        """Tunnels that are open now."""
        return len(self._tunnels)

    async def on_open_tenants_tunnel(self, request: OpenTunnelRequest, tenant: str) -> OpenTunnelReply:
        """Handle the request of a tenant's client: both inboxes are such as only that one user may use.

        Raises:
            RefusedError: see `on_open_tunnel`; or the inbox is another tenant's.
        """
        if not subjects.is_inbox_of(request.inbox, tenant):
            raise RefusedError("channel.inbox", "the tunnel would go to an inbox that is not the tenant's")
        under = subjects.tunnel_inbox(request.inbox)
        return await self._open(request, under, tenant, session=under.rpartition(".")[2])

    async def on_open_tunnel(self, request: OpenTunnelRequest) -> OpenTunnelReply:
        """Handle a client's request.

        Raises:
            RefusedError: there are too many tunnels, or NATS does not let us in.
        """
        return await self._open(request)

    async def _open(
        self, request: OpenTunnelRequest, under: str = "", tenant: str = "", session: str = ""
    ) -> OpenTunnelReply:
        with self._places.take(tenant, session) as place:
            tunnel = _Tunnel(self._access, request.key)
            try:
                await tunnel.connect(OPEN_TIMEOUT_S - 1, under)
            except (ChannelError, BusError) as e:
                raise RefusedError(e.code, str(e), retryable=e.retryable) from e
            near = tunnel.join(request.inbox, request.window)
            self._tunnels[tunnel] = start_errand(self._serve(tunnel, request.inbox, place.pop_all()), "a tunnel")
        self._deliver(near, f"tunnel {request.inbox}", f"tunnels of tenant {tenant}" if tenant else "tunnels")
        return OpenTunnelReply(inbox=tunnel.inbox, window=WINDOW)

    async def _serve(self, tunnel: _Tunnel, peer: str, place: contextlib.ExitStack) -> None:
        try:
            with place:
                reason = await tunnel.run()
        finally:
            del self._tunnels[tunnel]
        if reason:
            log.warning("tunnel %s: %s", peer, reason)

    async def aclose(self) -> None:
        """End all tunnels."""
        serving = list(self._tunnels.items())
        for tunnel, _ in serving:
            await tunnel.end("the executor is stopping")
        await asyncio.gather(*[task for _, task in serving], return_exceptions=True)
