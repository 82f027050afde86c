"""Prometheus metrics of every GPU, on `/metrics`."""

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

#: Seconds for which a scrape's text is cached for other scrapes.
FRESH_S = 0.5


class GpuCollector(Collector):
    """Collects the metrics of all GPU actors, in their event loop, so that all figures of one scrape are from the same moment."""

    def __init__(self, actor: SchedulerActor) -> None:
        self._actor = actor

    def collect(self) -> Iterable[Metric]:
        return list(families(self._actor.gpus.values()))

    def describe(self) -> Iterable[Metric]:
        return []


def families(gpus: Iterable[GpuActor]) -> Iterator[Metric]:
    """All metrics of all GPUs. Ratios are 0 to 1, over the last ten seconds. Counters restart with each new journal of an
    executor.
    """
    gauges = {
        name: GaugeMetricFamily(f"wooly_gpu_{name}", text, labels=["gpu"])
        for name, text in (
            ("utilization_ratio", "share of the time in which the device executes"),
            ("starvation_ratio", "share of the time in which the device executes while another session has work ready"),
            (
                "share_error_ratio",
                "largest difference between a session's share of GPU time and its share by weight, in the worst second",
            ),
            ("sessions", "open sessions"),
            ("journal_followed", "1 while the journal is replayed, 0 if entries are missing or cannot be trusted"),
            ("journal_age_seconds", "seconds since the journal's last entries"),
        )
    }
    counters = {
        name: CounterMetricFamily(f"wooly_gpu_{name}", text, labels=["gpu"])
        for name, text in (
            ("wall_seconds", "time that the journal covers"),
            ("executing_seconds", "time in which the device executed"),
            ("starving_seconds", "time in which the device executed while another session had work ready"),
            (
                "withheld_seconds",
                "time in which the device was kept idle for the next program of P0 or P1 while another session had work ready",
            ),
            ("journal_entries", "replayed entries of the journal"),
            ("journal_gaps", "journals with missing entries"),
        )
    }
    window = GaugeMetricFamily(
        "wooly_gpu_window_seconds", "maximum GPU time in flight, by class", labels=["gpu", "class"]
    )
    violations = CounterMetricFamily(
        "wooly_audit_violations", "violations that the audit of journals found", labels=["gpu", "law"]
    )
    of_session = ["gpu", "session", "tenant"]
    session_counters = {
        name: CounterMetricFamily(f"wooly_session_{name}", text, labels=of_session)
        for name, text in (
            ("run_seconds", "GPU time"),
            (
                "unjust_wait_seconds",
                "time in which the session did not run, although the rule says that it should have",
            ),
            ("programs", "finished programs"),
        )
    }
    session_gauges = {
        name: GaugeMetricFamily(f"wooly_session_{name}", text, labels=of_session)
        for name, text in (
            ("objective_attainment_ratio", "share of finished programs within the declared objective"),
            ("share_ratio", "share of the GPU time of all sessions in the last ten seconds"),
            ("queued_programs", "queued programs"),
            ("response_p50_seconds", "median time from a program's submission to the end of its last kernel"),
            (
                "response_p99_seconds",
                "99th percentile of the time from a program's submission to the end of its last kernel",
            ),
        )
    }
    tenant_counters = {
        name: CounterMetricFamily(f"wooly_tenant_{name}", text, labels=["gpu", "tenant"])
        for name, text in (
            ("run_seconds", "GPU time of all the tenant's sessions, including closed ones"),
            ("core_seconds", "GPU time times the number of occupied cores"),
            ("unjust_wait_seconds", "unjust wait of all the tenant's sessions"),
            ("programs", "finished programs"),
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
            ("withheld_seconds", meters.withheld_ns / 1e9),
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
    """Serves `/metrics` on its own port. The text is made at most once in `FRESH_S`.

    Raises:
        OSError: the port is in use.

    Args:
        scraper: the required bearer token; empty: no token is required.
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
        """Serve until cancelled."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._listener.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, text, kind = 200, b"", CONTENT_TYPE_LATEST
        if self._scraper and not shows(Headers(scope=scope).get("authorization", ""), self._scraper):
            status, text, kind = (
                401,
                b"a valid bearer token is required; see WOOLY_SCHEDULER_METRICS_TOKEN\n",
                "text/plain",
            )
        elif scope["path"] not in ("/metrics", "/") or scope["method"] not in ("GET", "HEAD"):
            status, text, kind = 404, b"not found; this server has only GET /metrics\n", "text/plain"
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
