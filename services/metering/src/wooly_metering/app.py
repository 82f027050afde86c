"""Connects the parts of the metering process: settings, ledger, NATS, REST."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import sqlalchemy.exc
from pydantic import ValidationError
from wooly_bus.app import ServiceApp, until_signalled
from wooly_bus.channel import ChannelError
from wooly_bus.errors import BusError
from wooly_bus.private import keep_private
from wooly_bus.supervision import Work, run, run_for_ever, supervised
from wooly_bus.tracing import setup_tracing
from wooly_bus.web import Buckets, refuse_open

from wooly_metering.actor import MeteringActor
from wooly_metering.follower import Follower
from wooly_metering.ledger.database import DATABASE_AWAY, DATABASE_AWAY_TEXT, UNREACHABLE, Database, migrate
from wooly_metering.settings import MeteringSettings

log = logging.getLogger("wooly.metering")
#: Average number of requests per second that one address may send; a burst may be four times as large.
RATE = 100.0


async def serve(settings: MeteringSettings, database: Database) -> None:
    """Serve until the process gets a signal.

    Raises:
        BusConnectError: NATS does not answer.
        OSError: the port of REST is in use.
    """
    app = ServiceApp("metering", settings.nats_url)
    app.passing |= dict.fromkeys(UNREACHABLE, (DATABASE_AWAY, DATABASE_AWAY_TEXT))
    actor = MeteringActor(app, database)
    async with _http(settings, app, actor) as http, app.running():
        follower = Follower(app.jetstream(), actor.writer, settings.batch_events, actor.on_booked)
        log.info("metering books into %s", settings.ledger_url.partition("@")[0])
        works = http | {"follower": follower.run, "budgets": lambda: actor.watch(settings.budgets_s)}
        await run_for_ever(works, until_signalled)


@contextlib.asynccontextmanager
async def _http(settings: MeteringSettings, app: ServiceApp, actor: MeteringActor) -> AsyncIterator[dict[str, Work]]:
    """Serve REST and `/metrics` inside the block, and write the port to a file. Yields the work to run, by name."""
    if settings.http_port is None:
        yield {}
        return
    # Not before: the stack of one run has no REST.
    from prometheus_client import CollectorRegistry
    from wooly_bus.http_listener import HttpServer

    from wooly_metering.access import Access
    from wooly_metering.exporter import CreditsCollector
    from wooly_metering.rest import create_rest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(CreditsCollector(actor))
    closed = refuse_open("METERING", settings.http_host, settings.open_to_network)
    access = Access(app, Buckets(RATE, 4 * RATE), closed=closed)
    scraper = "" if settings.metrics_token is None else settings.metrics_token.read_text().strip()
    port_file = settings.state_dir / "metering.port"
    with socket.create_server((settings.http_host, settings.http_port)) as listener:
        tls = settings.tls()
        server = HttpServer(create_rest(actor, registry, access, scraper), "metering", tls=tls)
        task = asyncio.create_task(server.serve(sockets=[listener]))

        async def served() -> None:
            await asyncio.shield(task)

        try:
            port = listener.getsockname()[1]
            port_file.write_text(str(port))
            scheme = "http" if tls is None else "https"
            log.info("metering: %s://%s:%d/api/v1/credits", scheme, settings.http_host, port)
            yield {"REST": served}
        finally:
            port_file.unlink(missing_ok=True)
            server.should_exit = True
            await task


@supervised("metering", (BusError, ChannelError, ValidationError, OSError, sqlalchemy.exc.SQLAlchemyError))
def main() -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings = MeteringSettings()
    setup_tracing("metering")
    keep_private(settings.state_dir, "credits.db*")
    migrate(settings.ledger_url)
    database = Database(settings.ledger_url, durable=settings.durable)
    try:
        run(serve(settings, database))
    finally:
        database.close()
    return 0
