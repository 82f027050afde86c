"""Connects the parts of the scheduler's process: settings, NATS, `/metrics`."""

from __future__ import annotations

import logging

from pydantic import ValidationError
from wooly_bus.app import ServiceApp, until_signalled
from wooly_bus.errors import BusError
from wooly_bus.private import keep_private
from wooly_bus.steady_clock import SteadyClock
from wooly_bus.supervision import Work, run, run_for_ever, supervised
from wooly_bus.tracing import setup_tracing

from wooly_scheduler.actor import SchedulerActor
from wooly_scheduler.exporter import MetricsServer
from wooly_scheduler.settings import SchedulerSettings

log = logging.getLogger("wooly.scheduler")


async def serve(settings: SchedulerSettings) -> None:
    """Serve until the process gets a signal.

    Raises:
        BusConnectError: NATS does not answer.
        OSError: the port of `/metrics` is in use.
    """
    app = ServiceApp("scheduler", settings.nats_url)
    actor = SchedulerActor(settings, app, SteadyClock())
    port_file = settings.state_dir / "scheduler.port"
    metrics = None
    if settings.metrics_port is not None:
        scraper = "" if settings.metrics_token is None else settings.metrics_token.read_text().strip()
        metrics = MetricsServer(actor, settings.metrics_host, settings.metrics_port, scraper)
    try:
        async with app.running():
            if metrics is not None:
                port_file.write_text(str(metrics.port))
                log.info("scheduler: metrics on http://%s:%d/metrics", settings.metrics_host, metrics.port)
            works: dict[str, Work] = {
                "follower": actor.follow,
                "checkpoints": actor.make_checkpoints,
                "forgetting": actor.forget,
            }
            if metrics is not None:
                works["metrics"] = metrics.run
            await run_for_ever(works, until_signalled)
            await actor.stop()
    finally:
        port_file.unlink(missing_ok=True)


@supervised("scheduler", (BusError, ValidationError, OSError))
def main() -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = SchedulerSettings()
    setup_tracing("scheduler")
    keep_private(settings.state_dir)
    run(serve(settings))
    return 0
