"""A byte stream through NATS, for a data channel between hosts without a direct route. It carries bytes: no frames, no sessions.

Each end connects its inbox to a socket pair. The near socket goes to the ordinary `ChannelClient` or `Acceptor`, so framing and
all layers above are the same as on any other transport. A `_Tunnel` copies bytes between the far socket and NATS.

A message is ``<8sBQ`` (key of the tunnel, kind, number) and then data:

| kind | number | data |
|---|---|---|
| 1 DATA | 1, 2, 3, … | bytes of the stream |
| 2 CREDIT | bytes that the receiver has passed on so far; the sender may send at most `window` more | none |
| 3 BEAT | DATA messages sent so far; once a second | none |
| 4 END | DATA messages sent so far | the reason as text; empty if the stream ended normally |

A message without the key comes from another sender and is dropped. NATS preserves the order of one sender, so a wrong number
means that messages were lost. The tunnel then ends; it does not retransmit. Each end has its own NATS connection. At most one
window of bytes waits in the connection, far below the limit at which the server disconnects a slow consumer.
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
from collections.abc import Callable, Iterator
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
from wooly_bus.nats_client import NatsClient, PlainTextError
from wooly_bus.rpc import CLOSE_S, nats_errors, settled
from wooly_bus.supervision import start_errand, start_thread
from wooly_bus.tunnel_messages import OpenTunnelReply, OpenTunnelRequest

log = logging.getLogger("wooly.tunnel")

HEAD = struct.Struct("<8sBQ")
DATA, CREDIT, BEAT, END = 1, 2, 3, 4
#: Bytes that one end accepts from the other end before it has written them to its socket.
WINDOW = 8 << 20
#: Largest data of a message, in bytes, if the server allows it: large enough for throughput, small enough that a slow line still
#: delivers messages often enough to show that the tunnel is alive.
CHUNK = 256 << 10
#: Seconds between two beats.
BEAT_S = 1.0
#: Number of own beats without any message from the other end after which the other end counts as dead, if it is an executor, and
#: if it is a client. An executor, or the line to it, may stand still for a moment: the client renews its lease, and finds out
#: earlier than this if its executor is frozen. A client may be stopped, or its machine may sleep; if its machine is gone, NATS
#: ends its connection after some minutes, and tells it. The limit is that of a data channel over TCP (`endpoint.KEEPALIVE`).
SILENT_BEATS, SILENT_CLIENT_BEATS = 30, 600
OPEN_TIMEOUT_S = 5.0
#: Longest wait in `close`, in seconds, until the server has all sent bytes.
LINGER_S = 5.0
NATS_PORT = 4222
_NO_RESPONDERS = "503"
#: Largest reason in an END message, in bytes.
_REASON_LIMIT = 500
#: Data of at most this many bytes is copied and joined with its neighbours; larger data is not copied.
_SMALL = 16 << 10
#: The request of a client to one executor to open a tunnel.
OpenTunnel = Rpc[OpenTunnelRequest, OpenTunnelReply]


class _EndReason:
    """The reason why a tunnel ended, for the errors of its near socket. Empty: the tunnel ended normally."""

    def __init__(self) -> None:
        self.reason = ""


class TunnelSocket(socket.socket):
    """The near socket of a tunnel: a stream socket that raises the reason if the tunnel did not end normally."""

    def __init__(self, fileno: int, end_reason: _EndReason, thread: threading.Thread | None = None) -> None:
        super().__init__(fileno=fileno)
        self._end_reason = end_reason
        self._thread = thread

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Behave as `socket.socket`, but raise the reason of a broken tunnel.

        Raises:
            ConnectionAbortedError: the tunnel broke; the message has the reason.
        """
        n = super().recv_into(buffer, nbytes, flags)
        if not n and self._end_reason.reason:
            raise ConnectionAbortedError(self._end_reason.reason)
        return n

    if hasattr(socket.socket, "sendmsg"):

        def sendmsg(self, *args: Any) -> int:
            """Behave as `socket.socket`, but raise the reason of a broken tunnel.

            Raises:
                ConnectionAbortedError: the tunnel broke; the message has the reason.
            """
            parent: Any = super()  # mypy knows no `sendmsg` on Windows
            with self._errors():
                return int(parent.sendmsg(*args))

    def sendall(self, *args: Any) -> None:
        """Behave as `socket.socket`, but raise the reason of a broken tunnel. Windows has no `sendmsg`.

        Raises:
            ConnectionAbortedError: the tunnel broke; the message has the reason.
        """
        with self._errors():
            super().sendall(*args)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as e:
            if self._end_reason.reason:
                raise ConnectionAbortedError(self._end_reason.reason) from e
            raise

    def close(self) -> None:
        """Close the socket, and wait at most `LINGER_S` until the sent bytes have left this process."""
        with contextlib.suppress(OSError):  # the socket is not connected any more
            self.shutdown(socket.SHUT_RDWR)  # ends the connection even if a forked process has a copy of the socket
        super().close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LINGER_S)


class _Tunnel:
    """One end of a tunnel. It belongs to the event loop that created it.

    Args:
        access: the access to NATS.
        key: the tunnel's key.
        patience: number of own beats without a message after which the other end counts as dead.
    """

    def __init__(self, access: Access, key: str, patience: int) -> None:
        self._access, self._patience = access, patience
        self._tenant: str | None = None
        self._key = bytes.fromhex(key)
        self._client = NatsClient()
        self._end_reason = _EndReason()
        self._last_error = ""
        self._ends: float | None = None
        self._to = ""
        self._far: socket.socket | None = None
        self._over = asyncio.Event()
        self._wake_up = asyncio.Event()
        self._wake_down = asyncio.Event()
        self._heard = False
        self._silent_beats = 0
        # the outgoing direction
        self._sent_chunks = 0
        self._sent_bytes = 0
        self._their_window = 0
        self._may_send = 0
        # the incoming direction
        self._got_chunks = 0
        self._got_bytes = 0
        self._passed_on = 0
        self._waiting: deque[memoryview | bytearray] = deque()
        self._peer_ended = False
        self.inbox = ""

    async def connect(self, timeout: float, under: str = "") -> None:
        """Connect to NATS and subscribe to a new inbox for this tunnel.

        Args:
            timeout: seconds.
            under: prefix of the inbox; empty: use the inbox prefix of this process's credentials.

        Raises:
            ChannelError: no server answers.
            CredentialsError: the credentials cannot be read.
        """
        held = None if self._access.credentials is None else self._access.credentials()
        self._tenant = None if held is None else held.tenant
        self._ends = None if held is None else held.expires_at
        try:
            async with asyncio.timeout(timeout):
                await self._client.connect(
                    self._access.servers,
                    name="wooly-tunnel",
                    allow_reconnect=True,  # until it is connected: a server may be silent
                    connect_timeout=timeout / len(self._access.servers),  # type: ignore[arg-type]  # annotated int
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # the client sleeps this many seconds; annotated int
                    pending_size=4
                    * WINDOW,  # never reached; at this limit, nats-py would block and then fail inside a publish
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    **options(held, self._access.tls()),
                )
                self._client.stay()  # a reconnect loses messages in flight, so the stream cannot continue
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
                    f"the certificate of NATS at {self._access} is not trusted: {e.verify_message}"
                ) from e
            raise ChannelClosedError(
                f"cannot connect to NATS at {self._access} for the tunnel: {self._last_error or e}"
            ) from e

    async def ask(self, rpc: OpenTunnel, request: OpenTunnelRequest, timeout: float) -> OpenTunnelReply:
        """Ask the executor to open its end of the tunnel.

        Raises:
            BusError: the executor does not answer, or refuses.
        """
        data, headers = encode(request)
        subject = rpc.subject if self._tenant is None else rpc.for_tenant(self._tenant)
        with nats_errors(str(self._access), subject, timeout):
            answer = await self._client.request(subject, data, timeout=timeout, headers=headers)
        return decode_reply(answer.data, answer.headers, rpc.reply)

    def join(self, inbox: str, window: int, thread: threading.Thread | None = None) -> TunnelSocket:
        """Connect to the other end. Returns the near socket; no bytes move before `run`."""
        self._to = inbox
        self._may_send = self._their_window = min(window, WINDOW)
        near, far = socket.socketpair()
        for sock in (near, far):
            tune(sock, SOCKET_BUFFER)
        far.setblocking(False)
        self._far = far
        return TunnelSocket(near.detach(), self._end_reason, thread)

    async def run(self) -> str:
        """Copy bytes until one end closes the tunnel or the tunnel breaks.

        Returns the reason; empty if the tunnel ended normally.
        """
        tasks = [start_errand(part(), "a tunnel") for part in (self._send_loop, self._receive_loop, self._beat_loop)]
        for task in tasks:
            task.add_done_callback(self._on_part_done)
        try:
            await self._over.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._flush()
            await self.abandon()
        return self._end_reason.reason

    def _on_part_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._end_reason.reason = f"the tunnel broke: {type(fault).__name__}: {fault}"
            self._over.set()

    async def _flush(self) -> None:
        """Wait until the server has all messages: an immediate close could reset the connection and lose the last ones."""
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
            if self._client.is_connected and not self._peer_ended:
                async with asyncio.timeout(LINGER_S):
                    await settled(self._client)

    async def abandon(self) -> None:
        """Close the far socket and the NATS connection, and drop waiting data."""
        if self._far is not None:
            self._far.close()
        self._waiting.clear()
        await self._disconnect()

    async def _disconnect(self, timeout: float = LINGER_S) -> None:
        # nats-py raises AssertionError if there is no connection yet; the timeout is for a server that is frozen.
        with contextlib.suppress(OSError, nats.errors.Error, AssertionError, TimeoutError):
            async with asyncio.timeout(timeout):
                await self._client.close()

    async def end(self, reason: str) -> None:
        """End the tunnel and send the reason to the other end."""
        if self._over.is_set():
            return
        self._end_reason.reason = self._end_reason.reason or reason
        self._over.set()
        if self._to and not self._peer_ended:
            with contextlib.suppress(OSError, nats.errors.Error):
                await self._publish(END, self._sent_chunks, reason.encode()[:_REASON_LIMIT])

    # -- out ---------------------------------------------------------------------------------------------------------

    async def _publish(
        self, kind: int, number: int, data: bytes | bytearray | memoryview = b"", reply: str = ""
    ) -> None:
        await self._client.publish(self._to, HEAD.pack(self._key, kind, number) + data, reply)

    async def _send_loop(self) -> None:
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
                    # the other end reads no more; drop the bytes, so that our writer is not blocked and reads what it has
                    # received
                    continue
                self._sent_chunks += 1
                self._sent_bytes += n
                await self._publish(DATA, self._sent_chunks, view[:n])
                await asyncio.sleep(0)  # let the message leave: the calls above do not yield while there is data
        except ConnectionResetError:
            await self.end("")  # this side closed its socket with unread data
        except (OSError, nats.errors.Error) as e:
            await self.end(f"the tunnel broke: {e}")

    async def _beat_loop(self) -> None:
        # Count beats, not seconds: while this process was stopped, the other end was not silent.
        while not self._peer_ended:
            if self._silent_beats > self._patience:
                await self.end(f"the other end of the tunnel has been silent for {self._patience * BEAT_S:g} s")
                return
            self._silent_beats += 1
            with contextlib.suppress(OSError, nats.errors.Error):  # `closed_cb` reports it
                await self._publish(BEAT, self._sent_chunks, reply=self.inbox)
            await asyncio.sleep(BEAT_S)

    # -- in ----------------------------------------------------------------------------------------------------------

    async def _on_message(self, message: Msg) -> None:
        """Handle a message without waiting: BEAT and CREDIT must not queue behind data that the near side does not read."""
        data = message.data
        if self._over.is_set() or self._peer_ended:
            return
        if len(data) < HEAD.size or data[:8] != self._key:
            # The server answers a beat that has no subscriber. Before the first message of the other end, its subscription may be
            # missing because it is still being made.
            if not data and message.headers and message.headers.get("Status") == _NO_RESPONDERS and self._heard:
                await self.end("the other end closed its NATS connection without ending the tunnel")
            return
        self._heard, self._silent_beats = True, 0
        _, kind, number = HEAD.unpack_from(data)
        if kind == DATA:
            await self._take(number, data)
        elif kind == CREDIT:
            if not self._may_send - self._their_window <= number <= self._sent_bytes:
                await self.end(
                    f"the other end of the tunnel violated the protocol: credit for {number} bytes, sent {self._sent_bytes}"
                )
                return
            self._may_send = number + self._their_window
            self._wake_up.set()
        elif kind in (BEAT, END):
            if number != self._got_chunks:
                await self.end(f"the tunnel lost data: {number} messages were sent, {self._got_chunks} were received")
                return
            if kind == END:
                self._end_reason.reason = data[HEAD.size : HEAD.size + _REASON_LIMIT].decode(errors="replace")
                self._peer_ended = True
                self._wake_up.set()
                self._wake_down.set()
        else:
            await self.end(f"the other end of the tunnel violated the protocol: unknown message kind {kind}")

    async def _take(self, number: int, data: bytes) -> None:
        if number != self._got_chunks + 1:
            await self.end(
                f"the tunnel lost data: received message {number}, but expected message {self._got_chunks + 1}"
            )
            return
        size = len(data) - HEAD.size
        self._got_chunks = number
        self._got_bytes += size
        if not size or self._got_bytes - self._passed_on > WINDOW:
            await self.end(f"the other end of the tunnel violated the protocol: it sent {size} bytes without credit")
            return
        last = self._waiting[-1] if self._waiting else None
        if size > _SMALL:
            self._waiting.append(memoryview(data)[HEAD.size :])
        elif isinstance(last, bytearray) and len(last) < CHUNK:
            last += data[
                HEAD.size :
            ]  # join small messages, so that their objects do not take more memory than the window
        else:
            self._waiting.append(bytearray(data[HEAD.size :]))
        self._wake_down.set()

    async def _receive_loop(self) -> None:
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
                        await self._publish(CREDIT, told)
                if self._peer_ended:
                    self._over.set()
                    return
                self._wake_down.clear()
                await self._wake_down.wait()
        except nats.errors.Error as e:
            await self.end(f"the tunnel broke: {e}")
        except OSError:
            await self.end("")  # this side closed its socket before it received all data

    # -- callbacks of NATS -------------------------------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        self._last_error = what = str(error) or type(error).__name__
        if not self.inbox and ("authorization" in what.lower() or isinstance(error, (ssl.SSLError, PlainTextError))):
            raise error  # another attempt would fail in the same way
        if self._to:
            await self.end(
                f"the tunnel broke: the connection to NATS at {self._access} failed: {what}{self._expiry_hint()}"
            )

    async def _on_closed(self) -> None:
        if self._to:
            await self.end(f"the tunnel broke: the connection to NATS at {self._access} is closed{self._expiry_hint()}")

    def _expiry_hint(self) -> str:
        if self._ends is None or time.time() < self._ends - 1:
            return ""
        return (
            "; its credentials have expired, and a tunnel cannot renew them: open a new session, or let the router issue "
            "credentials with a longer lifetime (WOOLY_ROUTER_SESSION_CREDENTIALS_S)"
        )


# -- the client ------------------------------------------------------------------------------------------------------


def open_tunnel(there: str | Access, rpc: OpenTunnel, *, timeout: float = OPEN_TIMEOUT_S) -> TunnelSocket:
    """Open a tunnel to an executor, and return a connected stream socket.

    One daemon thread copies the bytes. It ends when the socket is closed or the tunnel breaks.

    Args:
        there: URL of the NATS server, or the access to it.
        rpc: the request that the executor serves.
        timeout: seconds.

    Raises:
        ChannelClosedError: no NATS server answers, or no executor serves the subject.
        ChannelTimeoutError: no answer within `timeout` seconds.
        ChannelError: the executor refuses the tunnel.
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
    tunnel = _Tunnel(access, request.key, SILENT_BEATS)
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
        return ChannelTimeoutError(f"cannot open a tunnel to {subject}: no answer within {timeout:g} s")
    if isinstance(error, RefusedError):
        return ChannelError(f"the executor refused the tunnel: {error}")
    return ChannelClosedError(f"cannot open a tunnel to {subject}: {error}")


# -- the executor ----------------------------------------------------------------------------------------------------


def tunnel_endpoint(url: str, executor_id: str) -> Endpoint:
    """The endpoint for tunnels to an executor.

    Args:
        url: URLs of NATS servers, separated by commas; the endpoint has the first one.
        executor_id: the executor.

    Raises:
        EndpointError: the first URL is not the URL of a NATS server.
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
        there: URL of the NATS server, or the access to it.
        deliver: called with the near socket of each new tunnel, a name for its peer, and the name of the group of all tunnels
            of the tenant.
        limits: limits on the number of tunnels.
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
        """Open a tunnel for a tenant's client. Only the credentials of that client may use the two inboxes.

        Raises:
            RefusedError: see `on_open_tunnel`; or the inbox belongs to another tenant.
        """
        if not subjects.is_inbox_of(request.inbox, tenant):
            raise RefusedError(
                "channel.inbox",
                f"the inbox of the tunnel does not belong to tenant {tenant}; use an inbox of your credentials",
            )
        under = subjects.tunnel_inbox(request.inbox)
        return await self._open(request, under, tenant, session=under.rpartition(".")[2])

    async def on_open_tunnel(self, request: OpenTunnelRequest) -> OpenTunnelReply:
        """Open a tunnel for a client.

        Raises:
            RefusedError: a limit on tunnels is reached, or the connection to NATS failed.
        """
        return await self._open(request)

    async def _open(
        self, request: OpenTunnelRequest, under: str = "", tenant: str = "", session: str = ""
    ) -> OpenTunnelReply:
        with self._places.take(tenant, session) as place:
            tunnel = _Tunnel(self._access, request.key, SILENT_CLIENT_BEATS)
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
        """End all tunnels, and wait until they have ended."""
        serving = list(self._tunnels.items())
        for tunnel, _ in serving:
            await tunnel.end("the executor is stopping")
        await asyncio.gather(*[task for _, task in serving], return_exceptions=True)
