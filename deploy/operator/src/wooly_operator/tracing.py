"""OpenTelemetry: spans of reconciliations that change something, of admissions, and of requests to the controller.

Spans go to the collector that the standard OTEL_EXPORTER_OTLP_* variables name. Without one, they cost nothing.
"""

from __future__ import annotations

import os

from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

tracer = trace.get_tracer("wooly.operator")


def setup() -> None:
    """Install a tracer provider if a collector is configured.

    Raises:
        ImportError: a collector is configured, but the exporter package is not installed.
    """
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not named or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ImportError(
            "cannot export traces to OTEL_EXPORTER_OTLP_ENDPOINT: opentelemetry-exporter-otlp-proto-http is not installed; "
            "install wooly-operator[otlp], or unset the variable"
        ) from e
    provider = TracerProvider(resource=Resource.create({"service.name": "wooly-operator"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def headers() -> dict[str, str]:
    """HTTP headers that continue the current trace at the receiver."""
    found: dict[str, str] = {}
    inject(found)
    return found
