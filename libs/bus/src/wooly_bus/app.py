"""The base of every service: a FastStream broker, handlers on subjects, error replies, an orderly shutdown.

`ServiceApp` only connects the parts. A service decides in its actors and their pure cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
from faststream import AckPolicy
from faststream.nats import NatsBroker
from faststream.nats.security import NatsJWT, NatsSecurity
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from wooly_wis.messages import ErrorReply, Message
from wooly_wis.traces import SpansRecorded

from wooly_bus import contracts, subjects
from wooly_bus.access import Access, Shows
from wooly_bus.contract_types import Event, EventContract, Q, R, Rpc
from wooly_bus.envelope import decode, decode_reply, encode
from wooly_bus.errors import BusConnectError, BusError, EnvelopeError, shown
from wooly_bus.health import Check, HealthSettings, serve_health
from wooly_bus.limited_log import LimitedLog, first_line
from wooly_bus.nats_client import NOTICING, NatsClient
from wooly_bus.rpc import nats_errors, settled
from wooly_bus.supervision import start_task
from wooly_bus.tracing import SpanQueue, consumer_span, handing_over, mark_failed

log = logging.getLogger("wooly.bus")
E = TypeVar("E", bound=Message)
T = TypeVar("T")

#: Requests on one subject that a service handles concurrently. Actors serialize their own state.
CONCURRENT_REQUESTS = 64
#: Concurrent requests of tenants' clients on one subject: of all tenants together, and of one tenant. The second limit is lower,
#: so that one tenant cannot block the others.
TENANTS_REQUESTS, TENANT_REQUESTS = 128, 32
#: Seconds that running requests have to finish when a service ends.
GRACE_S = 5.0
#: Seconds in which NATS must answer at the end of a service. Without an answer, the connection is closed as it is.
ANSWER_S = 2
#: Seconds between two messages with spans.
SPANS_EVERY_S = 0.25
#: Stands for the span of a message whose sender has no trace.
_UNTRACED: contextlib.nullcontext[None] = contextlib.nullcontext()


class _Broker(NatsBroker):
    """FastStream's broker with a client that refuses a server without TLS."""

    async def _connect(self) -> NatsClient:
        client = NatsClient()
        await client.connect(**self._connection_kwargs)
        self.config.connect(client)
        return client


class ServiceApp:
    """One service's connection to NATS.

    Args:
        name: name of the service, as in subjects.
        nats_url: URL of NATS; the URLs of several servers of one cluster are separated by commas.
        patience_s: seconds to wait for NATS at the start.

    Attributes:
        live: named checks for `/livez` (see `health`): if one fails, the process must be restarted.
        health_port: port of `/livez`, inside `running`; None if no port is configured.
        reconnects: how often the connection to NATS was lost and made again. Events of the time between were missed.
        tenant_requests: concurrent requests of one tenant on one subject; further requests are refused.
        knows_tenants: NATS authenticates tenants' clients; see `serve_tenants`.
        passing: errors of handlers that pass, such as those of a database that does not answer, and the code and the text of the
            retryable refusals that they become.

    Raises:
        CredentialsError: the credentials for NATS cannot be read.
        BusConnectError: the file of trusted authorities cannot be read.
    """

    def __init__(self, name: str, nats_url: str, *, patience_s: float = 30.0) -> None:
        access = Access.of_service(nats_url)
        tls = access.tls()
        shows = None if access.credentials is None else Shows(access.credentials)
        self.name = name
        self.url = shown(nats_url)
        self.knows_tenants = shows is not None
        self.reconnects = 0
        self.tenant_requests = TENANT_REQUESTS
        self.passing: dict[type[Exception], tuple[str, str]] = {}
        self._passing_log = LimitedLog(log, "requests failed for such a reason", lines=1)
        self._dropped_log = LimitedLog(log, "messages were dropped because NATS is not reachable", lines=1)
        self._patience_s = patience_s
        self._last_error = ""
        self._ending = False
        self._client: NatsClient | None = None
        self._listeners: list[tuple[str, str, Callable[[Msg], Awaitable[None]]]] = []
        self._dropped_reported = 0
        self.live: dict[str, Check] = {}
        self.health_port: int | None = None
        self.broker = _Broker(
            nats_url.split(","),
            logger=None,
            name=f"wooly-{name}",
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            connect_timeout=3,
            **NOTICING,
            graceful_timeout=GRACE_S,
            # Control messages use core NATS, which has no acknowledgements; so FastStream must not acknowledge.
            ack_policy=AckPolicy.MANUAL,
            # Handlers take only the message, so dependency injection, which costs time per request, is off.
            apply_types=False,
            serializer=None,
            security=NatsSecurity(ssl_context=tls)
            if shows is None
            else NatsJWT(shows.jwt, shows.signature, ssl_context=tls),
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_closed,
        )

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._last_error:  # log a repeated error once: it occurs every second while NATS is unreachable
            log.warning("NATS at %s: %s", self.url, text)
        self._last_error = text

    async def _on_disconnect(self) -> None:
        if not self._ending:
            log.warning("lost the connection to NATS at %s; reconnecting", self.url)

    async def _on_closed(self) -> None:
        if not self._ending:  # nats-py closes a connection for good only if its credentials expired
            why = self._last_error or "the credentials of this service have expired"
            cure = "renew the file that WOOLY_NATS_CREDS names, and restart this service"
            log.error("the connection to NATS at %s is closed for good: %s; %s", self.url, why, cure)

    async def _on_reconnect(self) -> None:
        self._last_error = ""
        self.reconnects += 1
        log.info("connected to NATS at %s again", self.url)

    def serve(
        self, rpc: Rpc[Q, R], handler: Callable[[Q], Awaitable[R]], *, concurrency: int = CONCURRENT_REQUESTS
    ) -> None:
        """Answer the requests of a contract with the reply of the handler, or with an `ErrorReply` if the handler raises.

        Args:
            rpc: the contract.
            handler: returns the reply.
            concurrency: requests that are handled concurrently; further requests wait.

        Raises:
            ValueError: only tenants' clients may send this request.
        """
        if rpc.tenants_only:
            raise ValueError(f"only tenants' clients may send {rpc.subject}; serve it with serve_tenants")

        async def answer(message: Msg) -> None:
            await self._answer(rpc.subject, message, lambda: self._handled(handler, rpc.request, message.data))

        self._subscribe(rpc.subject, rpc.queue, answer, concurrency)

    def serve_tenants(
        self, rpc: Rpc[Q, R], handler: Callable[[Q, str], Awaitable[R]], *, concurrency: int = TENANTS_REQUESTS
    ) -> None:
        """Answer the requests of tenants' clients on `rpc.for_tenant(tenant)`. The handler also gets the tenant.

        NATS lets only the clients of the tenant publish there, so the service does not check the tenant again. Without
        credentials, NATS does not authenticate tenants; then this method does nothing. The requests of a tenant above its limit
        are refused before they are decoded.

        Args:
            rpc: the contract.
            handler: returns the reply to a request of a tenant.
            concurrency: requests of all tenants that are handled concurrently.

        Raises:
            ValueError: the contract has no scope, so no client may send the request.
        """
        if rpc.scope is None:
            raise ValueError(f"cannot serve {rpc.subject} to tenants' clients: its contract has no scope")
        if not self.knows_tenants:
            return
        subject, max_bytes = rpc.subject, rpc.max_bytes
        working: Counter[str] = Counter()

        async def answer(message: Msg) -> None:
            tenant = subjects.tenant_of(message.subject.rpartition(".")[2])
            if message.reply and not subjects.is_inbox_of(message.reply, tenant):
                log.warning(
                    "dropped a request %s: its reply subject does not belong to tenant %s, which sent it",
                    subject,
                    tenant,
                )
                return

            async def bound(request: Q) -> R:
                return await handler(request, tenant)

            bound.__qualname__ = getattr(handler, "__qualname__", repr(handler))

            async def limited() -> R | ErrorReply:
                if len(message.data) > max_bytes:
                    return _too_large(len(message.data), max_bytes)
                most = self.tenant_requests * concurrency // TENANTS_REQUESTS
                if working[tenant] >= most:
                    return self._too_many(subject, tenant, most)
                working[tenant] += 1
                try:
                    return await self._handled(bound, rpc.request, message.data)
                finally:
                    working[tenant] -= 1
                    if not working[tenant]:
                        del working[tenant]

            await self._answer(subject, message, limited)

        self._subscribe(f"{subject}.*", rpc.queue, answer, concurrency)

    def _too_many(self, subject: str, tenant: str, most: int) -> ErrorReply:
        return ErrorReply(
            code=f"{self.name}.limit",
            message=f"tenant {tenant} has {most} running requests of {subjects.template(subject)} at this service, "
            "which is the limit; wait for their answers",
            retryable=True,
        )

    async def _answer(self, subject: str, message: Msg, handled: Callable[[], Awaitable[Message]]) -> None:
        with consumer_span(self.name, subject, message.headers or {}):
            if subjects.is_service(message.reply):
                log.warning("dropped a request %s: its reply subject %s belongs to a service", subject, message.reply)
                return
            reply = await handled()
            if isinstance(reply, ErrorReply):
                mark_failed(reply.code)
            if message.reply:
                await self._send(message.reply, *_encoded(reply))

    def _subscribe(self, subject: str, queue: str, answer: Callable[[Msg], Awaitable[None]], concurrency: int) -> None:
        self.broker.subscriber(subject, queue=queue, decoder=_received, no_reply=True, max_workers=concurrency)(answer)

    def listen(self, event: EventContract[E], handler: Callable[[E], Awaitable[None]]) -> None:
        """Handle the events of all addresses, one at a time. A malformed event is logged and dropped.

        nats-py calls the handler directly, without FastStream: a thousand executors send a thousand heartbeats per second, and
        FastStream's middleware would take most of a core for them.
        """
        subject, model = event.pattern, event.payload

        async def hear(message: Msg) -> None:
            headers = message.headers or {}
            with consumer_span(self.name, subject, headers) if "traceparent" in headers else _UNTRACED:
                failure = await self._handled(handler, model, message.data)
                if isinstance(failure, ErrorReply):
                    log.warning("dropped an event %s: %s", subject, failure.message)
                    mark_failed(failure.code)

        self._listeners.append((subject, event.queue, hear))

    def jetstream(self) -> JetStreamContext:
        """The JetStream context of this service's connection. Call this inside `running`."""
        assert self._client is not None
        return self._client.jetstream()

    @property
    def jetstream_votes(self) -> bool:
        """Whether JetStream is that of a cluster, which needs more than half of its servers. Use this inside `running`."""
        assert self._client is not None
        return self._client.votes

    async def publish(self, event: Event[E], payload: E) -> None:
        """Publish an event to the current subscribers. For an event with a stream, use `streams.publish`.

        While NATS is unreachable, nats-py keeps messages until it has 2 MiB of them. Further events are dropped.

        Raises:
            EnvelopeError: the event is larger than a NATS message may be.
        """
        await self._send(event.subject, *encode(payload))

    async def _send(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        try:
            await self.broker.publish(data, subject, headers=headers)
        except nats.errors.OutboundBufferLimitError:
            self._dropped_log.warning(f"NATS is not reachable, and 2 MiB wait for it: {subject} is dropped")

    async def request(self, rpc: Rpc[Q, R], message: Q, *, timeout: float) -> R:
        """Send a request to another service, and wait at most `timeout` seconds for the reply.

        Raises:
            RefusedError: the service answered with an error.
            NoResponderError: no service subscribes to the subject.
            BusTimeoutError: no reply within `timeout` seconds.
            BusConnectError: the connection is broken.
        """
        data, headers = encode(message)
        with nats_errors(self.url, rpc.subject, timeout):
            answer = await self.broker.request(data, rpc.subject, headers=headers, timeout=timeout)
        return decode_reply(bytes(answer.body), dict(answer.headers or {}), rpc.reply)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ServiceApp]:
        """Connect and subscribe for the duration of the block. At its end, finish and answer the running requests.

        Raises:
            BusConnectError: NATS does not answer.
            OSError: the port of `/livez` is taken.
        """
        try:
            await asyncio.wait_for(self._start(), self._patience_s)
        except Exception as e:
            self._ending = True
            await self.broker.stop()
            why = self._last_error or str(e) or f"no answer within {self._patience_s:g} s"
            raise BusConnectError(f"no NATS server answers at {self.url}: {why}") from e
        spans = handing_over()
        handing = start_task(self._send_spans(spans), "spans") if spans is not None else None
        try:
            if (
                self.knows_tenants
            ):  # expired credentials close the connection for good, and only a restart reads new ones
                self.live["connection"] = lambda: self._client is not None and not self._client.is_closed
            async with serve_health(HealthSettings(), self.live, {"nats": lambda: self.connected}) as self.health_port:
                yield self
        finally:
            if handing is not None and spans is not None:
                handing.cancel()
                await asyncio.wait((handing,))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._publish_spans(spans), 1.0)
            await self._stop()

    async def _send_spans(self, spans: SpanQueue) -> None:
        """Send the spans of this process to the routers until the task is cancelled."""
        while True:
            await asyncio.sleep(SPANS_EVERY_S)
            await self._publish_spans(spans)

    async def _publish_spans(self, spans: SpanQueue) -> None:
        """Publish the queued spans. While NATS is unreachable, they stay in the queue. After another error, they are dropped."""
        while len(spans) and self.connected:
            found, dropped = spans.take(), spans.dropped - self._dropped_reported
            try:
                message = SpansRecorded(service=self.name, dropped=dropped, spans=tuple(found))
                await self.publish(contracts.SERVICE_SPAN_RECORDED.at(self.name), message)
                self._dropped_reported += dropped
            except Exception as e:
                log.info("could not publish %d spans, which are dropped: %s", len(found), e)
                spans.dropped += len(found)

    @property
    def connected(self) -> bool:
        """Whether the connection to NATS is open now, as far as this process knows."""
        return self._client is not None and self._client.is_connected

    async def _handled(self, handler: Callable[[Q], Awaitable[T]], model: type[Q], data: bytes) -> T | ErrorReply:
        """The result of the handler. A `BusError` becomes its `ErrorReply`; another error is logged and gets the code `internal`.

        Of errors that pass, few are logged, and in one line: they come with each request.
        """
        try:
            return await handler(decode(data, model))
        except BusError as e:
            return e.to_reply()
        except Exception as e:
            name = getattr(handler, "__qualname__", handler)
            for kind, (code, text) in self.passing.items():
                if isinstance(e, kind):
                    self._passing_log.warning(f"{name} failed for the time being ({code}): {first_line(e)}")
                    return ErrorReply(code=code, message=text, retryable=True)
            log.exception("%s failed", name)
            return ErrorReply(code="internal", message=f"{type(e).__name__}: {e}"[:4096])

    async def _start(self) -> None:
        await self.broker.start()
        # The server must have every subscription before the service reports that it is ready.
        client = await self.broker.connect()
        assert isinstance(client, NatsClient)  # as `_Broker` makes it
        self._client = client
        for subject, queue, hear in self._listeners:
            await self._client.subscribe(subject, queue=queue, cb=hear)
        await settled(self._client)

    async def _stop(self) -> None:
        self._ending = True
        client = self._client
        try:
            if client is not None:
                await client.flush(
                    ANSWER_S
                )  # nats-py would wait for each subscription's end, and for the last messages
            await self.broker.stop()
        except (nats.errors.Error, OSError) as e:  # there is no connection to drain, or nobody answers on it
            log.info("NATS is not reachable at the end of the %s: %s", self.name, str(e) or type(e).__name__)
            with contextlib.suppress(Exception):
                await super(NatsBroker, self.broker).stop()  # ends the subscribers, and does not drain the connection
            if client is not None:
                await client.close()


def _too_large(nbytes: int, most: int) -> ErrorReply:
    return EnvelopeError(f"the request has {nbytes} bytes; the limit of this subject is {most}").to_reply()


def _encoded(reply: Message) -> tuple[bytes, dict[str, str]]:
    try:
        return encode(reply)
    except EnvelopeError as e:
        log.error("cannot send a reply: %s; sending the error instead", e)
        return encode(e.to_reply())


async def _received(message: Any) -> Msg:
    found: Msg = message.raw_message
    return found


async def until_signalled() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
