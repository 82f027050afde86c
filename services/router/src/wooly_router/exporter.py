"""The router's own metrics in Prometheus's text format: spans, and the time to check tenants' modules."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from wooly_router.modules import ModuleChecks
from wooly_router.traces import TraceActor


class ModuleCollector(Collector):
    """Reads the metrics of `ModuleChecks` when Prometheus collects them."""

    def __init__(self, checks: ModuleChecks) -> None:
        self._checks = checks

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the current values."""
        spent = CounterMetricFamily(
            "wooly_module_check_seconds",
            "Processor time for decoding and checking the modules of a tenant's jobs.",
            labels=("tenant",),
        )
        for tenant, ns in sorted(self._checks.spent_ns.items()):
            spent.add_metric((tenant,), ns / 1e9)
        yield spent


class SpanCollector(Collector):
    """Reads the metrics of a `TraceActor` when Prometheus collects them."""

    def __init__(self, traces: TraceActor) -> None:
        self._traces = traces

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the current values."""
        yield CounterMetricFamily("wooly_spans_kept", "Spans that were kept.", value=self._traces.kept)
        dropped = CounterMetricFamily(
            "wooly_spans_dropped", "Dropped spans, by service and reason.", labels=("service", "reason")
        )
        for (service, reason), count in sorted(self._traces.dropped.items()):
            dropped.add_metric((service, reason), count)
        yield dropped
