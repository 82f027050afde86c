"""ServiceApp over a real nats-server: replies, errors, events, order, traces, shutdown."""

import asyncio
import logging
from pathlib import Path

import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from wooly_bus import tracing
from wooly_bus.actor import Actor
from wooly_bus.app import ServiceApp
from wooly_bus.contract_types import Event, Rpc
from wooly_bus.envelope import MAX_PAYLOAD
from wooly_bus.errors import BusConnectError, BusTimeoutError, NoResponderError, RefusedError
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.messages import CloseSessionReply, CloseSessionRequest, ErrorReply, Message, NodesRequest

pytestmark = pytest.mark.connected


class Blob(Message):
    text: str


def close(session_id="a", reason=""):
    return CloseSessionRequest(session_id=session_id, reason=reason)


async def test_request_between_services_returns_reply_or_refusal(nats_server):
    async def handler(request):
        if request.reason:
            raise RefusedError("test.no", request.reason, retryable=True)
        return CloseSessionReply(closed=True)

    rpc = Rpc("wooly.v1.rpc.test.reply.ask", CloseSessionRequest, CloseSessionReply)
    server, client = ServiceApp("server", nats_server), ServiceApp("client", nats_server)
    server.serve(rpc, handler)
    async with server.running(), client.running():
        assert (await client.request(rpc, close(), timeout=5)).closed
        with pytest.raises(RefusedError, match="because") as refused:
            await client.request(rpc, close(reason="because"), timeout=5)
        assert refused.value.code == "test.no" and refused.value.retryable
        with pytest.raises(NoResponderError, match="no service answers"):
            await client.request(
                Rpc("wooly.v1.rpc.test.reply.nobody", CloseSessionRequest, CloseSessionReply), close(), timeout=5
            )


async def test_unexpected_error_is_internal_and_logged(nats_server, caplog):
    async def handler(request):
        raise ZeroDivisionError("oops")

    rpc = Rpc("wooly.v1.rpc.test.internal.ask", CloseSessionRequest, CloseSessionReply)
    app = ServiceApp("test", nats_server)
    app.serve(rpc, handler)
    async with app.running():
        with pytest.raises(RefusedError, match="ZeroDivisionError: oops") as caught:
            await app.request(rpc, close(), timeout=5)
        assert caught.value.code == "internal"
        with pytest.raises(RefusedError, match="session_id") as malformed:
            await app.request(Rpc(rpc.subject, NodesRequest, CloseSessionReply), NodesRequest(), timeout=5)
        assert malformed.value.code == "bus.envelope"
    assert [r.levelno for r in caplog.records if "handler failed" in r.getMessage()] == [logging.ERROR]


async def test_error_that_passes_is_a_retryable_refusal_and_fills_no_log(nats_server, caplog):
    async def handler(request):
        raise ConnectionRefusedError("secret detail\nof many lines")

    rpc = Rpc("wooly.v1.rpc.test.passing.ask", CloseSessionRequest, CloseSessionReply)
    app = ServiceApp("test", nats_server)
    app.passing[ConnectionError] = "test.away", "the database does not answer"
    app.serve(rpc, handler)
    async with app.running():
        for _ in range(20):
            with pytest.raises(RefusedError, match=r"^the database does not answer$") as caught:
                await app.request(rpc, close(), timeout=5)
            assert caught.value.code == "test.away" and caught.value.retryable
    (told,) = [r for r in caplog.records if "failed" in r.getMessage()]
    assert (
        told.getMessage().endswith("handler failed for the time being (test.away): secret detail") and not told.exc_info
    )


async def test_reply_too_large_becomes_error(nats_server):
    async def handler(request):
        return Blob(text="x" * MAX_PAYLOAD)

    rpc = Rpc("wooly.v1.rpc.test.large.ask", CloseSessionRequest, Blob)
    app = ServiceApp("test", nats_server)
    app.serve(rpc, handler)
    async with app.running():
        with pytest.raises(RefusedError, match="the limit of NATS is"):
            await app.request(rpc, close(), timeout=5)


async def test_request_without_reply_times_out(nats_server):
    release = asyncio.Event()

    async def handler(request):
        await release.wait()
        return CloseSessionReply(closed=True)

    rpc = Rpc("wooly.v1.rpc.test.silent.ask", CloseSessionRequest, CloseSessionReply)
    app = ServiceApp("test", nats_server)
    app.serve(rpc, handler)
    async with app.running():
        with pytest.raises(BusTimeoutError, match=r"within 0\.2 s"):
            await app.request(rpc, close(), timeout=0.2)
        release.set()


async def test_slow_request_blocks_others_only_in_alone_handler(nats_server):
    class Slow(Actor):
        def __init__(self):
            super().__init__()
            self.seen, self.gate = [], asyncio.Event()

        async def on_free(self, request):
            if request.session_id == "slow":
                await self.gate.wait()
            return CloseSessionReply(closed=True)

        async def on_alone(self, request):
            self.seen.append(("in", request.session_id))
            await asyncio.sleep(0.001)
            self.seen.append(("out", request.session_id))
            return CloseSessionReply(closed=True)

    free, alone = [
        Rpc(s, CloseSessionRequest, CloseSessionReply)
        for s in ("wooly.v1.rpc.test.slow.free", "wooly.v1.rpc.test.slow.alone")
    ]
    app, actor = ServiceApp("test", nats_server), Slow()
    app.serve(free, actor.on_free)
    app.serve(alone, actor.alone(actor.on_alone))
    async with app.running():
        slow = asyncio.create_task(app.request(free, close("slow"), timeout=5))
        await app.request(free, close("fast"), timeout=5)
        assert not slow.done()
        actor.gate.set()
        await slow
        names = [f"s{i}" for i in range(20)]
        await asyncio.gather(*[app.request(alone, close(n), timeout=5) for n in names])
    assert sorted(actor.seen[0::2]) == sorted(("in", n) for n in names)
    assert [("out", n) for _, n in actor.seen[0::2]] == actor.seen[1::2]


async def test_actor_alone_keeps_order_of_arrival():
    seen = []

    async def handler(message):
        seen.append(message.session_id)
        await asyncio.sleep(0 if len(seen) % 2 else 0.001)

    alone = Actor().alone(handler)
    names = [f"s{i}" for i in range(50)]
    await asyncio.gather(*[alone(close(n)) for n in names])
    assert seen == names


async def test_events_arrive_in_order_and_malformed_are_dropped(nats_server, caplog):
    heard, event = [], Event("wooly.v1.evt.test.thing.happened", CloseSessionRequest)
    done = asyncio.Event()

    async def handler(event):
        heard.append(event.session_id)
        if event.session_id == "bad":
            raise ValueError("cannot")
        if event.session_id == "last":
            done.set()

    app = ServiceApp("test", nats_server)
    app.listen(event, handler)
    async with app.running():
        for name in ("a", "bad", "b"):
            await app.publish(event, close(name))
        await app.publish(Event(event.subject, NodesRequest), NodesRequest())
        await app.publish(event, close("last"))
        await asyncio.wait_for(done.wait(), 5)
    assert heard == ["a", "bad", "b", "last"]
    dropped = [r.getMessage() for r in caplog.records if "dropped an event" in r.getMessage()]
    assert len(dropped) == 2 and "cannot" in dropped[0] and "not a CloseSessionRequest" in dropped[1]


async def test_running_service_answers_at_once(nats_server):
    async def handler(request):
        return CloseSessionReply(closed=True)

    client = ServiceApp("client", nats_server)
    async with client.running():
        for i in range(20):
            rpc, server = (
                Rpc(f"wooly.v1.rpc.test.known.ask.{i}", CloseSessionRequest, CloseSessionReply),
                ServiceApp("server", nats_server),
            )
            server.serve(rpc, handler)
            async with server.running():
                assert (await client.request(rpc, close(), timeout=5)).closed


async def test_running_request_is_answered_at_shutdown(nats_server):
    entered, rpc = asyncio.Event(), Rpc("wooly.v1.rpc.test.ending.ask", CloseSessionRequest, CloseSessionReply)

    async def handler(request):
        entered.set()
        await asyncio.sleep(0.3)
        return CloseSessionReply(closed=True)

    server, client = ServiceApp("server", nats_server), ServiceApp("client", nats_server)
    server.serve(rpc, handler)
    async with client.running():
        async with server.running():
            asked = asyncio.create_task(client.request(rpc, close(), timeout=5))
            waiting = asyncio.create_task(entered.wait())
            await asyncio.wait((asked, waiting), return_when=asyncio.FIRST_COMPLETED)
            assert not asked.done()
        assert (await asked).closed


async def test_queue_group_shares_requests(nats_server):
    counts = [0, 0]
    rpc = Rpc("wooly.v1.rpc.test.shared.ask", CloseSessionRequest, CloseSessionReply, queue="q")
    apps = [ServiceApp("test", nats_server) for _ in counts]
    for i, app in enumerate(apps):

        async def handler(request, i=i):
            counts[i] += 1
            return CloseSessionReply(closed=True)

        app.serve(rpc, handler)
    async with apps[0].running(), apps[1].running():
        for _ in range(30):
            await apps[0].request(rpc, close(), timeout=5)
    assert sum(counts) == 30


async def test_running_without_nats_server_raises():
    app = ServiceApp("test", "nats://127.0.0.1:9", patience_s=0.5)
    with pytest.raises(BusConnectError, match=r"nats://127\.0\.0\.1:9: .*(refused|Connect)"):
        async with app.running():
            raise AssertionError("connected to nothing")


async def test_span_of_request_is_child_of_sender_and_name_has_no_id(nats_server, monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)

    async def handler(request):
        return ErrorReply(code="test.no", message="no")

    rpc = Rpc("wooly.v1.rpc.test.span.ask.id-1", CloseSessionRequest, CloseSessionReply)
    app = ServiceApp("test", nats_server)
    app.serve(rpc, handler)
    async with app.running():
        with provider.get_tracer("t").start_as_current_span("asking") as parent, pytest.raises(RefusedError):
            await app.request(rpc, close(), timeout=5)
    span = next(s for s in exporter.get_finished_spans() if s.name == "wooly.v1.rpc.test.span.ask process")
    assert span.parent.span_id == parent.get_span_context().span_id
    assert span.attributes["messaging.destination.name"] == rpc.subject
    assert span.kind is trace.SpanKind.CONSUMER and span.status.description == "test.no"


def test_setup_tracing_without_endpoint_is_off(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert tracing.setup_tracing("test") is False


async def test_service_ends_while_nats_is_unreachable():
    with start_nats_server() as url:
        app = ServiceApp("test", url)
        running = app.running()
        await running.__aenter__()
    while app.broker._connection.is_connected:
        await asyncio.sleep(0.01)
    await running.__aexit__(None, None, None)


async def test_service_ends_while_nats_is_silent(caplog):
    """A cut link: the connection stands, and nobody answers on it."""
    caplog.set_level(logging.INFO, "wooly.bus")
    with start_nats_server() as url:
        (server,) = [p for p in psutil.Process().children() if url.rsplit(":", 1)[1] in ports_of(p)]
        app = ServiceApp("test", url)

        async def on_close(request):
            raise AssertionError

        app.serve(Rpc("wooly.v1.rpc.test.silent.ask", CloseSessionRequest, CloseSessionReply), on_close)
        running = app.running()
        await running.__aenter__()
        server.suspend()
        while not all(state == "T" for state in thread_states(server)):  # a thread may still answer until it is stopped
            await asyncio.sleep(0.001)
        try:
            await running.__aexit__(None, None, None)
        finally:
            server.resume()
    assert "NATS is not reachable at the end of the test" in caplog.text and app._client.is_closed


def thread_states(process):
    """The state of each thread of a process, as in /proc: T is stopped."""
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")]


def ports_of(process):
    """The ports on which a process listens."""
    return [str(c.laddr.port) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]


async def test_service_outlasts_a_long_time_without_nats(caplog):
    """nats-py keeps 2 MiB of messages for the server. What is published then must not end the service."""
    heard = []
    event = Event("wooly.v1.evt.test.text.written", Blob)

    async def hear(blob):
        heard.append(blob.text[:5])

    with start_nats_server() as url:
        app = ServiceApp("test", url)
        app.listen(event, hear)
        running = app.running()
        await running.__aenter__()
    while app.connected:
        await asyncio.sleep(0.01)
    for number in range(8):
        await app.publish(event, Blob(text=f"old {number}" + "x" * 400_000))
    assert "2 MiB wait for it: wooly.v1.evt.test.text.written is dropped" in caplog.text and not app.reconnects
    with start_nats_server("-p", url.rsplit(":", 1)[1]):
        while not app.connected:
            await asyncio.sleep(0.01)
        await app.publish(event, Blob(text="new 0"))
        while "new 0" not in heard:
            await asyncio.sleep(0.01)
        assert app.reconnects == 1 and heard[0] == "old 0"
        await running.__aexit__(None, None, None)
