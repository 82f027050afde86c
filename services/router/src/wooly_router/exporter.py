"""The router's own figures in Prometheus's text: what became of spans."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from wooly_router.traces import TraceActor


class SpanCollector(Collector):
    """Reads a `TraceActor` when asked."""

    def __init__(self, traces: TraceActor) -> None:
        self._traces = traces

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The figures now."""
        yield CounterMetricFamily("wooly_spans_kept", "Spans that were kept.", value=self._traces.kept)
        dropped = CounterMetricFamily(
            "wooly_spans_dropped", "Spans that were not kept, and why.", labels=("service", "reason")
        )
        for (service, reason), count in sorted(self._traces.dropped.items()):
            dropped.add_metric((service, reason), count)
        yield dropped
