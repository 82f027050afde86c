"""OpenTelemetry: one setup for services and clients, bounded span names, W3C context in NATS headers, spans for the router.

Spans go to the collector that the standard OTEL_EXPORTER_OTLP_* variables name. With WOOLY_TRACES=router, they also go over NATS
to the router, which keeps recent traces. If neither is configured, spans cost nothing. No code waits for a span: spans that do
not fit into the queue are dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from pydantic_settings import BaseSettings, SettingsConfigDict
from wooly_wis.traces import MAX_ATTRIBUTES, MAX_NAME, MAX_SPANS, MAX_TEXT, SpanRecord

from wooly_bus.envelope import MAX_PAYLOAD, TRACE_CONTEXT
from wooly_bus.errors import BusError
from wooly_bus.subjects import template

#: The most spans that wait to be sent to the router; further spans are dropped.
QUEUE_SPANS = 4096
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_LIMITS = SpanLimits(
    max_span_attributes=MAX_ATTRIBUTES, max_span_attribute_length=MAX_TEXT, max_events=MAX_ATTRIBUTES, max_links=8
)


class TracingError(BusError):
    """Traces cannot be exported with the configured protocol or packages."""

    code = "bus.tracing"


class TracingSettings(BaseSettings):
    """Destination of spans in addition to OTLP; for every service.

    Attributes:
        traces: `router`: services send their spans to the router, which keeps recent traces for `wooly trace` and REST
            (`wooly up` sets this value); `off`: services do not send spans to the router.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_", env_ignore_empty=True)

    traces: Literal["off", "router"] = "off"


class SpanQueue(SpanProcessor):
    """Queue of ended spans. Any thread may add a span. A full queue drops new spans.

    Attributes:
        dropped: number of spans that were lost so far, in this queue or during publishing.
    """

    def __init__(self, size: int = QUEUE_SPANS) -> None:
        self._waiting: deque[ReadableSpan] = deque()
        self._size = size
        self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Add an ended span to the queue."""
        context = span.context
        if context is None or not context.trace_flags.sampled:
            return
        if len(self._waiting) >= self._size:
            self.dropped += 1
        else:
            self._waiting.append(span)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> list[SpanRecord]:
        """Remove and return the oldest spans, as many as fit into one message."""
        found: list[SpanRecord] = []
        size = 0
        while self._waiting and len(found) < MAX_SPANS:
            record = record_of(self._waiting[0])
            size += len(record.model_dump_json().encode())
            if found and size > MAX_PAYLOAD // 2:
                break
            self._waiting.popleft()
            found.append(record)
        return found


def record_of(span: ReadableSpan) -> SpanRecord:
    """The record of a span for a message. Long names, texts and attribute lists are truncated."""
    context = span.context
    assert context is not None
    attributes = {}
    for key, value in list((span.attributes or {}).items())[:MAX_ATTRIBUTES]:
        if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
            value = str(value)
        if isinstance(value, float) and value - value != 0:  # infinite or NaN, which JSON cannot carry
            value = str(value)
        attributes[_shown(key, 64)] = value if isinstance(value, (bool, int, float)) else _shown(str(value), MAX_TEXT)
    start = span.start_time or 0
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else None,
        name=_shown(span.name, MAX_NAME) or "span",
        start_ns=start,
        end_ns=max(span.end_time or 0, start),
        error=span.status.status_code is trace.StatusCode.ERROR,
        attributes=attributes,
    )


def _shown(text: str, most: int) -> str:
    return _UNPRINTABLE.sub("?", text[:most])


_handing_over: SpanQueue | None = None


def handing_over() -> SpanQueue | None:
    """The queue of spans that this process sends to the router; None if this process sends no spans."""
    return _handing_over


def setup_tracing(service: str) -> bool:
    """Install a tracer provider if a destination for spans is configured. Returns whether one is configured.

    Raises:
        TracingError: OTLP is configured, but the exporter package is not installed, or the protocol is not supported.
    """
    global _handing_over
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    queue = SpanQueue() if TracingSettings().traces == "router" else None
    exporter = otlp_exporter()
    if queue is None and exporter is None:
        return False
    trace.set_tracer_provider(provider_of(service, queue, exporter))
    _handing_over = queue
    return True


def provider_of(service: str, queue: SpanQueue | None, exporter: SpanExporter | None) -> TracerProvider:
    """A tracer provider whose spans go to `queue`, and to `exporter` from a separate thread. Both queues are bounded."""
    provider = TracerProvider(resource=Resource.create({"service.name": f"wooly-{service}"}), span_limits=_LIMITS)
    if queue is not None:
        provider.add_span_processor(queue)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def otlp_exporter() -> SpanExporter | None:
    """The exporter to the collector that OpenTelemetry's own variables name; None if they name no collector.

    Raises:
        TracingError: the exporter package is not installed, or the protocol is not supported.
    """
    environ = os.environ
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not named or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    package = {"http/protobuf": "http", "grpc": "grpc"}.get(protocol or "http/protobuf")
    if package is None:
        raise TracingError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} is not supported; set it to http/protobuf or grpc"
        )
    try:
        exporter: SpanExporter
        if package == "http":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter()
        else:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter()
    except ImportError as e:
        raise TracingError(
            f"cannot export traces to OTEL_EXPORTER_OTLP_ENDPOINT: opentelemetry-exporter-otlp-proto-{package} is not "
            "installed; install it with pip, or unset the variable"
        ) from e
    return exporter


# -- context ---------------------------------------------------------------------------------------------------------


def tracer(service: str) -> trace.Tracer:
    """The tracer that creates the spans of a service."""
    return trace.get_tracer(f"wooly.{service}")


def traceparent(span: trace.Span | trace.SpanContext) -> str:
    """The context of a span as a W3C `traceparent`; empty if its trace is not recorded."""
    context = span if isinstance(span, trace.SpanContext) else span.get_span_context()
    if not context.is_valid or not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def context_of(text: str) -> Context:
    """The context that a `traceparent` names; a context without a trace if `text` is not a valid `traceparent`."""
    return TRACE_CONTEXT.extract({"traceparent": text}, context=Context())


def trace_id_of(text: str) -> str:
    """The trace id in a `traceparent`; empty if `text` is not a valid `traceparent`."""
    context = trace.get_current_span(context_of(text)).get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


@contextlib.contextmanager
def step(service: str, name: str, parent: str | None = None, **attributes: Any) -> Iterator[trace.Span]:
    """Open a span named `<service>.<name>` around a step. An exception marks the span as failed.

    If there is no trace, do not begin one.

    Args:
        service: the service that executes the step.
        name: name of the step, from a fixed set. Ids belong into `attributes`.
        parent: `traceparent` of the parent span; None: the current span is the parent.
        attributes: attributes of the span; an attribute whose value is None is left out.
    """
    context = None if parent is None else context_of(parent)
    if not trace.get_current_span(context).get_span_context().is_valid:
        yield trace.INVALID_SPAN
        return
    known = {k: v for k, v in attributes.items() if v is not None}
    with tracer(service).start_as_current_span(f"{service}.{name}", context=context, attributes=known) as span:
        yield span


@contextlib.contextmanager
def consumer_span(service: str, subject: str, headers: Mapping[str, str] | None) -> Iterator[None]:
    """Open a span around the handling of one message, as a child of the sender's span. If the sender has no trace, open none.

    The name of the span contains the template of the subject, without the id, because the number of names must stay small.
    The whole subject is an attribute.
    """
    context = TRACE_CONTEXT.extract(dict(headers or {}), context=Context())
    if not trace.get_current_span(context).get_span_context().is_valid:
        yield
        return
    with trace.get_tracer(f"wooly.{service}").start_as_current_span(
        f"{template(subject)} process",
        context=context,
        kind=trace.SpanKind.CONSUMER,
        attributes={"messaging.system": "nats", "messaging.destination.name": subject},
    ):
        yield


def mark_failed(code: str) -> None:
    """Mark the current span as failed with the error `code`."""
    trace.get_current_span().set_status(trace.StatusCode.ERROR, code)
