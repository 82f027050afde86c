"""What every GPU does in Prometheus's text, on `/metrics`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from wooly_bus.http_listener import HttpServer
from wooly_bus.web import shows
from wooly_dispatch.events import PRIORITIES

from wooly_scheduler.actor import SchedulerActor
from wooly_scheduler.gpu import GpuActor

#: Seconds for which the text of one scrape is given to others.
FRESH_S = 0.5


class GpuCollector(Collector):
    """Reads the actors when somebody asks, in their own event loop: figures of one scrape are of one moment."""

    def __init__(self, actor: SchedulerActor) -> None:
        self._actor = actor

    def collect(self) -> Iterable[Metric]:
        return list(families(self._actor.gpus.values()))

    def describe(self) -> Iterable[Metric]:
        return []


def families(gpus: Iterable[GpuActor]) -> Iterator[Metric]:
    """All metrics of all GPUs. Ratios are 0 to 1, over the last ten seconds; counters begin anew with an executor's journal."""
    gauges = {
        name: GaugeMetricFamily(f"wooly_gpu_{name}", text, labels=["gpu"])
        for name, text in (
            ("utilization_ratio", "share of the time in which the device executes"),
            ("starvation_ratio", "share of the time in which it executes while another session has work ready"),
            ("share_error_ratio", "largest difference between a session's share and its weight's, in the worst second"),
            ("sessions", "open sessions"),
            ("journal_followed", "1 while its journal is replayed, 0 if entries are missing or cannot be trusted"),
            ("journal_age_seconds", "since its last entries"),
        )
    }
    counters = {
        name: CounterMetricFamily(f"wooly_gpu_{name}", text, labels=["gpu"])
        for name, text in (
            ("wall_seconds", "time that the journal covers"),
            ("executing_seconds", "of this, time in which the device executed"),
            ("starving_seconds", "of this, time in which another session had work ready"),
            ("journal_entries", "entries replayed of the journal"),
            ("journal_gaps", "journals of which entries were missing"),
        )
    }
    window = GaugeMetricFamily(
        "wooly_gpu_window_seconds", "GPU time that may be in flight, by class", labels=["gpu", "class"]
    )
    violations = CounterMetricFamily(
        "wooly_audit_violations", "what the audit of journals found", labels=["gpu", "law"]
    )
    of_session = ["gpu", "session", "tenant"]
    session_counters = {
        name: CounterMetricFamily(f"wooly_session_{name}", text, labels=of_session)
        for name, text in (
            ("run_seconds", "GPU time"),
            ("unjust_wait_seconds", "time in which the rule says that it should have run and it did not"),
            ("programs", "programs done"),
        )
    }
    session_gauges = {
        name: GaugeMetricFamily(f"wooly_session_{name}", text, labels=of_session)
        for name, text in (
            ("objective_attainment_ratio", "programs within the declared objective, over all"),
            ("share_ratio", "share of what all sessions ran in the last ten seconds"),
            ("queued_programs", "programs that wait"),
            ("response_p50_seconds", "from submission to the last kernel"),
            ("response_p99_seconds", "from submission to the last kernel"),
        )
    }
    tenant_counters = {
        name: CounterMetricFamily(f"wooly_tenant_{name}", text, labels=["gpu", "tenant"])
        for name, text in (
            ("run_seconds", "GPU time of all its sessions, closed ones too"),
            ("core_seconds", "cores occupied times GPU time"),
            ("unjust_wait_seconds", "unjust wait of all its sessions"),
            ("programs", "programs done"),
        )
    }
    for gpu in gpus:
        state, follower = gpu.listing(), gpu.follower
        meters, name = follower.meters, gpu.executor_id
        for gauge, value in (
            ("utilization_ratio", state.utilization_permille / 1000),
            ("starvation_ratio", state.starvation_permille / 1000),
            ("share_error_ratio", state.share_error_permille / 1000),
            ("sessions", state.open_sessions),
            ("journal_followed", float(not follower.lost)),
            ("journal_age_seconds", state.age_s),
        ):
            gauges[gauge].add_metric([name], value)
        for counter, value in (
            ("wall_seconds", meters.wall_ns / 1e9),
            ("executing_seconds", meters.executing_ns / 1e9),
            ("starving_seconds", meters.starving_ns / 1e9),
            ("journal_entries", follower.entries),
            ("journal_gaps", follower.gaps),
        ):
            counters[counter].add_metric([name], value)
        for priority in range(PRIORITIES):
            window.add_metric([name, f"P{priority}"], state.windows_ns[priority] / 1e9)
        for law, count in sorted(follower.counts.items()):
            violations.add_metric([name, law], count)
        for s in state.sessions:
            labels = [name, s.session_id, s.tenant]
            session_counters["run_seconds"].add_metric(labels, s.run_ns / 1e9)
            session_counters["unjust_wait_seconds"].add_metric(labels, s.unjust_ns / 1e9)
            session_counters["programs"].add_metric(labels, s.programs)
            session_gauges["objective_attainment_ratio"].add_metric(labels, s.attainment_permille / 1000)
            session_gauges["share_ratio"].add_metric(labels, s.share_permille / 1000)
            session_gauges["queued_programs"].add_metric(labels, s.queued)
            session_gauges["response_p50_seconds"].add_metric(labels, s.p50_ns / 1e9)
            session_gauges["response_p99_seconds"].add_metric(labels, s.p99_ns / 1e9)
        for tenant, meter in sorted(meters.by_tenant().items()):
            labels = [name, tenant or "default"]
            tenant_counters["run_seconds"].add_metric(labels, meter.run_ns / 1e9)
            tenant_counters["core_seconds"].add_metric(labels, meter.core_ns / 1e9)
            tenant_counters["unjust_wait_seconds"].add_metric(labels, meter.unjust_ns / 1e9)
            tenant_counters["programs"].add_metric(labels, meter.programs)
    yield from (*gauges.values(), *counters.values(), window, violations)
    yield from (*session_counters.values(), *session_gauges.values(), *tenant_counters.values())


class MetricsServer:
    """`/metrics` on a port of its own. However often it is asked, the text is made once in `FRESH_S`.

    Raises:
        OSError: the port is taken.

    Args:
        scraper: the token that it asks for; empty: none.
    """

    def __init__(self, actor: SchedulerActor, host: str, port: int, scraper: str = "") -> None:
        self._scraper = scraper
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GpuCollector(actor))
        self._listener = socket.create_server((host, port))
        self._server = HttpServer(self._answer, "scheduler")
        self._made, self._text = -FRESH_S, b""
        self.port: int = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Answer, until cancelled."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._listener.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, text, kind = 200, b"", CONTENT_TYPE_LATEST
        if self._scraper and not shows(Headers(scope=scope).get("authorization", ""), self._scraper):
            status, text, kind = 401, b"the scraper's token is needed\n", "text/plain"
        elif scope["path"] not in ("/metrics", "/") or scope["method"] not in ("GET", "HEAD"):
            status, text, kind = 404, b"there is GET /metrics\n", "text/plain"
        else:
            text = self._latest()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(text)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    def _latest(self) -> bytes:
        if time.monotonic() - self._made >= FRESH_S:
            self._made, self._text = time.monotonic(), generate_latest(self._registry)
        return self._text
