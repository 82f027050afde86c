"""The frame of every service: a FastStream broker, handlers on subjects, replies in the one shape, an orderly end.

`ServiceApp` only wires. What a service decides is in its actors and their pure cores.
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
from nats.aio.client import Client
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
from wooly_bus.nats_client import NatsClient
from wooly_bus.rpc import nats_errors, settled
from wooly_bus.supervision import start_task
from wooly_bus.tracing import SpanQueue, consumer_span, handing_over, mark_failed

log = logging.getLogger("wooly.bus")
E = TypeVar("E", bound=Message)
T = TypeVar("T")

#: Requests on one subject that may be in work at once. Actors order what must be ordered.
CONCURRENT_REQUESTS = 64
#: The same of tenants' clients, of all tenants and of one: no tenant can have all of them.
TENANTS_REQUESTS, TENANT_REQUESTS = 128, 32
#: Seconds that requests in work have to finish when a service ends.
GRACE_S = 5.0
#: Seconds between two messages with spans.
SPANS_EVERY_S = 0.25
#: The span of a message whose sender has no trace.
_UNTRACED: contextlib.nullcontext[None] = contextlib.nullcontext()


class _Broker(NatsBroker):
    """FastStream's, on a client that no server can talk out of TLS."""

    async def _connect(self) -> Client:
        client = NatsClient()
        await client.connect(**self._connection_kwargs)
        self.config.connect(client)
        return client


class ServiceApp:
    """One service's connection to NATS.

    Args:
        name: service name, as in subjects.
        nats_url: where NATS is; several servers of one cluster are separated by commas.
        patience_s: seconds to wait for NATS at the start.

    Attributes:
        live: what must hold for the process to be worth keeping, by name; asked by `/livez` (see `health`).
        health_port: where that is answered, inside `running`; None where it is not configured.
        tenant_requests: requests of one tenant on one subject that are worked on at once; further ones are refused.
        knows_tenants: NATS lets tenants' clients speak for their tenant alone; see `serve_tenants`.

    Raises:
        CredentialsError: what is to be shown to NATS cannot be read.
        BusConnectError: the authorities to trust cannot be read.
    """

    def __init__(self, name: str, nats_url: str, *, patience_s: float = 30.0) -> None:
        access = Access.of_service(nats_url)
        tls = access.tls()
        shows = None if access.credentials is None else Shows(access.credentials)
        self.name = name
        self.url = shown(nats_url)
        self.knows_tenants = shows is not None
        self.tenant_requests = TENANT_REQUESTS
        self._patience_s = patience_s
        self._last_error = ""
        self._ending = False
        self._client: Client | None = None
        self._heard: list[tuple[str, str, Callable[[Msg], Awaitable[None]]]] = []
        self._dropped_told = 0
        self.live: dict[str, Check] = {}
        self.health_port: int | None = None
        self.broker = _Broker(
            nats_url.split(","),
            logger=None,
            name=f"wooly-{name}",
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            connect_timeout=3,
            graceful_timeout=GRACE_S,
            # Control traffic is core NATS: there is nothing to acknowledge, and nothing may be acknowledged by surprise.
            ack_policy=AckPolicy.MANUAL,
            # Handlers take the message alone: what injects more would be built for each subject, and run for each request.
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
        if text != self._last_error:  # the same one comes every second while NATS is away
            log.warning("NATS at %s: %s", self.url, text)
        self._last_error = text

    async def _on_disconnect(self) -> None:
        if not self._ending:
            log.warning("the connection to NATS at %s is gone; trying again", self.url)

    async def _on_closed(self) -> None:
        if not self._ending:  # nats-py gives up where credentials end, and nowhere else
            why = self._last_error or "its credentials have ended"
            cure = "renew what WOOLY_NATS_CREDS names, and start this service again"
            log.error("the connection to NATS at %s is closed for good: %s; %s", self.url, why, cure)

    async def _on_reconnect(self) -> None:
        self._last_error = ""
        log.info("connected to NATS at %s again", self.url)

    def serve(
        self, rpc: Rpc[Q, R], handler: Callable[[Q], Awaitable[R]], *, at_once: int = CONCURRENT_REQUESTS
    ) -> None:
        """Answer the requests of a contract: with the handler's reply, or with the `ErrorReply` of the exception it raised.

        Args:
            rpc: the contract.
            handler: makes the reply.
            at_once: requests that may be in work at once; more of them wait for these.

        Raises:
            ValueError: the contract is for tenants' clients only.
        """
        if rpc.tenants_only:
            raise ValueError(f"{rpc.subject} is served to tenants' clients only")

        async def answer(message: Msg) -> None:
            await self._answer(rpc.subject, message, lambda: _handled(handler, rpc.request, message.data))

        self._subscribe(rpc.subject, rpc.queue, answer, at_once)

    def serve_tenants(
        self, rpc: Rpc[Q, R], handler: Callable[[Q, str], Awaitable[R]], *, at_once: int = TENANTS_REQUESTS
    ) -> None:
        """Answer what tenants' clients ask at `rpc.for_tenant(tenant)`: the handler gets the tenant, too.

        NATS lets nobody publish there but that tenant's clients, so it need not be proved again. Only where NATS
        knows tenants: without credentials, anybody could say to be anybody, and nothing is served. A tenant that asks for too
        much at once is refused before what it says is read.

        Raises:
            ValueError: the contract names no scope, so no credentials permit a client to ask.
        """
        if rpc.scope is None:
            raise ValueError(f"{rpc.subject} cannot be served to tenants' clients: its contract names no scope")
        if not self.knows_tenants:
            return
        subject, most_bytes = rpc.subject, rpc.most_bytes
        working: Counter[str] = Counter()

        async def answer(message: Msg) -> None:
            tenant = subjects.tenant_of(message.subject.rpartition(".")[2])
            if message.reply and not subjects.is_inbox_of(message.reply, tenant):
                log.warning("%s dropped: its reply would go to another than %s, who asks", subject, tenant)
                return

            async def bound(request: Q) -> R:
                return await handler(request, tenant)

            async def limited() -> R | ErrorReply:
                if len(message.data) > most_bytes:
                    return _too_large(len(message.data), most_bytes)
                most = self.tenant_requests * at_once // TENANTS_REQUESTS
                if working[tenant] >= most:
                    return self._too_many(subject, tenant, most)
                working[tenant] += 1
                try:
                    return await _handled(bound, rpc.request, message.data)
                finally:
                    working[tenant] -= 1
                    if not working[tenant]:
                        del working[tenant]

            await self._answer(subject, message, limited)

        self._subscribe(f"{subject}.*", rpc.queue, answer, at_once)

    def _too_many(self, subject: str, tenant: str, most: int) -> ErrorReply:
        return ErrorReply(
            code=f"{self.name}.limit",
            message=f"tenant {tenant} has {most} requests of {subjects.template(subject)} in work here, and may "
            "have no more at a time; wait for their answers",
            retryable=True,
        )

    async def _answer(self, subject: str, message: Msg, handled: Callable[[], Awaitable[Message]]) -> None:
        with consumer_span(self.name, subject, message.headers or {}):
            if subjects.is_service(message.reply):
                log.warning("%s dropped: its reply would go to %s", subject, message.reply)
                return
            reply = await handled()
            if isinstance(reply, ErrorReply):
                mark_failed(reply.code)
            if message.reply:
                data, headers = _encoded(reply)
                await self.broker.publish(data, message.reply, headers=headers)

    def _subscribe(self, subject: str, queue: str, answer: Callable[[Msg], Awaitable[None]], at_once: int) -> None:
        self.broker.subscriber(subject, queue=queue, decoder=_received, no_reply=True, max_workers=at_once)(answer)

    def listen(self, event: EventContract[E], handler: Callable[[E], Awaitable[None]]) -> None:
        """Hear events of all addresses, one after the other. A malformed event is logged and dropped: it will not get better.

        NATS's client itself calls the handler: a thousand executors send a thousand heartbeats a second, and a broker's
        middleware for each would take most of a core.
        """
        subject, model = event.pattern, event.payload

        async def hear(message: Msg) -> None:
            headers = message.headers or {}
            with consumer_span(self.name, subject, headers) if "traceparent" in headers else _UNTRACED:
                failure = await _handled(handler, model, message.data)
                if isinstance(failure, ErrorReply):
                    log.warning("%s dropped: %s", subject, failure.message)
                    mark_failed(failure.code)

        self._heard.append((subject, event.queue, hear))

    def jetstream(self) -> JetStreamContext:
        """JetStream by this service's connection; inside `running`."""
        assert self._client is not None
        return self._client.jetstream()

    async def publish(self, event: Event[E], payload: E) -> None:
        """Send an event to those who listen now. `streams.publish` sends one that a stream is to keep.

        Raises:
            EnvelopeError: larger than NATS carries.
        """
        data, headers = encode(payload)
        await self.broker.publish(data, event.subject, headers=headers)

    async def request(self, rpc: Rpc[Q, R], message: Q, *, timeout: float) -> R:
        """Ask another service and wait at most `timeout` seconds.

        Raises:
            RefusedError: the service answered with an error.
            NoResponderError: nobody serves the subject.
            BusTimeoutError: no answer in time.
            BusConnectError: the connection is broken.
        """
        data, headers = encode(message)
        with nats_errors(self.url, rpc.subject, timeout):
            answer = await self.broker.request(data, rpc.subject, headers=headers, timeout=timeout)
        return decode_reply(bytes(answer.body), dict(answer.headers or {}), rpc.reply)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ServiceApp]:
        """Connected and subscribed inside the block. At its end, requests in work are finished and answered.

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
        handing = start_task(self._hand_over(spans), "spans") if spans is not None else None
        try:
            if self.knows_tenants:  # credentials that end close the connection for good: only a restart reads new ones
                self.live["connection"] = lambda: self._client is not None and not self._client.is_closed
            async with serve_health(HealthSettings(), self.live, {"nats": self._connected}) as self.health_port:
                yield self
        finally:
            if handing is not None and spans is not None:
                handing.cancel()
                await asyncio.wait((handing,))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._publish_spans(spans), 1.0)
            await self._stop()

    async def _hand_over(self, spans: SpanQueue) -> None:
        """Send this process's spans to the routers, for ever."""
        while True:
            await asyncio.sleep(SPANS_EVERY_S)
            await self._publish_spans(spans)

    async def _publish_spans(self, spans: SpanQueue) -> None:
        """Send what waits. While NATS is away it goes on waiting, as far as there is room; what fails otherwise is dropped."""
        while len(spans) and self._connected():
            found, dropped = spans.take(), spans.dropped - self._dropped_told
            try:
                message = SpansRecorded(service=self.name, dropped=dropped, spans=tuple(found))
                await self.publish(contracts.SERVICE_SPAN_RECORDED.at(self.name), message)
                self._dropped_told += dropped
            except Exception as e:
                log.info("%d spans are lost: %s", len(found), e)
                spans.dropped += len(found)

    def _connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def _start(self) -> None:
        await self.broker.start()
        # The server has every subscription before anybody is told that the service is there.
        self._client = await self.broker.connect()
        for subject, queue, hear in self._heard:
            await self._client.subscribe(subject, queue=queue, cb=hear)
        await settled(self._client)

    async def _stop(self) -> None:
        self._ending = True
        try:
            await self.broker.stop()
        except (nats.errors.ConnectionReconnectingError, nats.errors.ConnectionClosedError):  # nobody to take leave of
            if self._client is not None:
                await self._client.close()


async def _handled(handler: Callable[[Q], Awaitable[T]], model: type[Q], data: bytes) -> T | ErrorReply:
    """The handler's result; an error becomes an `ErrorReply`, an unexpected one is logged and called internal."""
    try:
        return await handler(decode(data, model))
    except BusError as e:
        return e.to_reply()
    except Exception as e:
        log.exception("%s failed", getattr(handler, "__qualname__", handler))
        return ErrorReply(code="internal", message=f"{type(e).__name__}: {e}"[:4096])


def _too_large(nbytes: int, most: int) -> ErrorReply:
    return EnvelopeError(f"a request of {nbytes} bytes, at most {most} are read here").to_reply()


def _encoded(reply: Message) -> tuple[bytes, dict[str, str]]:
    try:
        return encode(reply)
    except EnvelopeError as e:
        log.error("a reply could not be sent: %s", e)
        return encode(e.to_reply())


async def _received(message: Any) -> Msg:
    found: Msg = message.raw_message
    return found


async def until_signalled() -> None:
    """Return at SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
