"""OpenTelemetry for services: one setup, bounded span names, W3C context in NATS headers.

Spans are exported only where the standard OTEL_EXPORTER_OTLP_* variables say so; otherwise they cost nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from wooly_bus.envelope import TRACE_CONTEXT
from wooly_bus.errors import BusError
from wooly_bus.subjects import template


class TracingError(BusError):
    """Traces cannot be exported as configured."""

    code = "bus.tracing"


def setup_tracing(service: str) -> bool:
    """Install a tracer provider if an OTLP endpoint is configured. True if it was.

    Raises:
        TracingError: an endpoint is configured, but the exporter package is not installed.
    """
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise TracingError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set; install opentelemetry-exporter-otlp-proto-http to export traces"
        ) from e
    provider = TracerProvider(resource=Resource.create({"service.name": f"wooly-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


@contextlib.contextmanager
def consumer_span(service: str, subject: str, headers: Mapping[str, str] | None) -> Iterator[None]:
    """A span around the handling of one message, child of the sender's.

    Its name holds the subject's template, not its id: names must stay few. The whole subject is an attribute.
    """
    context = TRACE_CONTEXT.extract(dict(headers or {}))
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
