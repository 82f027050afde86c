"""This process's own spans of a session or a job: where its trace begins. A few per session, none per operation.

The provider is our own: a script's OpenTelemetry, if it has any, stays as it is, and its current span is what ours are under.
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
#: Spans that wait to be sent to the router.
KEPT = 256
#: Milliseconds that a collector has at the end.
FLUSH_MS = 2000


class ClientTrace:
    """A root span and what is under it. They go to a collector, where one is configured, and to a router that keeps traces.

    Args:
        name: `client.<name>` is the root's.
    """

    def __init__(self, name: str) -> None:
        self._queue = SpanQueue(KEPT)
        try:
            exporter = otlp_exporter()
        except TracingError as e:  # a script may have a collector for reasons of its own
            log.warning("%s", e)
            exporter = None
        self._provider = provider_of("client", self._queue, exporter)
        self._exports = exporter is not None
        self._tracer = self._provider.get_tracer("wooly.client")
        self.root = self._tracer.start_span(f"client.{name}")

    @property
    def trace_id(self) -> str:
        """The trace's id; empty if nothing is recorded."""
        context = self.root.get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""

    @contextlib.contextmanager
    def step(self, name: str, **attributes: Any) -> Iterator[str]:
        """A span `client.<name>` under the root, current in the block. Yields its `traceparent`."""
        context = trace.set_span_in_context(self.root)
        with self._tracer.start_as_current_span(f"client.{name}", context, attributes=attributes) as span:
            yield traceparent(span)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What is asked in the block is asked by the root, which may have ended."""
        with trace.use_span(self.root, record_exception=False, set_status_on_exception=False):
            yield

    def end(self, error: str = "") -> None:
        """The root is over; `error`: it failed."""
        if error:
            self.root.set_status(trace.StatusCode.ERROR, error)
        self.root.end()

    def send(self, controller: Controller, task_id: str, credential: str) -> None:
        """Hand what has ended to the router. A trace is worth no error: what it does not take is lost."""
        try:
            while len(self._queue):
                request = AddSpansRequest(task_id=task_id, credential=credential, spans=tuple(self._queue.take()))
                controller.ask(contracts.ROUTER_TRACE_ADD, request, timeout=1.0)
        except Exception as e:
            log.info("spans of this process are lost: %s", e)

    def flush(self) -> None:
        """Wait for the collector, if there is one, but not for long."""
        if self._exports:
            self._provider.force_flush(FLUSH_MS)
