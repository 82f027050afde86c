"""Spans of the client process. The trace of a session or job begins here, with a few spans per session and none per operation.

The client has its own tracer provider and does not change the script's OpenTelemetry. If the script has a current span, it is the
parent of the client's spans.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from wooly_bus import contracts
from wooly_bus.tracing import SpanQueue, TracingError, otlp_exporter, provider_of, traceparent
from wooly_wis.traces import AddSpansRequest

if TYPE_CHECKING:
    from wooly.control import Controller

log = logging.getLogger("wooly")
#: Maximum number of ended spans that wait to be sent to the router.
MAX_QUEUED_SPANS = 256
#: Milliseconds to wait for the collector when the session ends.
FLUSH_MS = 2000


class ClientTrace:
    """A root span and its child spans, exported to the configured collector (if any) and to a router that keeps traces.

    Args:
        name: the root span is named `client.<name>`.
    """

    def __init__(self, name: str) -> None:
        self._queue = SpanQueue(MAX_QUEUED_SPANS)
        try:
            exporter = otlp_exporter()
        except TracingError as e:  # the script may have configured a collector for its own spans
            log.warning("%s", e)
            exporter = None
        self._provider = provider_of("client", self._queue, exporter)
        self._exports = exporter is not None
        self._tracer = self._provider.get_tracer("wooly.client")
        self.root = self._tracer.start_span(f"client.{name}")

    @property
    def trace_id(self) -> str:
        """The trace id; empty if the trace is not sampled."""
        context = self.root.get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""

    @contextlib.contextmanager
    def step(self, name: str, **attributes: Any) -> Iterator[str]:
        """Make a child span `client.<name>` of the root, and make it the current span in the block. Yields its `traceparent`."""
        context = trace.set_span_in_context(self.root)
        with self._tracer.start_as_current_span(f"client.{name}", context, attributes=attributes) as span:
            yield traceparent(span)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the root the current span in the block. The root may have ended already."""
        with trace.use_span(self.root, record_exception=False, set_status_on_exception=False):
            yield

    def end(self, error: str = "") -> None:
        """End the root span. If `error` is not empty, the root's status is an error with this text."""
        if error:
            self.root.set_status(trace.StatusCode.ERROR, error)
        self.root.end()

    def send(self, controller: Controller, task_id: str, credential: str) -> None:
        """Send ended spans to the router. If the router does not accept them, the spans are dropped and no error is raised."""
        try:
            while len(self._queue):
                request = AddSpansRequest(task_id=task_id, credential=credential, spans=tuple(self._queue.take()))
                controller.ask(contracts.ROUTER_TRACE_ADD, request, timeout=1.0)
        except Exception as e:
            # Most routers of a single run keep no traces. A script that shows all messages of level INFO must not see this one.
            log.debug("the router did not accept the spans of this process, so they are dropped: %s", e)

    def flush(self) -> None:
        """Wait at most `FLUSH_MS` until the collector has the spans, if a collector is configured."""
        if self._exports:
            self._provider.force_flush(FLUSH_MS)
