"""Spans of a process: recording, publishing to the router, dropped spans, export to a collector."""

import http.server
import threading

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from wooly_bus import app as service_app
from wooly_bus import contracts, tracing
from wooly_bus.app import ServiceApp
from wooly_bus.contract_types import Rpc
from wooly_bus.envelope import MAX_PAYLOAD
from wooly_bus.tracing import SpanQueue, TracingError, context_of, provider_of, record_of, step, traceparent
from wooly_wis.messages import CloseSessionReply, CloseSessionRequest
from wooly_wis.traces import MAX_ATTRIBUTES, MAX_SPANS, SpansRecorded

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def queue(monkeypatch):
    """Spans of this process's services."""
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    found = SpanQueue(1000)
    provider = provider_of("test", found, None)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield found
    provider.shutdown()


def spans(queue):
    found = []
    while len(queue):
        found += queue.take()
    return {s.name: s for s in found}


def test_step_joins_current_trace_and_begins_none(queue):
    with step("router", "place") as span:
        assert not span.is_recording()
    with step("router", "outer", PARENT, task_id="t", nothing=None), step("router", "inner"):
        pass
    found = spans(queue)
    assert set(found) == {"router.outer", "router.inner"}
    assert found["router.outer"].parent_id == "b" * 16 and found["router.outer"].trace_id == "a" * 32
    assert found["router.inner"].parent_id == found["router.outer"].span_id
    assert found["router.outer"].attributes == {"task_id": "t"} and not found["router.outer"].error


def test_step_raising_is_marked_failed(queue):
    with pytest.raises(ZeroDivisionError), step("router", "outer", PARENT):
        raise ZeroDivisionError
    assert spans(queue)["router.outer"].error


@pytest.mark.parametrize(
    "text", ["", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'b' * 16}", "x" * 9999]
)
def test_step_invalid_traceparent_records_nothing(queue, text):
    assert not trace.get_current_span(context_of(text)).get_span_context().is_valid
    with step("router", "place", text):
        pass
    assert not len(queue)


def test_step_unsampled_parent_records_nothing(queue):
    with step("router", "place", PARENT[:-1] + "0") as span:
        assert not span.is_recording() and traceparent(span) == ""
    assert not len(queue)


def test_span_queue_full_drops_and_counts(queue):
    small = SpanQueue(3)
    provider = provider_of("test", small, None)
    for i in range(5):
        provider.get_tracer("t").start_span(f"s{i}").end()
    assert small.dropped == 2 and [s.name for s in small.take()] == ["s0", "s1", "s2"] and len(small) == 0


def test_record_of_large_span_is_truncated(queue):
    many = {f"k{i}\x1b": "v" * 1000 for i in range(100)}
    provider = provider_of("test", queue, None)
    span = provider.get_tracer("t").start_span(
        "n\x00" + "n" * 500, Context(), attributes={"big": 1 << 70, "inf": float("inf")} | many
    )
    span.end()
    record = record_of(span)
    assert len(record.attributes) <= MAX_ATTRIBUTES and len(record.name) == 128 and "\x00" not in record.name
    assert all(len(v) <= 256 and "\x1b" not in k for k, v in record.attributes.items())


def test_span_queue_take_fits_one_message(queue):
    tracer = provider_of("test", queue, None).get_tracer("t")
    for i in range(300):
        tracer.start_span("s", attributes={f"k{k}": "ä" * 256 for k in range(30)} if i < 100 else {}).end()
    batches = []
    while len(queue):
        batches.append(queue.take())
    assert sum(len(b) for b in batches) == 300 and len(batches) > 2
    for batch in batches:
        assert len(batch) <= MAX_SPANS
        assert len(SpansRecorded(service="t", spans=tuple(batch)).model_dump_json().encode()) < MAX_PAYLOAD


@pytest.mark.connected
async def test_service_publishes_spans_and_dropped_count(nats_server, queue, monkeypatch):
    monkeypatch.setattr(service_app, "handing_over", lambda: queue)
    monkeypatch.setattr(service_app, "SPANS_EVERY_S", 0.01)
    heard = []

    async def on_spans(message):
        heard.append(message)

    async def answer(request):
        return CloseSessionReply(closed=True)

    router, service = ServiceApp("router", nats_server), ServiceApp("service", nats_server)
    router.listen(contracts.SERVICE_SPAN_RECORDED, on_spans)
    rpc = Rpc("wooly.v1.rpc.service.thing.ask", CloseSessionRequest, CloseSessionReply)
    service.serve(rpc, answer)
    queue.dropped = 7
    request = CloseSessionRequest(session_id="a")
    async with router.running(), service.running():
        await router.request(rpc, request, timeout=5)  # without a trace: no span
        with step("router", "asking", PARENT):
            await router.request(rpc, request, timeout=5)
        while sum(len(m.spans) for m in heard) < 2:
            await service_app.asyncio.sleep(0.01)
    found = {s.name: s for m in heard for s in m.spans}
    assert set(found) == {"router.asking", f"{rpc.subject} process"}
    assert found[f"{rpc.subject} process"].parent_id == found["router.asking"].span_id
    # both apps of this process share the queue: each reports the spans dropped since its own previous message
    by_service = {name: sum(m.dropped for m in heard if m.service == name) for name in {m.service for m in heard}}
    assert set(by_service.values()) == {7}


def test_otlp_exporter_disabled_by_variables_is_off(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert tracing.otlp_exporter() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.setup_tracing("test") is False
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(TracingError, match="carrier-pigeon"):
        tracing.otlp_exporter()


def test_collector_receives_same_spans_as_queue(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        queue = SpanQueue()
        provider = provider_of("router", queue, tracing.otlp_exporter())
        provider.get_tracer("t").start_span("router.place").end()
        provider.shutdown()
    finally:
        server.shutdown()
        server.server_close()
    ((path, body),) = got
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    attributes = {a.key: a.value.string_value for a in sent.resource.attributes}
    assert path == "/v1/traces" and attributes["service.name"] == "wooly-router"
    assert sent.scope_spans[0].spans[0].span_id.hex() == queue.take()[0].span_id
