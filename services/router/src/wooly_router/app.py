"""Wires the router's process: settings, database, NATS, REST."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn
from wooly_bus.app import ServiceApp, until_signalled
from wooly_bus.errors import BusError
from wooly_bus.tracing import setup_tracing

from wooly_router.actor import RouterActor
from wooly_router.rest import create_api
from wooly_router.settings import RouterSettings
from wooly_router.store import SessionStore, migrate

log = logging.getLogger("wooly.router")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the service has its own."""

    def install_signal_handlers(self) -> None:
        """Signals belong to `until_signalled`."""


async def serve(settings: RouterSettings) -> None:
    """Serve until a signal comes."""
    store = SessionStore(settings.database())
    app = ServiceApp("router", settings.nats_url)
    actor = RouterActor(settings, app, store)
    listener = socket.create_server((settings.http_host, settings.http_port))
    port = listener.getsockname()[1]
    server = _Server(uvicorn.Config(create_api(actor), log_level="warning", access_log=False, lifespan="off"))
    async with app.running():
        (settings.state_dir / "router.port").write_text(str(port))
        log.info("router: REST on http://%s:%d, NATS at %s", settings.http_host, port, settings.nats_url)
        http = asyncio.create_task(server.serve(sockets=[listener]))
        sweep = asyncio.create_task(actor.sweep())
        stopping = asyncio.create_task(until_signalled())
        await asyncio.wait((http, sweep, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        sweep.cancel()
        await asyncio.wait((http,), timeout=3)
    await store.close()


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = RouterSettings()
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    setup_tracing("router")
    migrate(settings.database())
    try:
        asyncio.run(serve(settings))
    except BusError as e:
        log.error("%s", e)
        return 1
    return 0
