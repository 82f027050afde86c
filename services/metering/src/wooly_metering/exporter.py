"""The ledger's sums as Prometheus metrics. A sum that a correction can decrease is a gauge, every other sum is a counter."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wooly_metering.actor import MeteringActor
from wooly_metering.core.rating import UNIT

_PER_TENANT = (
    ("core_credits", "core_ucr", UNIT, "booked core credits, less corrections"),
    ("vram_credits", "vram_ucr", UNIT, "booked VRAM credits, less corrections"),
    ("core_seconds", "core_ns", 1_000_000_000, "device time times the number of occupied cores"),
    ("device_seconds", "gpu_ns", 1_000_000_000, "device time"),
    ("resident_mib_seconds", "resident_mib_us", 1_000_000, "MiB resident while sessions executed"),
    ("idle_mib_seconds", "idle_mib_us", 1_000_000, "MiB resident while sessions did not execute"),
    ("programs", "runs", 1, "finished programs"),
    ("moved_bytes", "moved_bytes", 1, "bytes read and written by programs"),
    ("flops", "flops", 1, "arithmetic operations of programs, as far as known"),
)


class CreditsCollector(Collector):
    """Collects metrics from the ledger at each scrape."""

    def __init__(self, actor: MeteringActor) -> None:
        self._actor = actor

    def collect(self) -> Iterable[Metric]:
        actor = self._actor
        per_tenant = actor.reader.by_tenant()
        for name, column, scale, text in _PER_TENANT:
            # A correction can decrease these sums, so they are gauges.
            kind = GaugeMetricFamily if column.endswith("_ucr") else CounterMetricFamily
            family = kind(f"wooly_tenant_{name}", text, labels=["tenant"])
            for tenant, sums in sorted(per_tenant.items()):
                family.add_metric([tenant], sums[column] / scale)
            yield family
        budgets = GaugeMetricFamily(
            "wooly_tenant_budget_credits", "credits that the tenant may spend", labels=["tenant", "limit"]
        )
        held = GaugeMetricFamily("wooly_tenant_held", "1 while the tenant's sessions are suspended", labels=["tenant"])
        for budget in actor.reader.budgets():
            held.add_metric([budget.tenant], float(actor.enforcer.held(budget.tenant)))
            for limit, amount in (("soft", budget.soft_ucr), ("hard", budget.hard_ucr)):
                if amount is not None:
                    budgets.add_metric([budget.tenant, limit], amount / UNIT)
        yield from (budgets, held)
        for name, value, text in (
            ("entries", actor.entries, "entries booked since the start of this process"),
            ("duplicate_batches", actor.duplicates, "batches that were delivered again"),
            (
                "quarantined",
                actor.quarantined,
                "records and messages put into quarantine since the start of this process",
            ),
        ):
            yield CounterMetricFamily(f"wooly_metering_{name}", text, value=value)

    def describe(self) -> Iterable[Metric]:
        return []
