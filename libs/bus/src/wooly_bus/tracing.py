"""OpenTelemetry: one setup for services and clients, bounded span names, W3C context in NATS headers, spans for the router.

Spans go where the standard OTEL_EXPORTER_OTLP_* variables say, and, with WOOLY_TRACES=router, over NATS to the router, which
keeps recent traces. Where neither is said they cost nothing. Nothing waits for a span: what does not fit is dropped and counted.
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

#: Spans that wait to be handed over; beyond it they are dropped.
QUEUE_SPANS = 4096
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_LIMITS = SpanLimits(
    max_span_attributes=MAX_ATTRIBUTES, max_span_attribute_length=MAX_TEXT, max_events=MAX_ATTRIBUTES, max_links=8
)


class TracingError(BusError):
    """Traces cannot be exported as configured."""

    code = "bus.tracing"


class TracingSettings(BaseSettings):
    """Where spans go besides OTLP; for every service.

    Attributes:
        traces: `router`: services hand their spans to the router, which keeps recent traces for `wooly trace` and REST
            (`wooly up` sets it); `off`: they do not.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_", env_ignore_empty=True)

    traces: Literal["off", "router"] = "off"


class SpanQueue(SpanProcessor):
    """Ended spans, until somebody takes them. Any thread may end one; a full queue drops it.

    Attributes:
        dropped: spans that were lost so far, here or on their way.
    """

    def __init__(self, size: int = QUEUE_SPANS) -> None:
        self._waiting: deque[ReadableSpan] = deque()
        self._size = size
        self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        """A span ended."""
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
        """The oldest spans, as many as one message carries; they are in the queue no more."""
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
    """A span as it travels: cut to what a message may carry."""
    context = span.context
    assert context is not None
    attributes = {}
    for key, value in list((span.attributes or {}).items())[:MAX_ATTRIBUTES]:
        if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
            value = str(value)
        if isinstance(value, float) and value - value != 0:  # infinite, or none
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
    return _HIDDEN.sub("?", text[:most])


_handing_over: SpanQueue | None = None


def handing_over() -> SpanQueue | None:
    """Spans that this process hands to the router; None if it does not."""
    return _handing_over


def setup_tracing(service: str) -> bool:
    """Install a tracer provider, if spans are to go anywhere. True if they are.

    Raises:
        TracingError: OTLP is configured, but the exporter package is not installed or there is none for its protocol.
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
    """A tracer provider whose spans go to `queue`, and to `exporter` from a thread of its own. Both bound what waits."""
    provider = TracerProvider(resource=Resource.create({"service.name": f"wooly-{service}"}), span_limits=_LIMITS)
    if queue is not None:
        provider.add_span_processor(queue)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def otlp_exporter() -> SpanExporter | None:
    """What sends spans to a collector, as OpenTelemetry's own variables say; None if they name none.

    Raises:
        TracingError: its package is not installed, or there is none for the protocol.
    """
    environ = os.environ
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not named or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "none":
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    package = {"http/protobuf": "http", "grpc": "grpc"}.get(protocol or "http/protobuf")
    if package is None:
        raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; http/protobuf and grpc are spoken here")
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
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set; install opentelemetry-exporter-otlp-proto-{package} to export traces"
        ) from e
    return exporter


# -- context ---------------------------------------------------------------------------------------------------------


def tracer(service: str) -> trace.Tracer:
    """Where a service's spans begin."""
    return trace.get_tracer(f"wooly.{service}")


def traceparent(span: trace.Span | trace.SpanContext) -> str:
    """A span's context in W3C's form; empty if nothing is recorded of its trace."""
    context = span if isinstance(span, trace.SpanContext) else span.get_span_context()
    if not context.is_valid or not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def context_of(text: str) -> Context:
    """The context that a `traceparent` names: one without a trace if it is none."""
    return TRACE_CONTEXT.extract({"traceparent": text}, context=Context())


def trace_id_of(text: str) -> str:
    """The trace's id in a `traceparent`; empty if it is none."""
    context = trace.get_current_span(context_of(text)).get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


@contextlib.contextmanager
def step(service: str, name: str, parent: str | None = None, **attributes: Any) -> Iterator[trace.Span]:
    """A span called `<service>.<name>` around a step; its child where nothing else is current. An exception marks it failed.

    Args:
        service: whose.
        name: of a fixed set: ids are attributes.
        parent: a `traceparent` to be under; None: what is current. Where there is no trace, none is begun.
        attributes: what there is to say; None says nothing.
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
    """A span around the handling of one message, child of the sender's; none where the sender has no trace.

    Its name holds the subject's template, not its id: names must stay few. The whole subject is an attribute.
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
    """Say on the current span that its work ended in the error `code`."""
    trace.get_current_span().set_status(trace.StatusCode.ERROR, code)
